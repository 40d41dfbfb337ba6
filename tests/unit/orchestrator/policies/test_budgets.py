from functools import partial

from orchestrator.fault_kinds import FaultClass
from orchestrator.policies import BudgetRules, Fault, UserError
from orchestrator.policies.budgets import charge, overspent, pause_s, user_bug
from ucp_core.layout import ParallelLayout

RULES = BudgetRules(window_s=100.0, infrastructure_max=2, preemption_max=5, user_max=1)

_ONE, _TWO = ParallelLayout(), ParallelLayout(cp=2)


def _error(
    rank: int, step: int, error: str = "ValueError: bad", layout: ParallelLayout = _ONE
) -> UserError:
    return UserError(rank, step, error, f"Traceback of rank {rank}", layout)


def _faults(fault_class: FaultClass, *times_s: float) -> tuple[Fault, ...]:
    faults: tuple[Fault, ...] = ()
    for at_s in times_s:
        faults = charge(faults, Fault(at_s=at_s, fault_class=fault_class), RULES)
    return faults


def test_faults_that_are_far_apart_are_survived_for_ever() -> None:
    """A budget for the whole run would end every long run on a spot cluster."""
    faults = _faults(FaultClass.INFRASTRUCTURE, *(60.0 * n for n in range(100)))

    assert overspent(faults, num_stuck=0, num_undecided=0, rules=RULES) == ""


def test_a_burst_overspends_its_own_budget_only() -> None:
    """Three preemptions in a window are normal, three broken workers are not."""
    preempted = _faults(FaultClass.PREEMPTION, 1.0, 2.0, 3.0)
    assert overspent(preempted, num_stuck=0, num_undecided=0, rules=RULES) == ""

    broken = _faults(FaultClass.INFRASTRUCTURE, 1.0, 2.0, 3.0)
    assert "3 infrastructure failures" in overspent(
        broken, num_stuck=0, num_undecided=0, rules=RULES
    )


def test_no_progress_ends_the_run() -> None:
    """A crash in native code comes back for ever, and never shows up as an exception."""
    spent = overspent((), num_stuck=RULES.stuck_max + 1, num_undecided=0, rules=RULES)

    assert "without a new committed step" in spent


def test_unexplained_attempts_end_the_run_after_an_hour() -> None:
    """A network that resets connections is mended in that time; a broken program never is."""
    most = RULES.unexplained_max
    spent = partial(overspent, (), num_undecided=0, rules=RULES)

    assert spent(num_stuck=most + RULES.stuck_max, num_unexplained=most) == ""
    assert spent(num_stuck=most + RULES.stuck_max + 1, num_unexplained=most)
    assert spent(num_stuck=most + 1, num_unexplained=most + 1)
    assert 3400.0 < sum(map(pause_s, range(most + 1))) < 3700.0


def test_undecided_hangs_end_the_run_without_a_name() -> None:
    """S5: if no rank could be proven guilty, the message must name none."""
    spent = overspent((), num_stuck=0, num_undecided=RULES.undecided_max + 1, rules=RULES)

    assert "undecided" in spent


def test_one_rank_that_raises_once_is_no_bug() -> None:
    """A bad GPU or a torn file can raise in one rank; the others may go on with a new process."""
    assert user_bug([_error(0, 7)], []) is None


def test_the_same_type_on_two_ranks_is_a_bug() -> None:
    """Machines do not fail alike in the same step; code does. Messages may differ by rank."""
    errors = [_error(0, 7, "ValueError: rank 0"), _error(1, 7, "ValueError: rank 1")]

    assert user_bug(errors, []) is errors[0]


def test_different_types_on_two_ranks_are_no_proof() -> None:
    """One may be the consequence of the other, as a KeyError on the rank beside a dead disk."""
    assert user_bug([_error(0, 7), _error(1, 7, "OSError: disk")], []) is None


def test_the_same_type_at_the_same_step_again_is_a_bug() -> None:
    """The second attempt computes the same step on the same samples, perhaps on another rank."""
    again = _error(1, 7)

    assert user_bug([again], [_error(0, 7)]) is again
    assert user_bug([_error(0, 8)], [_error(0, 7)]) is None


def test_the_same_type_in_another_layout_is_a_bug_only_if_the_text_is_the_same() -> None:
    """Seen: a layout that the model lacks raised, then a machine did: both were `ValueError`s."""
    lacks = _error(0, 1, "ValueError: 6 heads on 4 ranks", _TWO)
    assert user_bug([_error(0, 1)], [lacks]) is None

    in_both = _error(0, 1, layout=_TWO)
    assert user_bug([in_both], [_error(0, 1)]) is in_both
    again = _error(1, 1, "ValueError: rank 1")
    assert user_bug([again], [lacks, _error(0, 1, "ValueError: rank 0")]) is again


def test_other_data_is_proof_when_one_rank_says_so() -> None:
    """All ranks raise it, and the fence of the first hides the others: it was tried twice."""
    error = _error(0, 1, "workers.errors.DataDiffersError: the workers have different data")

    assert user_bug([error], []) == error
    assert error.is_of_all
    assert error.message == "the workers have different data"


def test_damaged_state_is_no_bug_though_every_rank_sees_it() -> None:
    """All ranks load the same version; blaming the training code would end the run for nothing."""
    errors = [
        _error(rank, 1, "ucp_core.errors.CheckpointCorruptError: step 4") for rank in range(4)
    ]

    assert user_bug(errors, errors) is None


def test_attempts_without_progress_get_longer_pauses() -> None:
    """A network that flaps for some seconds must not spend the whole budget meanwhile."""
    pauses_s = [pause_s(num_stuck) for num_stuck in range(RULES.stuck_max + 1)]

    assert pauses_s[:3] == [0.0, 0.0, 0.0]
    assert pauses_s == sorted(pauses_s)
    assert 45.0 < sum(pauses_s) < 120.0
