"""The documents lead where they say, and the site has all of them; this needs no mkdocs."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from orchestrator.config import RunConfig
from tests.arch.tree import ROOT

FOLDERS = ("cluster_configs", "dashboards", "orchestrator", "tests", "ucp_core", "workers")
SITE = ROOT / "dashboards/site"
PAGES = SITE / "pages"
DOCUMENTS = sorted(
    path
    for path in (*ROOT.glob("*.md"), *(one for name in FOLDERS for one in (ROOT / name).rglob("*")))
    if path.suffix in {".md", ".ipynb"} and not path.is_relative_to(PAGES)
)
NAMES = [path.relative_to(ROOT).as_posix() for path in DOCUMENTS]


@pytest.mark.parametrize("document", DOCUMENTS, ids=NAMES)
def test_every_link_leads_to_a_file_and_a_heading(document: Path) -> None:
    """A page that was renamed leaves links behind, and `make docs` is not run by every commit."""
    broken = []
    for link in re.findall(r"\]\(([^)\s]+)\)", _prose(document)):
        name, _, heading = link.partition("#")
        target = document.parent / name if name else document
        is_file = re.match(r"https?://", link) or target.exists()
        if not is_file or (heading and target.suffix == ".md" and heading not in _anchors(target)):
            broken.append(link)

    assert broken == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=NAMES)
def test_a_list_begins_behind_an_empty_line(document: Path) -> None:
    """GitHub shows a list without one as well, mkdocs a paragraph with dashes in it."""
    joined = re.findall(
        r"^(?! |[-*] |\d+\. |\|).+\n((?:[-*]|\d+\.) .*)", _prose(document), re.MULTILINE
    )

    assert joined == []


def test_every_document_is_a_page_of_the_site() -> None:
    """A reader finds no page outside of the navigation, and `make docs` fails for it."""
    settings = yaml.safe_load((SITE / "mkdocs.yml").read_text(encoding="utf-8"))
    made = [path.relative_to(PAGES).as_posix() for path in PAGES.rglob("*.md")]

    assert sorted(_leaves(settings["nav"])) == sorted(
        [*(name.replace(".ipynb", ".md") for name in NAMES), *made]
    )


def test_the_reference_has_every_section_of_a_configuration() -> None:
    """mkdocstrings shows the classes that a page names, and says nothing of others."""
    page = (PAGES / "reference/configuration.md").read_text(encoding="utf-8")

    headings = re.findall(r"^## ([a-z]+)$", page, re.MULTILINE)
    assert sorted(headings) == sorted(RunConfig.model_fields)


def test_the_readme_is_short_and_its_pictures_are_small() -> None:
    """It is what a stranger reads first, often in a terminal; each clone has the pictures."""
    lines = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()
    pictures = re.findall(r"!\[[^]]+\]\(([^)]+)\)", "\n".join(lines))

    assert len(lines) < 150
    assert [line for line in lines if len(line) > 100 and not line.startswith("|")] == []
    assert len(pictures) == 2
    assert all((ROOT / name).stat().st_size < 200_000 for name in pictures)


def test_the_notebook_has_the_outputs_of_a_run_with_its_curve() -> None:
    """On a web page it is only read: without saved outputs there is no curve to see."""
    notebook = ROOT / "workers/guide/kill_a_worker.ipynb"
    cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    code = [cell for cell in cells if cell["cell_type"] == "code"]

    assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1))
    assert any("image/png" in output.get("data", {}) for output in code[-1]["outputs"])
    assert "died of SIGKILL" in json.dumps(code)
    assert notebook.stat().st_size < 150_000


def _prose(document: Path) -> str:
    """Return the text of a document without code, whose brackets are no links."""
    text = document.read_text(encoding="utf-8")
    if document.suffix == ".ipynb":
        cells = [cell for cell in json.loads(text)["cells"] if cell["cell_type"] == "markdown"]
        text = "\n".join("".join(cell["source"]) for cell in cells)
    return re.sub(r"```.*?```|`[^`\n]*`", "", text, flags=re.DOTALL)


def _anchors(document: Path) -> set[str]:
    """Return the anchors of the headings, as GitHub and mkdocs make them."""
    text = re.sub(r"```.*?```", "", document.read_text(encoding="utf-8"), flags=re.DOTALL)
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"\s+", "-", re.sub(r"[^\w\s-]", "", line).strip().lower()) for line in headings}


def _leaves(nav: Any) -> list[str]:
    if isinstance(nav, str):
        return [nav]
    children = nav.values() if isinstance(nav, dict) else nav
    return [leaf for child in children for leaf in _leaves(child)]
