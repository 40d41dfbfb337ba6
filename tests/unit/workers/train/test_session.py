"""Freedoms of a script between the calls of its session, and the reports of an attempt."""

import json
import math
import mmap
import random
import resource
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from tests.support.made import assignment_of
from ucp_core.storage import open_store
from workers import collectives
from workers.data import DataLoader
from workers.errors import NodeShortError, TaskError
from workers.protocol import (
    Completed,
    Outcome,
    PeerLost,
    Raised,
    SaveCosts,
    StepFacts,
)
from workers.settings import CheckpointSettings, Settings, TrainSettings
from workers.telemetry import ProgressRecord, read_progress, read_ring
from workers.train import Session, run_attempt
from workers.train.loop import WorkerContext

INPUTS = torch.linspace(-1, 1, 32).reshape(16, 2)


class Attempts:
    """Attempts of one worker that is alone, as the orchestrator would begin them."""

    def __init__(self, directory: Path, numbered_after: int, *, save_every: int = 1) -> None:
        self._directory = directory
        self._save_every = save_every
        self._rendezvous = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._page = ProgressRecord.create(directory / "page", worker="w0001")
        self._number = numbered_after
        #: The cost of steps and saves that each returns.
        self.costs: list[Callable[[], SaveCosts]] = []

    def train(
        self, task: Callable[[Session], None], *, steps: int, resume: tuple[int, int] = (0, 0)
    ) -> Outcome:
        """Return how the next attempt ended; ``resume`` is what step of which it goes on from."""
        store, path = open_store(str(self._directory / "run"))
        self._number += 1
        context = WorkerContext(
            worker="w0001",
            settings=Settings(
                # The same learning rate in each step, however many there are to be.
                train=TrainSettings(
                    steps=steps,
                    global_batch=4,
                    micro_batch=2,
                    lr=0.1,
                    warmup_steps=0,
                    schedule="constant",
                ),
                checkpoint=CheckpointSettings(every_steps=self._save_every, keep=0),
            ),
            store=store,
            directory=path,
            progress=self._page,
            ring_path=str(self._directory / "ring"),
            yield_requested=lambda _attempt: False,
            fenced=lambda _attempt: False,
            node="n1",
            on_costs=lambda _attempt, costs: self.costs.append(costs),
        )
        assignment = assignment_of(
            attempt=self._number, store_port=self._rendezvous.port, resume=resume
        )
        return run_attempt(assignment, context, task)

    def weights_digest(self) -> str:
        """Return the digest of the weights that the run ended with."""
        return str(json.loads((self._directory / "run/result.json").read_text())["weights_digest"])

    def close(self) -> None:
        """Stop the beat of the page."""
        self._page.close()


@pytest.fixture
def make_attempts(tmp_path: Path) -> Iterator[Callable[[str], Attempts]]:
    """Return attempts on a run directory of their own."""
    made: list[Attempts] = []

    def make(name: str, *, numbered_after: int = 0) -> Attempts:
        (tmp_path / name).mkdir()
        made.append(Attempts(tmp_path / name, numbered_after))
        return made[-1]

    yield make
    for attempts in made:
        attempts.close()


class Model(nn.Module):
    """A trained layer, and perhaps a frozen one, which is never called."""

    def __init__(self, *, has_frozen: bool = False) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        if has_frozen:
            self.frozen = nn.Linear(2, 2).requires_grad_(False)

    def forward(self, inputs: Tensor) -> Tensor:
        return torch.tanh(self.layer(inputs))


def fit(
    session: Session,
    *,
    has_frozen: bool = False,
    look_first: Callable[[nn.Module], object] = lambda _model: None,
    look: Callable[[Session, nn.Module], object] = lambda _session, _model: None,
    look_last: Callable[[nn.Module], object] = lambda _model: None,
    hook: Callable[..., None] = lambda *_: None,
) -> None:
    """Train, and look at the model between the last backward pass and the update of each step.

    With ``look_first`` also before there is anything in it, with ``look_last`` after each step,
    and with ``hook`` in each update.
    """
    model = session.model(lambda: Model(has_frozen=has_frozen))
    look_first(model)
    optimizer = session.optimizer(
        lambda parameters: torch.optim.SGD(
            [each for name, each in parameters.items() if "frozen" not in name], momentum=0.9
        )
    )
    optimizer.register_step_post_hook(hook)
    for step in session.steps(len(INPUTS)):
        for samples in step.micro_batches():
            inputs = INPUTS[samples]
            step.backward(functional.mse_loss(model(inputs), inputs), tokens=len(samples))
        look(session, model)
        step.apply()
        look_last(model)


