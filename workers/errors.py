"""Errors that the workers raise on purpose, all derived from ``WorkerError``."""

from __future__ import annotations

from collections.abc import Sequence

from ucp_core.errors import FactsError

#: Packages of the extra ``ray``, by the name under which they are imported.
_TRAINING_PACKAGES = {"aiohttp", "prometheus_client", "psutil", "ray", "torch"}


class WorkerError(FactsError):
    """Base of every error that a worker raises on purpose."""


class SettingsError(WorkerError):
    """Settings cannot work; ``facts["problems"]`` lists every problem, one line each."""


class DataError(WorkerError):
    """The training data cannot be read, is too small, or differs between workers."""


class DataDiffersError(DataError):
    """Workers have different training data, or it changed since the checkpoint; all raise it."""


class StateError(WorkerError):
    """Saved state does not fit the model, or no saved state could be read."""


class CheckpointError(WorkerError):
    """A script's own checkpoint cannot be saved or loaded; says on which rank."""


class MisfitError(StateError):
    """A sound checkpoint does not fit the model or optimizer that resumes from it."""

    @classmethod
    def of(cls, path: str, misfits: Sequence[str]) -> MisfitError:
        """Return the error for a checkpoint, with how it differs and what the user can do."""
        return cls(
            f"{path} is a checkpoint of another model or optimizer: {'; '.join(misfits)}. Nothing "
            "was changed: resume with the model and optimizer that made it, or name another "
            "run.directory; run.init_from starts there from the weights that fit",
            path=path,
            misfits=tuple(misfits),
        )


class TaskError(WorkerError):
    """A training script uses the session wrongly."""


class HandlerError(TaskError, ValueError):
    """A script sets a signal handler outside of the main thread, which raises ``ValueError``."""


class LayoutRefusedError(TaskError):
    """The script or the model cannot have the degree of ``facts["axis"]`` in the layout."""


class KernelsDifferError(TaskError):
    """Machines of a deterministic run do not compute alike; all workers raise it."""


class ApartError(TaskError):
    """Only some workers of a script do what all must do; the message has the line of each."""


class NotFiniteError(TaskError):
    """The run ends because updates were NaN or infinite; every rank raises it at the same step."""


class DivergedError(TaskError):
    """Copies of the weights differ; every rank raises it, and ``facts["ranks"]`` has the odd ones.

    With two copies it has both.
    """


class CorruptError(DivergedError):
    """A worker computed something wrong; all ranks raise it, and ``facts["ranks"]`` has that one.

    If that rank is unknown, it has all ranks. ``facts["sound_step"]`` is the last step whose state
    is known to be right.
    """


class NodeShortError(WorkerError):
    """The node has no memory or descriptors left for an attempt; another node may have."""


class ArenaError(WorkerError):
    """Snapshot memory cannot be allocated, or is invalid."""


class ParityError(WorkerError):
    """A parity does not fit its group, or too much is lost to rebuild it."""


def missing_extra(error: ModuleNotFoundError) -> str:
    """Return what to install if ``error`` is about a package that training needs; else ""."""
    package = (error.name or "").partition(".")[0]
    if package not in _TRAINING_PACKAGES:
        return ""
    return f"this needs {package}, which is not installed; pip install 'everstep[ray]'"
