import pickle

import pytest

from orchestrator import errors
from orchestrator.errors import OrchestratorError

ERRORS = [getattr(errors, name) for name in errors.__all__]


@pytest.mark.parametrize("kind", ERRORS, ids=lambda kind: kind.__name__)
def test_an_error_survives_the_way_between_processes(kind: type[OrchestratorError]) -> None:
    """Ray pickles errors; an exception with keyword arguments raises ``TypeError`` on arrival."""
    error = kind("step 7 is lost", step=7, problems=["a", "b"])

    back = pickle.loads(pickle.dumps(error))

    assert type(back) is kind
    assert str(back) == "step 7 is lost"
    assert back.facts == {"step": 7, "problems": ["a", "b"]}


@pytest.mark.parametrize("kind", ERRORS, ids=lambda kind: kind.__name__)
def test_every_error_is_one_of_ours_and_no_builtin(kind: type[OrchestratorError]) -> None:
    """``except ValueError`` somewhere in a library must not swallow a refused configuration."""
    assert issubclass(kind, OrchestratorError)
    assert not issubclass(kind, (ValueError, OSError, RuntimeError))
