"""Curves in TensorBoard, Weights & Biases and MLflow; one curve spans all attempts."""

from typing import TYPE_CHECKING

from ucp_core.lazy import lazy_door

if TYPE_CHECKING:
    from orchestrator.shell.loggers.curve import Curve
    from orchestrator.shell.loggers.following import Loggers


__getattr__ = lazy_door(__name__)
