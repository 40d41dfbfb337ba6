"""Whether ``everstep diagnose`` names only the guilty.

    python -m tests.benchmarks diagnosis [--planted 200] [--clean 100] [--seed 1000]
        [--repeats 2] [--kinds kill stop ...] [--layouts dp tp pp copies]

Generated traces (``tests/support/traces.py``) with one fault each, or with none but jitter, uneven
work, recompiles, pauses or a cut in the middle of a step: right is the planted kind with the
planted ranks or links alone, and nothing for a clean one. The seeds are not those of the unit
tests. Then the real hangs and stragglers of ``tests/fixtures``, or of ``--data``. Then real faults
in real runs (``injections``), by kind and layout: how often each was injected, the longest time to
a suspicion and to a verdict, how often the right worker was named for the right reason, and how
often a healthy one. A fault not named within 20 s is neither.
``seconds`` is processor time of a trace, reading included.
"""

import argparse
import json
import re
from collections import Counter
from pathlib import Path
from time import process_time

from orchestrator.diagnosis import Records, diagnose
from orchestrator.driver import diagnose_paths
from tests.benchmarks.common import spread
from tests.benchmarks.injections import LAYOUTS, ON_CPU, injections, table
from tests.support.traces import CLEAN, PLANTED, answer, clean, planted, straggler_operations

FIXTURES = Path(__file__).parents[1] / "fixtures"


def generated(num_planted: int, num_clean: int, seed: int) -> dict[str, object]:
    """Return how many of the traces were told right, and what was said of the others."""
    right: Counter[str] = Counter()
    total: Counter[str] = Counter()
    wrong: list[dict[str, object]] = []
    seconds: list[float] = []
    work = [(PLANTED[n % len(PLANTED)], seed + n) for n in range(num_planted)]
    work += [(CLEAN[n % len(CLEAN)], seed + n) for n in range(num_clean)]
    for number, (kind, of_seed) in enumerate(work):
        trace = (planted if number < num_planted else clean)(kind, of_seed)
        began_s = process_time()
        said = answer(trace)
        seconds.append(process_time() - began_s)
        truth = [(trace.kind, trace.ranks, trace.links)] if trace.kind else []
        total[kind] += 1
        right[kind] += said == truth
        if said != truth:
            wrong.append({"trace": trace.what, "said": said})
    return {
        "planted": f"{sum(right[kind] for kind in PLANTED)} of {num_planted}",
        "clean": f"{sum(right[kind] for kind in CLEAN)} of {num_clean}",
        "by_kind": {kind: f"{right[kind]} of {total[kind]}" for kind in total},
        "wrong": wrong,
        "seconds": spread(seconds) if seconds else {},
    }


def real(folder: Path) -> dict[str, object]:
    """Return what is said of the dumps and stragglers in a folder, beside the truth."""
    found: dict[str, object] = {}
    for log in sorted(folder.rglob("fault_injection.log")):
        truth = re.findall(r"\d+", log.read_text(encoding="utf-8").splitlines()[0])
        said = [(str(v.kind), v.guilty.ranks) for v in diagnose_paths([str(log.parent)])]
        found[log.parent.name] = {"truth": [int(rank) for rank in truth], "said": said}
    for path in sorted(folder.rglob("*.parquet")):
        if path.stem in {"AR", "ST"}:
            verdicts = diagnose(Records(operations=straggler_operations(path)))
            said = [(str(v.kind), v.guilty.ranks) for v in verdicts]
            found[path.stem] = {"truth": [0] if path.stem == "AR" else [], "said": said}
    return found


def main() -> None:
    """Print one JSON object."""
    parser = argparse.ArgumentParser(description="Diagnose traces of which the truth is known.")
    parser.add_argument("--planted", type=int, default=200)
    parser.add_argument("--clean", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1000)
    parser.add_argument("--data", type=Path, default=FIXTURES, help="folder of real records")
    parser.add_argument("--repeats", type=int, default=2, help="of each kind, phase and layout")
    parser.add_argument("--kinds", nargs="+", choices=ON_CPU, default=list(ON_CPU))
    parser.add_argument("--layouts", nargs="+", choices=LAYOUTS, default=list(LAYOUTS))
    options = parser.parse_args()
    injected = injections(options.kinds, options.layouts, options.repeats)
    report = {
        "injected": table(injected),
        "injections": {
            "all": len(injected),
            "right": sum(one.is_right for one in injected),
            "healthy_named": sum(one.is_wrong for one in injected),
        },
        "generated": generated(options.planted, options.clean, options.seed),
        "real": real(options.data),
    }
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
