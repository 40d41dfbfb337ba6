"""Errors cross process borders: Ray pickles them."""

import pickle

import pytest

from ucp_core import errors


def _tree(base: type[errors.UcpError]) -> list[type[errors.UcpError]]:
    return [base, *(found for sub in base.__subclasses__() for found in _tree(sub))]


@pytest.mark.parametrize("kind", _tree(errors.UcpError), ids=lambda kind: kind.__name__)
def test_an_error_survives_pickling(kind: type[errors.UcpError]) -> None:
    """An exception with keyword arguments fails to unpickle unless it says how."""
    again = pickle.loads(pickle.dumps(kind("file x is damaged", path="x", rank=3)))

    assert type(again) is kind
    assert str(again) == "file x is damaged"
    assert again.facts == {"path": "x", "rank": 3}


def test_every_error_is_drawn_in_the_tree() -> None:
    """The tree in the docstring is what readers look at first."""
    assert errors.__doc__ is not None
    for kind in _tree(errors.UcpError):
        assert kind.__name__ in errors.__doc__
