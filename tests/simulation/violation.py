"""The error of a check of the simulation: a promise of the design was broken."""


class Violation(AssertionError):  # noqa: N818  it is a finding, reported with its promise
    """A promise was broken; the message begins with its name in the design."""


def require(holds: bool, promise: str, what: str) -> None:  # noqa: FBT001
    """Raise ``Violation`` unless ``holds``."""
    if not holds:
        raise Violation(f"{promise}: {what}")
