"""Many seeds in a row: the histories that held, and the smallest form of each that did not."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from tests.simulation.history import HistoryResult, run_history
from tests.simulation.violation import Violation

#: A campaign stops after so many violations.
_FAILURES_MAX = 10
#: A failing seed is tried with fewer faults than this; else its failure keeps them all.
_FAULTS_MAX = 40


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """A seed that broke a promise; it still does with only its first ``num_faults`` faults."""

    seed: int
    num_faults: int
    violation: str

    @property
    def command(self) -> str:
        """Return what repeats it."""
        return f"python -m tests.simulation --seed {self.seed} --faults {self.num_faults} --show"


@dataclass(slots=True)
class Campaign:
    """Sums over the histories that held, and the ones that did not."""

    num_histories: int = 0
    num_events: int = 0
    num_attempts: int = 0
    num_faults: int = 0
    num_lost_steps: int = 0
    virtual_s: float = 0.0
    failures: list[Failure] = field(default_factory=list)

    def add(self, result: HistoryResult) -> None:
        """Count a history that held."""
        self.num_events += result.num_events
        self.num_attempts += result.num_attempts
        self.num_faults += result.num_faults
        self.num_lost_steps += result.num_lost_steps
        self.virtual_s += result.virtual_s

    def to_json(self) -> dict[str, Any]:
        """Return the sums and the failures as JSON values."""
        return {
            "histories": self.num_histories,
            "violations": len(self.failures),
            "events": self.num_events,
            "attempts": self.num_attempts,
            "faults": self.num_faults,
            "lost_steps": self.num_lost_steps,
            "virtual_hours": round(self.virtual_s / 3600, 1),
            "failures": [
                {
                    "seed": failure.seed,
                    "faults": failure.num_faults,
                    "violation": failure.violation,
                    "command": failure.command,
                }
                for failure in self.failures
            ],
        }


def run_campaign(
    seeds: Iterable[int],
    *,
    progress: Callable[[Campaign], None] | None = None,
) -> Campaign:
    """Run a history per seed."""
    campaign = Campaign()
    for seed in seeds:
        campaign.num_histories += 1
        try:
            campaign.add(run_history(seed))
        except Violation as violation:
            campaign.failures.append(minimise(seed, str(violation)))
            if len(campaign.failures) >= _FAILURES_MAX:
                break
        if progress is not None:
            progress(campaign)
    return campaign


def minimise(seed: int, violation: str) -> Failure:
    """Return the failure with the fewest faults at which ``seed`` still breaks a promise."""
    for num_faults in range(_FAULTS_MAX):
        try:
            run_history(seed, fault_limit=num_faults)
        except Violation as smaller:
            return Failure(seed=seed, num_faults=num_faults, violation=str(smaller))
    return Failure(seed=seed, num_faults=_FAULTS_MAX, violation=violation)