def evaluate(session: Session, model: nn.Module) -> None:
    session.evaluate(
        lambda samples: (
            functional.mse_loss(model(INPUTS[samples]), INPUTS[samples]),
            len(samples),
        ),
        8,
    )


def predict(_session: Session, model: nn.Module) -> None:
    with torch.no_grad():
        model(INPUTS)


def test_a_process_that_can_hardly_map_memory_begins_no_attempt(
    make_attempts: Callable[[str], Attempts],
) -> None:
    """A thread that starts without memory ends at once, and its starter waits for it forever."""
    attempts = make_attempts("a")
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    taken_bytes = int(Path("/proc/self/statm").read_text().split()[0]) * mmap.PAGESIZE
    resource.setrlimit(resource.RLIMIT_AS, (taken_bytes + (32 << 20), hard))
    try:
        with pytest.raises(NodeShortError, match="no room for an attempt"):
            attempts.train(fit, steps=1)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))

    assert isinstance(attempts.train(fit, steps=1), Completed)


def test_the_work_of_each_micro_batch_is_recorded(
    make_attempts: Callable[[str], Attempts], tmp_path: Path
) -> None:
    """The slow part of it is told from outside, or afterwards."""
    attempts = make_attempts("a")

    outcome = attempts.train(fit, steps=2)

    assert isinstance(outcome, Completed)
    found = read_ring(tmp_path / "a" / "ring")
    spans = [(one.step, one.micro_batch, one.op) for one in found.records if one.group < 0]
    assert spans == [
        (step, *each)
        for step in (1, 2)
        for each in (
            *((number, op) for number in (0, 1) for op in ("data", "forward", "backward")),
            (0, "optimizer"),
        )
    ]
    assert (found.place, found.node) == ((0, 0, 0), "n1")


@pytest.mark.parametrize("look", [evaluate, predict])
def test_reading_the_model_before_an_update_changes_nothing(
    look: Callable[[Session, nn.Module], object], make_attempts: Callable[[str], Attempts]
) -> None:
    """A pass without a backward pass leaves the weights gathered: the next step took those."""
    plain, looking = make_attempts("plain"), make_attempts("looking")
    assert isinstance(plain.train(fit, steps=4), Completed)

    outcome = looking.train(lambda session: fit(session, look=look), steps=4)

    assert isinstance(outcome, Completed)
    assert looking.weights_digest() == plain.weights_digest()


