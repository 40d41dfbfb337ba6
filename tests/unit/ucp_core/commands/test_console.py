import io
import sys

import pytest

from ucp_core.commands import progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_counts_size_and_rate_in_one_unit(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rate in MB/s beside a size in MiB looks as if it took a twentieth longer than it does."""
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "200")
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)

    with progress("copying", as_json=False) as told:
        assert told is not None
        for done in (0, 100 << 20, 200 << 20):
            told(done, 200 << 20)

    shown = terminal.getvalue()
    assert "200.0/200.0 MiB" in shown
    assert "iB/s" in shown
    assert "MB" not in shown
