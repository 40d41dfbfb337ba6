"""Find out whether the device of this process has failed for good.

The process then ends, and a standby takes over: after an illegal access, a failed assertion, or an
error of its memory or links, every later CUDA call fails. Other errors, such as running out of
memory, pass.
"""

from typing import Final

import torch

from workers.protocol import Outcome, Raised

#: Exit code of a process whose device failed.
EXIT_CODE: Final = 70
#: How CUDA describes a failed assertion, such as an index out of range.
_ASSERTION: Final = "device-side assert"


def has_failed() -> bool:
    """Return whether the device of this process has failed for good; does not wait for it."""
    if not torch.cuda.is_initialized():
        return False
    try:
        torch.cuda.current_stream().query()
    except RuntimeError:
        return True
    return False


def is_of_script(outcome: Outcome) -> bool:
    """Return whether the script made the device fail: it would do so on any device."""
    return isinstance(outcome, Raised) and _ASSERTION in outcome.error