def clamp(model: nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.clamp_(-0.1, 0.1)


def clamp_all(optimizer: torch.optim.Optimizer, *_: object) -> None:
    with torch.no_grad():
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.clamp_(-0.1, 0.1)


def test_weights_that_a_script_changes_between_two_updates_are_refused_by_name(
    make_attempts: Callable[[str], Attempts],
) -> None:
    """No snapshot of the step has that: after a fault the run would go on along another curve."""
    outcome = make_attempts("clamped").train(lambda session: fit(session, look_last=clamp), steps=4)

    assert isinstance(outcome, Raised)
    assert (
        "parameter layer.bias was changed between step.apply() of step 1 and" in outcome.traceback
    )
    assert "register_step_post_hook" in outcome.traceback


def by_data(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.data.fill_(0.05)


@pytest.mark.parametrize("write", [clamp, by_data])
def test_weights_that_a_script_writes_before_they_are_filled_are_refused_by_name(
    make_attempts: Callable[[str], Attempts], write: Callable[[nn.Module], None]
) -> None:
    """They would be overwritten: by initial values, or by what a checkpoint has."""
    outcome = make_attempts("run").train(lambda session: fit(session, look_first=write), steps=1)

    assert isinstance(outcome, Raised)
    assert "parameter layer.bias was written to before session.optimizer" in outcome.error


@pytest.mark.parametrize("write", [clamp, by_data])
def test_weights_that_a_script_writes_over_loaded_ones_are_refused_by_name(
    make_attempts: Callable[[str], Attempts],
    write: Callable[[nn.Module], None],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Each attempt would restart. At step 0 they are right, and so are a teacher's at all."""

    def train(session: Session, *, always: bool) -> None:
        model = session.model(lambda: Model(has_frozen=True))
        session.optimizer(lambda named: torch.optim.SGD(list(named.values())[2:]))
        by_data(model.frozen)
        clamp(model.frozen)
        if always or session.step == 0:
            write(model.layer)
        for _ in session.steps(len(INPUTS)):
            session.train_step(lambda samples: model(INPUTS[samples]).square().mean())

    attempts = make_attempts("run")
    for steps, resume in ((2, (0, 0)), (4, (2, 1))):
        outcome = attempts.train(
            lambda session: train(session, always=False), steps=steps, resume=resume
        )
        assert isinstance(outcome, Completed)
    assert "frozen.bias was written to after session.optimizer" in caplog.text
    outcome = attempts.train(lambda session: train(session, always=True), steps=6, resume=(4, 2))

    assert isinstance(outcome, Raised)
    assert "parameter layer.bias was written to after step 4 was loaded" in outcome.error


def test_what_a_hook_of_the_optimizer_does_to_weights_is_part_of_the_step(
    make_attempts: Callable[[str], Attempts],
) -> None:
    """It is what a script is told to do instead, so a run that resumes must end alike."""
    whole, resumed = make_attempts("whole"), make_attempts("resumed")
    assert isinstance(whole.train(lambda session: fit(session, hook=clamp_all), steps=4), Completed)

    for steps, resume in ((2, (0, 0)), (4, (2, 1))):
        outcome = resumed.train(
            lambda session: fit(session, hook=clamp_all), steps=steps, resume=resume
        )
        assert isinstance(outcome, Completed)

    assert resumed.weights_digest() == whole.weights_digest()
    plain = make_attempts("plain")
    plain.train(fit, steps=4)
    assert plain.weights_digest() != whole.weights_digest()


def test_reading_the_model_before_it_is_filled_changes_nothing(
    make_attempts: Callable[[str], Attempts],
) -> None:
    """As a summary of its layers does: the first step took what the memory held until then."""
    plain, looking = make_attempts("plain"), make_attempts("looking")
    assert isinstance(plain.train(fit, steps=4), Completed)

    def look(model: nn.Module) -> None:
        with torch.no_grad():
            model(INPUTS)

    assert isinstance(
        looking.train(lambda session: fit(session, look_first=look), steps=4), Completed
    )

    assert looking.weights_digest() == plain.weights_digest()


def test_a_version_may_hold_a_frozen_layer_that_the_model_has_no_more(
    make_attempts: Callable[[str], Attempts],
) -> None:
    """The optimizer kept nothing of it, which is looked up among the parameters of the model."""
    attempts = make_attempts("run")
    frozen = attempts.train(lambda session: fit(session, has_frozen=True), steps=2)
    assert frozen == Completed(attempt=1, step=2)

    assert attempts.train(fit, steps=4, resume=(2, 1)) == Completed(attempt=2, step=4)


def test_a_worker_that_leaves_before_it_loads_is_at_the_step_of_the_resume(
    make_attempts: Callable[[str], Attempts],
) -> None:
    """Said to have done nothing, any older version in memory would count as the newest there is."""
    attempts = make_attempts("run")
    assert attempts.train(fit, steps=2) == Completed(attempt=1, step=2)
    seen: list[int] = []

    def refuse(session: Session) -> None:
        seen.append(session.step)
        raise ValueError("no such file")

    outcome = attempts.train(refuse, steps=4, resume=(2, 1))

    assert isinstance(outcome, Raised)
    assert (seen, outcome.step) == ([2], 3)


def test_numbers_of_numpy_and_python_do_not_depend_on_where_a_run_began(
    make_attempts: Callable[[str], Attempts],
) -> None:
    """A script augments its data with them; torch's were the only ones that were keyed."""
    drawn: list[tuple[int, float, float]] = []
    between: list[float] = []

    def draw(session: Session) -> None:
        model = session.model(Model)
        session.optimizer(lambda parameters: torch.optim.SGD(parameters.values()))
        random.seed(session.step)
        for step in session.steps(len(INPUTS)):
            for samples in step.micro_batches():
                drawn.append((step.number, random.random(), np.random.rand()))  # noqa: NPY002
                step.backward(model(INPUTS[samples]).square().mean(), tokens=len(samples))
            between.append(random.random())
            step.apply()

    attempts = make_attempts("run")
    assert isinstance(attempts.train(draw, steps=4), Completed)
    whole, drawn[:] = list(drawn), []
    # A script's own numbers between the micro-batches go on as if there were none.
    script = random.Random(0)
    assert between == [script.random() for _ in range(4)]
    assert isinstance(attempts.train(draw, steps=4, resume=(2, 1)), Completed)

    assert drawn == whole[len(whole) // 2 :]
    assert len(set(whole)) == len(whole) == 8


def test_without_memory_it_is_measured_how_long_a_checkpoint_takes(
    make_attempts: Callable[[str], Attempts],
) -> None:
    """An unmeasured cost chooses no interval: ``auto`` would stay at its first value."""
    attempts = make_attempts("run")
    assert attempts.train(fit, steps=3) == Completed(attempt=1, step=3)

    (costs,) = attempts.costs
    assert costs().checkpoint_busy_s > 0


def test_a_fenced_worker_begins_no_further_micro_batch_of_the_step(
    make_attempts: Callable[..., Attempts],
) -> None:
    """Others wait for it meanwhile. Without a collective in the next pass it would not hear."""
    begun: list[int] = []
    # The process remembers the number, and the attempts of other tests begin with 1.
    numbered_after = 1000

    def train(session: Session) -> None:
        model = session.model(Model)
        session.optimizer(lambda parameters: torch.optim.SGD(parameters.values()))
        for step in session.steps(len(INPUTS)):
            for samples in step.micro_batches():
                begun.append(len(begun))
                step.backward(model(INPUTS[samples]).sum(), tokens=len(samples))
                collectives.abort(numbered_after + 1)
            step.apply()

    outcome = make_attempts("fenced", numbered_after=numbered_after).train(train, steps=4)
    assert isinstance(outcome, PeerLost), "the orchestrator would have said that it is fenced"
    assert begun == [0]


def uneven(inputs: Tensor) -> int:
    """Return a number of tokens that differs between micro-batches."""
    return 1 + int(inputs.abs().sum().item() * 3)


def fit_open(session: Session, *, counts: bool) -> None:
    """Train by the open loop, with a model whose dropout draws random numbers."""
    model = session.model(lambda: nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5)))
    session.optimizer(lambda parameters: torch.optim.SGD(parameters.values(), momentum=0.9))
    for step in session.steps(len(INPUTS)):
        for samples in step.micro_batches():
            inputs = INPUTS[samples] + random.random() + np.random.rand()  # noqa: NPY002
            loss = functional.mse_loss(model(inputs), inputs)
            step.backward(loss, tokens=uneven(INPUTS[samples]) if counts else 2)
        step.apply()


def fit_closed(session: Session, *, counts: bool) -> None:
    """Train in the same way by ``train_step``."""
    model = session.model(lambda: nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5)))
    session.optimizer(lambda parameters: torch.optim.SGD(parameters.values(), momentum=0.9))

    def loss_of(samples: Any) -> Any:
        inputs = INPUTS[samples] + random.random() + np.random.rand()  # noqa: NPY002
        loss = functional.mse_loss(model(inputs), inputs)
        return (loss, uneven(INPUTS[samples])) if counts else loss

    for step in session.steps(len(INPUTS)):
        done = session.train_step(loss_of)
        assert done is step
        assert done.is_applied


