"""How long a restarted controller takes to load its run, by the length of the journal.

    python -m tests.benchmarks restart [--records 1000 10000 100000]

Processor time of one process, from the journal's compaction that the run left, and without it: then
the whole journal is folded. Every 300th event is a crash. Imports do not count.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from time import process_time
from typing import Any

from tests.support.journals import Journaled, config_at


def time_restart(num_records: int) -> dict[str, Any]:
    """Return the costs with a journal of so many records."""
    with tempfile.TemporaryDirectory() as directory:
        run = Journaled(config_at(Path(directory)))
        run.grow(num_records)
        run.compact()
        compacted = Path(directory, "compacted.json")
        num_bytes = compacted.stat().st_size
        began_s = process_time()
        run.compact()
        written_s = process_time()
        # As far behind as it may be: what a controller that is killed leaves.
        run.is_compacting = False
        run.grow(run.seq + 1500)
        grown_s = process_time()
        run.begin()
        from_compacted_s = process_time()
        compacted.unlink()
        folded_s = process_time()
        run.begin()
        return {
            "records": run.seq,
            "incidents": len(run.stats.incidents),
            "compacted_kb": round(num_bytes / 1000),
            "compact_s": round(written_s - began_s, 4),
            "begin_from_compacted_s": round(from_compacted_s - grown_s, 4),
            "begin_without_s": round(process_time() - folded_s, 4),
        }


def main() -> None:
    """Print one JSON object a line."""
    parser = argparse.ArgumentParser(description="Time the restart of a controller.")
    parser.add_argument("--records", type=int, nargs="*", default=[1000, 10_000, 100_000])
    for num_records in parser.parse_args().records:
        print(json.dumps(time_restart(num_records)), flush=True)


if __name__ == "__main__":
    main()
