"""Where the arch tests look: the project's own files, as git would list them."""

import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = ("orchestrator", "workers", "ucp_core")
GUIDE_PAGES = sorted((ROOT / "workers/guide").glob("*.md"))


def python_files(*folders: str) -> list[Path]:
    """Return every Python file under ``folders`` (default: packages and tests), sorted."""
    roots = folders or (*PACKAGES, "tests")
    return sorted(path for root in roots for path in (ROOT / root).rglob("*.py"))


def guide_text() -> str:
    """Return all pages of the guide, one behind the other."""
    return "\n".join(path.read_text(encoding="utf-8") for path in GUIDE_PAGES)


def project_files() -> list[Path]:
    """Return what git tracks, or every file where there is no git (an unpacked archive)."""
    listed = subprocess.run(
        ["git", "ls-files", "-z"],  # noqa: S607 - whichever git the developer has
        cwd=ROOT,
        capture_output=True,
        check=False,
        text=True,
    )
    names = [name for name in listed.stdout.split("\0") if name]
    if listed.returncode != 0 or not names:
        found = [*python_files(), *ROOT.glob("*.*"), *(ROOT / "cluster_configs").rglob("*.yaml")]
    else:
        found = [ROOT / name for name in names]
    return [path for path in found if path.is_file()]


def relative(path: Path) -> str:
    """Return ``path`` as the reader of a failure knows it."""
    return path.relative_to(ROOT).as_posix()
