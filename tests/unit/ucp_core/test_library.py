"""``import ucp_core``: its page is its documentation, so the page is run."""

import re
from pathlib import Path
from textwrap import dedent

import pytest

import ucp_core
from tests.support.checkpoints import Whole, save
from ucp_core.geometry import TensorKey
from ucp_core.storage import LocalStore


def test_the_example_of_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A user of the library begins by copying it."""
    page = ucp_core.__doc__ or ""
    example = re.search(r"Example::\n\n((?:    .*\n|\n)+)", page)
    assert example is not None
    monkeypatch.chdir(tmp_path)
    state = {
        TensorKey("lm_head.weight", "weight"): Whole(
            dtype="F32", shape=(5, 3), data=bytes(range(60))
        )
    }
    save(LocalStore(), state, step=1200, world_size=2, root="runs/demo/checkpoints")
    names: dict[str, object] = {}

    exec(dedent(example[1]), names)  # noqa: S102

    assert names["data"] == bytearray(range(24))


def test_the_page_names_everything_that_the_library_offers() -> None:
    """Users cannot find a public name that is on no page."""
    page = ucp_core.__doc__ or ""

    assert not [name for name in ucp_core.__all__ if not re.search(rf"\b{name}\b", page)]
    assert all(getattr(ucp_core, name) for name in ucp_core.__all__)
