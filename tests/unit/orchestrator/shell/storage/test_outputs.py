"""The files that a finished run leaves beside its journal."""

import json
from pathlib import Path

import pytest

from orchestrator.core import RunStats
from orchestrator.report import SUMMARY
from orchestrator.shell.storage.outputs import RunOutputs
from orchestrator.shell.storage.sender import Sender
from tests.support.run_directories import write_run
from ucp_core.storage import open_store


@pytest.mark.parametrize(("usd", "per_million"), [(3.0, 375.0), (0.0, None)])
def test_the_summary_tells_what_tokens_cost_where_a_price_is_known(
    usd: float, per_million: float | None, tmp_path: Path
) -> None:
    """Status and dashboards showed it while the run lived, but nothing did when it was over."""
    store, path = open_store(str(tmp_path))
    outputs = RunOutputs(
        store,
        path,
        RunStats(step=4, cost_usd=usd),
        sender=Sender(store, journal_path=f"{path}/lines", spool=f"{path}/spool"),
        num_written=0,
        samples_per_step=2,
        tokens_per_step=2000,
    )

    outputs.close(str(tmp_path))

    summary = json.loads((tmp_path / SUMMARY).read_text())
    assert summary["usd_per_million_tokens"] == per_million
    assert summary["report"] is None, "there is no journal to write it of"


def test_a_run_that_is_over_has_its_report_before_anybody_can_know(tmp_path: Path) -> None:
    """The command that started the run ends its cluster, controller included, at the summary."""
    write_run(tmp_path, finished=False)
    store, path = open_store(str(tmp_path))
    outputs = RunOutputs(
        store,
        path,
        RunStats(step=60, outcome="completed"),
        sender=Sender(store, journal_path=f"{path}/lines", spool=f"{path}/spool"),
        num_written=0,
        samples_per_step=32,
        tokens_per_step=0,
    )

    outputs.close(str(tmp_path))

    summary = json.loads((tmp_path / SUMMARY).read_text())
    assert summary["report"] == f"{tmp_path}/report.html"
    assert Path(summary["report"]).stat().st_mtime_ns <= (tmp_path / SUMMARY).stat().st_mtime_ns
