import subprocess
import sys

import pytest

from tests.benchmarks.__main__ import choose

NAMES = ("bench_fleet", "bench_recovery", "bench_restart", "bench_restart_cold", "peers")


def test_words_choose_benchmarks_and_options_go_to_the_one_that_is_meant() -> None:
    """An option that was taken for a word ran the benchmark with its defaults, and said nothing."""
    assert choose(NAMES, []) == (list(NAMES), [])
    assert choose(NAMES, ["fleet", "peer"]) == (["bench_fleet", "peers"], [])
    assert choose(NAMES, ["recovery", "--kills", "3"]) == (["bench_recovery"], ["--kills", "3"])


def test_a_whole_name_means_that_benchmark_alone() -> None:
    """Else it could not be given options once another one's name contains it."""
    assert choose(NAMES, ["restart", "--n", "3"]) == (["bench_restart"], ["--n", "3"])
    assert choose(NAMES, ["bench_restart"])[0] == ["bench_restart"]
    assert choose(NAMES, ["start"])[0] == ["bench_restart", "bench_restart_cold"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["recovry"], "no benchmark has .'recovry'. in its name"),
        (["fleet", "--kills", "3", "x"], None),
        (["re", "--kills", "3"], "are options of one benchmark"),
        (["--kills", "3"], "are options of one benchmark"),
    ],
)
def test_what_could_be_meant_otherwise_is_refused(
    arguments: list[str], message: str | None
) -> None:
    """Minutes of an unrequested benchmark, or none at all, would pass for a result."""
    if message is None:
        assert choose(NAMES, arguments)[1] == arguments[1:]
        return
    with pytest.raises(SystemExit, match=message):
        choose(NAMES, arguments)


_RUN = """
import sys
from tests.benchmarks.__main__ import run
run([sys.executable, "-c", "print(flush=True); input()"])
"""


def test_a_benchmark_ends_with_the_command() -> None:
    """Seen: a soak went on without it, and its machines were in the way of the next one."""
    command = [sys.executable, "-c", _RUN]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"\n"
        process.terminate()
        # A benchmark that went on would keep the pipe open.
        assert process.stdout.read() == b""
        assert process.wait() == 1
