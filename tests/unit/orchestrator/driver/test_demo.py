from pathlib import Path

import pytest

from orchestrator.driver import demo_directories, layout_overrides
from orchestrator.errors import ConfigError


@pytest.mark.parametrize("name", ["undisturbed", "disturbed"])
@pytest.mark.parametrize("kind", ["folder", "link", "dangling link"])
def test_a_demo_deletes_nothing_that_no_demo_made(tmp_path: Path, name: str, kind: str) -> None:
    """The names are usual words, and a run of the user's may well have one of them."""
    demo_directories(str(tmp_path / "demo"))
    theirs = tmp_path / "theirs" if "link" in kind else tmp_path / "demo" / name
    if "link" in kind:
        (tmp_path / "demo" / name).rename(theirs)
        (tmp_path / "demo" / name).symlink_to(theirs if kind == "link" else tmp_path / "none")
    else:
        (theirs / "made_by_demo").unlink()
    (theirs / "keep").touch()
    other = "disturbed" if name == "undisturbed" else "undisturbed"
    (tmp_path / "demo" / other / "keep").touch()

    with pytest.raises(ConfigError, match=f"demo/{name} is not from a demo"):
        demo_directories(str(tmp_path / "demo"))

    assert (theirs / "keep").exists()
    assert (tmp_path / "demo" / other / "keep").exists()


def test_a_demo_replaces_an_earlier_one(tmp_path: Path) -> None:
    """Else its second run would resume the first, which is over; links in it are not followed."""
    first = [Path(each) for each in demo_directories(str(tmp_path / "demo"))]
    (tmp_path / "keep").touch()
    for run in first:
        (run / "checkpoints" / "deep").mkdir(parents=True)
        (run / "link").symlink_to(tmp_path)

    assert [Path(each) for each in demo_directories(str(tmp_path / "demo"))] == first

    assert all(len(list(run.iterdir())) == 1 for run in first)
    assert (tmp_path / "keep").exists()


def test_a_layout_that_is_none_is_refused() -> None:
    assert layout_overrides("tp2,pp4")[:2] == ["parallel.tp=2", "parallel.pp=4"]
    for text in ("", "tp", "tp2pp2", "dp2", "tp2,"):
        with pytest.raises(ConfigError, match="write degrees of tp and pp, such as tp2,pp2"):
            layout_overrides(text)
