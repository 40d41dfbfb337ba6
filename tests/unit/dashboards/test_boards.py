"""Every board has the same frame, and each metric and alert is written down for people."""

import json
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

DASHBOARDS = Path(__file__).parents[3] / "dashboards"
BOARDS = {
    path.stem: json.loads(path.read_text())
    for path in sorted((DASHBOARDS / "grafana").glob("*.json"))
}
#: A metric of ours, and what it is selected by.
SELECTOR = re.compile(r"(everstep[_:]\w+)({[^}]*})?")
SCREEN_LINES = 24
PROJECT = tomllib.loads(DASHBOARDS.with_name("pyproject.toml").read_text())["project"]
HOMEPAGE = PROJECT["urls"]["Homepage"]


def _queries(board: dict[str, Any]) -> Iterator[str]:
    yield from (target["expr"] for panel in board["panels"] for target in panel["targets"])
    yield from (mark["expr"] for mark in board["annotations"]["list"])


@pytest.mark.parametrize("name", sorted(BOARDS.keys() - {"fleet"}))
def test_a_board_of_one_run_asks_for_no_other(name: str) -> None:
    """Three runs called ``run`` were drawn into one curve."""
    asked = [found for query in _queries(BOARDS[name]) for found in SELECTOR.findall(query)]

    assert asked
    assert [metric for metric, by in asked if 'run_id="$run_id"' not in by] == []


def test_what_is_said_of_all_runs_names_each() -> None:
    """A sum over runs of one name would be no run's."""
    rules = yaml.safe_load((DASHBOARDS / "rules.yml").read_text())["groups"][0]["rules"]
    queries = [rule["expr"] for rule in rules]
    # Alone, a number is that of the fleet.
    queries += [query for query in _queries(BOARDS["fleet"]) if " by (" in query]
    grouped = [by for query in queries for by in re.findall(r"(?:by|on) \(([^)]*)\)", query)]

    assert len(grouped) > 10
    assert [by for by in grouped if "run_id" not in by] == []


@pytest.mark.parametrize("board", BOARDS.values(), ids=BOARDS.keys())
def test_a_board_marks_incidents_and_leads_to_the_others(board: dict[str, Any]) -> None:
    """A curve that breaks off says nothing of the reason."""
    (mark,) = board["annotations"]["list"]
    assert (mark["enable"], mark["useValueForTime"]) == (True, True)
    assert board["links"][0].items() >= {"tags": board["tags"], "includeVars": True}.items()


@pytest.mark.parametrize("board", BOARDS.values(), ids=BOARDS.keys())
def test_panels_lie_side_by_side_and_money_has_its_unit(board: dict[str, Any]) -> None:
    taken: dict[tuple[int, int], str] = {}
    for panel in board["panels"]:
        place, title = panel["gridPos"], panel["title"]
        assert place["x"] + place["w"] <= 24, title
        for x in range(place["x"], place["x"] + place["w"]):
            for y in range(place["y"], place["y"] + place["h"]):
                assert taken.setdefault((x, y), title) == title
        is_money = "_usd" in panel["targets"][0]["expr"]
        assert (panel["fieldConfig"]["defaults"]["unit"] == "currencyUSD") == is_money, title


def test_no_panel_has_a_line_for_each_rank_or_node() -> None:
    """A line for each of 256 workers shows nothing."""
    of_each = [
        query
        for board in BOARDS.values()
        for query in _queries(board)
        if re.search(r"_(worker_(?!processes)|node_noticed|keeper_\w+_bytes|suspected_)", query)
    ]

    assert len(of_each) > 5
    assert [query for query in of_each if not re.match(r"(topk|count|sum)\(", query)] == []


def test_an_alert_is_routed_and_leads_to_a_page_of_the_runbook() -> None:
    """Alertmanager could not tell what must wake somebody up."""
    rules = yaml.safe_load((DASHBOARDS / "rules.yml").read_text())["groups"][0]["rules"]
    alerts = [rule for rule in rules if "alert" in rule]
    _, *pages = (DASHBOARDS / "RUNBOOK.md").read_text().split("\n## ")

    assert {alert["labels"]["severity"] for alert in alerts} == {"page", "ticket"}
    assert [alert["annotations"]["runbook_url"] for alert in alerts] == [
        f"{HOMEPAGE}/blob/main/dashboards/RUNBOOK.md#{alert['alert'].lower()}" for alert in alerts
    ]
    assert [page.split("\n")[0] for page in pages] == [alert["alert"] for alert in alerts]
    for alert, page in zip(alerts, pages, strict=True):
        lines = page.splitlines()
        assert len(lines) <= SCREEN_LINES
        assert lines[2].startswith(f"**{alert['labels']['severity']}.**")
        assert any(line.startswith("- **Look.**") for line in lines)
