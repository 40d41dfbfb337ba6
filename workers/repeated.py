"""Warns about a repeated failure once, and counts it."""

import logging


class Repeated:
    """Failures of one action. The log shows the first one, and when they end.

    Args:
        log: Gets the messages.
    """

    def __init__(self, log: logging.Logger) -> None:
        self._log = log
        self._what = ""
        self.num_failures = 0

    def failed(self, what: str, why: object) -> None:
        """Note that ``what`` failed, and why."""
        if not self.num_failures:
            self._what = what
            self._log.warning("%s: %s; it is tried again", what, why)
        self.num_failures += 1

    def passed(self) -> None:
        """Note that the action succeeded."""
        if self.num_failures > 1:
            self._log.warning("%s, %s times; it is done now", self._what, self.num_failures)
        self.num_failures = 0
