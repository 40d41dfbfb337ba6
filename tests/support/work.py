"""Counts work instead of time: the count is the same on every machine, however busy."""

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any


def num_lines(function: Callable[[], object]) -> int:
    """Return how many lines of Python ``function`` executes."""
    count = 0

    def trace(_frame: FrameType, event: str, _argument: Any) -> Any:
        nonlocal count
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        function()
    finally:
        sys.settrace(before)
    return count