@pytest.mark.parametrize("counts", [True, False], ids=["tokens", "samples"])
def test_a_step_in_one_call_does_what_the_open_loop_does(
    make_attempts: Callable[[str], Attempts], *, counts: bool
) -> None:
    """With other weights of micro-batches, or random numbers, it would be another training."""
    opened, closed, other = (make_attempts(name) for name in ("open", "closed", "other"))
    assert isinstance(
        opened.train(lambda session: fit_open(session, counts=counts), steps=4), Completed
    )
    for steps, resume in ((2, (0, 0)), (4, (2, 1))):
        outcome = closed.train(
            lambda session: fit_closed(session, counts=counts), steps=steps, resume=resume
        )
        assert isinstance(outcome, Completed)
    other.train(lambda session: fit_closed(session, counts=not counts), steps=4)

    assert closed.weights_digest() == opened.weights_digest()
    assert other.weights_digest() != opened.weights_digest()


@pytest.mark.parametrize(
    ("returned", "told"),
    [
        (lambda loss: loss.item(), "returned (float, int); return the mean loss"),
        (lambda loss: loss.expand(2), "(Tensor, int) of shape [2]; return the mean loss"),
        (lambda loss: (loss, loss), "returned (Tensor, Tensor)"),
        (lambda _: None, "returned (NoneType, int)"),
    ],
)
def test_what_is_no_loss_is_refused(
    make_attempts: Callable[[str], Attempts], returned: Callable[[Tensor], Any], told: str
) -> None:
    """A sum over a vector would weigh samples in an unintended way."""

    def train(session: Session) -> None:
        model = session.model(Model)
        session.optimizer(lambda parameters: torch.optim.SGD(parameters.values()))
        for _ in session.steps(len(INPUTS)):
            session.train_step(lambda samples: returned(model(INPUTS[samples]).sum()))

    outcome = make_attempts("run").train(train, steps=1)
    assert isinstance(outcome, Raised)
    assert told in outcome.traceback


