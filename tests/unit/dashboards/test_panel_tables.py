"""What the tables in ``dashboards/README.md`` are made by."""

from __future__ import annotations

from tests.support.panel_tables import SAMPLES, board_table, picture


def test_each_series_of_each_panel_has_a_row() -> None:
    """A panel of two series must not show the first one twice, nor a node's whole id."""
    board = {
        "panels": [
            {"title": "Steps", "targets": [{"expr": "a", "legendFormat": "rank {{rank}}"}]},
            {"title": "Loss", "targets": [{"expr": "b", "legendFormat": "on {{node}}"}]},
        ]
    }
    answers = {
        "a": [
            {"metric": {"rank": str(rank)}, "values": [[0, "1"], [1, str(2 + rank)]]}
            for rank in range(2)
        ],
        "b": [{"metric": {"node": "0123456789abcdef"}, "values": [[0, "NaN"], [1, "0.12345"]]}],
    }

    assert board_table(board, answers.__getitem__)[2:] == [
        "| Steps | rank 0 | `▁█` | 1 | 2 | 2 |",
        "|  | rank 1 | `▁█` | 1 | 3 | 3 |",
        "| Loss | on 012345 | `▁` | 0.123 | 0.123 | 0.123 |",
    ]


def test_a_picture_has_few_bars_however_long_the_run_is() -> None:
    """A bar a second would make a line of hundreds."""
    assert picture([float(n) for n in range(8)]) == "▁▂▃▄▅▆▇█"
    assert len(picture([float(n) for n in range(1000)])) <= SAMPLES
