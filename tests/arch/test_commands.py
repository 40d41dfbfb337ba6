"""Every command explains itself the same way."""

import itertools
import re
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from orchestrator.cli.main import app as everstep
from tests.arch.tree import GUIDE_PAGES, ROOT
from ucp_core.cli import app as ucp

WIDE = {"COLUMNS": "200", "NO_COLOR": "1", "TERM": "dumb"}


def _commands() -> list[tuple[str, typer.Typer, str]]:
    found = []
    for program, app in (("everstep", everstep), ("ucp", ucp)):
        group = typer.main.get_command(app)
        names = getattr(group, "commands", {})
        assert names, f"{program} has no commands"
        found += [(program, app, name) for name in names]
    return found


COMMANDS = _commands()
DOCUMENTS = [
    "README.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    "cluster_configs/README.md",
    "dashboards/README.md",
    "orchestrator/DESIGN.md",
    "tests/README.md",
    "ucp_core/FORMATS.md",
    "ucp_core/SPEC.md",
    "workers/GUIDE.md",
    *(path.relative_to(ROOT).as_posix() for path in GUIDE_PAGES),
]
IDS = [f"{program}-{name}" for program, _, name in COMMANDS]


@pytest.mark.parametrize(("program", "app", "name"), COMMANDS, ids=IDS)
def test_help_has_an_example_that_names_the_command(
    program: str, app: typer.Typer, name: str
) -> None:
    """A list of options does not say how a command is used; an example of another does harm."""
    result = CliRunner().invoke(app, [name, "--help"], env=WIDE)

    assert result.exit_code == 0
    assert f"Example: {program} {name}" in re.sub(r"\s+", " ", result.stdout)


@pytest.mark.parametrize(("program", "app", "name"), COMMANDS, ids=IDS)
def test_help_fits_a_terminal_of_80_columns(program: str, app: typer.Typer, name: str) -> None:
    """Lines that were broken for the source were broken again, so that words stood alone."""
    narrow = {"COLUMNS": "80", "NO_COLOR": "1"}
    shown = CliRunner().invoke(app, [name, "--help"], env=narrow).stdout.splitlines()
    tables = ("╭", "Arguments:", "Options:")
    prose = itertools.takewhile(lambda line: not line.startswith(tables), shown)
    text = [line.strip() for line in prose]
    short = [
        line
        for line, following in itertools.pairwise(text)
        # Another word would have fitted. An indent takes up to two columns of each side.
        if line and following and len(line) + 1 + len(following.split()[0]) <= 76
    ]

    assert max(map(len, shown)) <= 80, f"{program} {name}"
    assert short == []


@pytest.mark.parametrize(("program", "app", "name"), COMMANDS, ids=IDS)
def test_every_command_speaks_to_machines_too(program: str, app: typer.Typer, name: str) -> None:
    """A script that has to parse a table breaks at the next release."""
    result = CliRunner().invoke(app, [name, "--help"], env=WIDE)

    assert "--json" in result.stdout, f"{program} {name} has no --json"


def test_the_first_two_commands_of_the_readme_are_the_demo_and_the_tests() -> None:
    """They are what a stranger types; both must stay what the Makefile has."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    commands = [
        line.removeprefix("$ ")
        for block in re.findall(r"```\w*\n(.*?)```", readme, flags=re.DOTALL)
        for line in block.splitlines()
        if re.match(r"(\$ )?make ", line)
    ]

    assert commands[:2] == ["make demo", "make test"]
    assert re.search(r"^demo: ", makefile, re.MULTILINE)
    assert re.search(r"^test: ", makefile, re.MULTILINE)


def test_every_path_that_the_documents_name_exists() -> None:
    """A renamed file leaves its old name in the texts, where nothing fails."""
    missing = [
        f"{document}: {name}"
        for document in DOCUMENTS
        for name in re.findall(r"`([\w./-]+\.(?:py|md|yaml|toml|txt))`", _text(document))
        if not _exists(name, document)
    ]

    assert missing == []


def test_the_guide_is_in_pages_that_its_contents_link_to() -> None:
    """A page that no list names is never read, and one of 800 lines neither."""
    contents = _text("workers/GUIDE.md")
    links = set(re.findall(r"\]\((guide/[\w.]+)\)", contents))

    assert links == {f"guide/{path.name}" for path in (ROOT / "workers/guide").iterdir()}
    for path in (ROOT / "workers/GUIDE.md", *GUIDE_PAGES):
        text = path.read_text(encoding="utf-8")
        assert text.count("\n") <= 250, path.name


def _text(document: str) -> str:
    return (ROOT / document).read_text(encoding="utf-8")


def _exists(name: str, document: str) -> bool:
    made_by_a_run = {"config.yaml"}
    places = (".", Path(document).parent, "tests", "orchestrator", "workers", "dashboards")
    return name in made_by_a_run or any(Path(ROOT, place, name).exists() for place in places)