def test_a_step_is_done_once_and_within_the_loop(make_attempts: Callable[[str], Attempts]) -> None:
    told: list[str] = []

    def train(session: Session) -> None:
        model = session.model(Model)
        session.optimizer(lambda parameters: torch.optim.SGD(parameters.values()))
        for once in (True, False):
            try:
                if once:
                    session.train_step(lambda samples: model(INPUTS[samples]).sum())
                for _ in session.steps(len(INPUTS)):
                    session.train_step(lambda samples: model(INPUTS[samples]).sum())
                    session.train_step(lambda samples: model(INPUTS[samples]).sum())
            except TaskError as error:
                told.append(str(error))

    make_attempts("run").train(train, steps=1)
    assert "in `for step in session.steps(...)`" in told[0]
    assert "step 1 was already computed" in told[1]


def test_numbers_of_the_script_belong_to_the_step_whose_body_runs(
    make_attempts: Callable[[str], Attempts], tmp_path: Path
) -> None:
    """Before and after ``apply``, and behind the loop; what is no number is refused by name."""

    def task(session: Session) -> None:
        model = session.model(lambda: nn.Linear(2, 2))
        session.optimizer(lambda named: torch.optim.SGD(named.values()))
        for step in session.steps(len(INPUTS)):
            session.log({"before": step.number})
            for samples in step.micro_batches():
                step.backward(model(INPUTS[samples]).square().mean(), tokens=len(samples))
            step.apply()
            session.log({"after": torch.tensor(float("nan"))})
        session.log({"end": 1})
        session.log({"words": "many"})  # type: ignore[dict-item]

    outcome = make_attempts("a").train(task, steps=2)

    assert isinstance(outcome, Raised)
    assert "session.log: words is str, which is not a single number" in outcome.error
    lines = (tmp_path / "a/run/metrics/values.jsonl").read_text().splitlines()
    found = [(line["step"], line["values"]) for line in map(json.loads, lines)]
    assert found == [
        (1, {"before": 1}),
        (1, {"after": None}),
        (2, {"before": 2}),
        (2, {"after": None}),
        (2, {"end": 1}),
    ]


