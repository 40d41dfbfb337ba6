"""Warns about a repeated failure once, and counts it."""

import logging


class Repeated:
    """Failures of one act. The log shows the first, and their end.

    Args:
        log: Where they are said.
    """

    def __init__(self, log: logging.Logger) -> None:
        self._log = log
        self._what = ""
        self.num_failures = 0

    def failed(self, what: str, why: object) -> None:
        """Note a failure: ``what`` did not happen, and why."""
        if not self.num_failures:
            self._what = what
            self._log.warning("%s: %s; it is tried again", what, why)
        self.num_failures += 1

    def passed(self) -> None:
        """Note that the act was done."""
        if self.num_failures > 1:
            self._log.warning("%s, %s times; it is done now", self._what, self.num_failures)
        self.num_failures = 0