def test_a_loss_that_is_not_finite_leaves_a_gap_in_the_curve_and_ends_nothing(
    make_attempts: Callable[[str], Attempts], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """JSON has no nan: the step could not be saved, and a restart would meet the same one."""
    lost = {2: math.nan, 4: math.inf}
    seen: dict[int, float] = {}

    def train(session: Session) -> None:
        model = session.model(Model)
        session.optimizer(lambda named: torch.optim.SGD(named.values()))
        for step in session.steps(len(INPUTS)):
            for samples in step.micro_batches():
                loss = model(INPUTS[samples]).sum() + lost.get(step.number, 0.0)
                step.backward(loss, tokens=len(samples))
            step.apply()
            seen[step.number] = step.loss

    attempts = make_attempts("run")
    for steps, resume in ((2, (0, 0)), (2, (2, 1)), (4, (2, 1))):
        assert isinstance(attempts.train(train, steps=steps, resume=resume), Completed)
        assert json.loads((tmp_path / "run/run/result.json").read_text())["final_loss"] is None

    assert caplog.text.count("resumed at step 2 of 2: no step is left") == 1
    assert [step for step, loss in seen.items() if not math.isfinite(loss)] == [2, 4]
    lines = (tmp_path / "run/run/metrics/rank0.jsonl").read_text().splitlines()
    assert [json.loads(line)["loss"] for line in lines] == [seen[1], None, seen[3], None]


def test_a_micro_batch_without_tokens_is_no_part_of_the_mean(
    make_attempts: Callable[[str], Attempts],
) -> None:
    """Where all labels are ignored, ``cross_entropy`` is nan, and nan times no tokens, too."""
    seen: list[float] = []
    labels: list[int] = []

    def train(session: Session) -> None:
        model = session.model(Model)
        session.optimizer(lambda named: torch.optim.SGD(named.values()))

        def loss_of(samples: Any) -> tuple[Tensor, int]:
            label = labels.pop()
            targets = torch.full((len(samples),), label)
            return functional.cross_entropy(model(INPUTS[samples]), targets), 2 * (label >= 0)

        # With a name the data is not compared: `loss_of` is called for micro-batches alone.
        for step in session.steps(len(INPUTS), data_digest="inputs"):
            labels[:] = [-100, 0] if step.number < 3 else [-100, -100]
            session.train_step(loss_of)
            labels[:] = [-100, 0] if step.number < 3 else [-100, -100]
            seen.extend((step.loss, session.evaluate(loss_of, 4)))

    assert isinstance(make_attempts("run").train(train, steps=3), Completed)
    assert [math.isfinite(loss) for loss in seen] == [True] * 4 + [False] * 2


def test_random_numbers_of_an_evaluation_are_those_of_its_micro_batches(
    make_attempts: Callable[[str], Attempts],
) -> None:
    """Else the result depends on the number of workers, and on what the script drew before."""
    seen: list[float] = []
    drawn: list[float] = []

    def train(session: Session) -> None:
        session.model(Model)
        session.optimizer(lambda named: torch.optim.SGD(named.values()))

        def loss_of(_samples: Any) -> tuple[Tensor, int]:
            drawn.append(random.random() + float(torch.rand(())))
            return torch.tensor(drawn[-1]), 2

        torch.manual_seed(0)
        random.seed(0)
        seen.extend(session.evaluate(loss_of, 4) for _ in range(2))
        seen.append(random.random() + float(torch.rand(())))

    make_attempts("run").train(train, steps=1)
    torch.manual_seed(0)
    assert seen[0] == seen[1]
    assert drawn[0] != drawn[1]
    assert seen[2] == random.Random(0).random() + float(torch.rand(()))


class Counting(nn.Linear):
    """Keeps a number beside its weights."""

    def get_extra_state(self) -> int:
        return 1


@pytest.mark.parametrize(
    ("build", "told"),
    [
        (lambda: nn.Sequential(Counting(2, 2)), "module 0 (Counting) has get_extra_state"),
        (lambda: nn.Sequential(nn.Embedding(2, 2, max_norm=1.0)), "(Embedding) has max_norm=1.0"),
    ],
)
def test_state_beside_weights_and_buffers_is_refused_by_name(
    make_attempts: Callable[[str], Attempts], build: Callable[[], nn.Module], told: str
) -> None:
    """It was in no checkpoint, or written to what is dropped."""
    outcome = make_attempts("run").train(lambda session: session.model(build), steps=1)

    assert isinstance(outcome, Raised)
    assert told in outcome.error


WORDS = torch.arange(96).reshape(16, 6) % 7


class Sentences:
    """Samples of six tokens, as a mapping, as inputs and labels, or in a form of their own."""

    def __init__(self, form: str) -> None:
        self._form = form

    def __len__(self) -> int:
        return len(WORDS)

    def __getitem__(self, index: int) -> Any:
        words = WORDS[index]
        forms = {"mapping": {"input_ids": words}, "pair": (words, words), "own": [words.double()]}
        return forms[self._form]


@pytest.mark.parametrize(
    ("form", "given", "expected"),
    [
        ("mapping", None, 24),
        ("pair", None, 24),
        ("own", None, None),
        ("own", 2, None),  # the samples of a micro-batch
        ("own", 5, 10),
        ("mapping", 5, 24),
    ],
)
def test_tokens_of_a_step_are_those_of_its_batches_and_no_count_of_samples(
    form: str, given: int | None, expected: int | None, tmp_path: Path, make_attempts: Any
) -> None:
    """A script that returns a loss alone has tokens as well; boards showed none, or 16 a second."""
    seen: list[StepFacts] = []

    def task(session: Session) -> None:
        model = session.model(Model)
        session.optimizer(lambda parameters: torch.optim.SGD(parameters.values()))

        def loss_of(_batch: Any) -> Any:
            loss = model(INPUTS).square().mean()
            return loss if given is None else (loss, given)

        for step in session.steps(DataLoader(Sentences(form))):
            session.train_step(loss_of)
            view = read_progress(tmp_path / "a" / "page")
            assert view is not None
            assert (view.facts.grad_norm, view.facts.lr) == (step.grad_norm, 0.1)
            assert view.facts.data_s > 0.0
            seen.append(view.facts)

    assert isinstance(make_attempts("a").train(task, steps=2), Completed)
    told = [None if math.isnan(one.tokens) else one.tokens for one in seen]
    assert told == [expected, expected]
