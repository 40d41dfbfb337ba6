"""A new run starts from a checkpoint that exists."""

import contextlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional

import ucp_core
from everstep import RunSettings, Session, Settings, TaskError, run
from tests.support.made import save_part, tensor_of
from ucp_core.storage import open_store
from workers.errors import NotFiniteError
from workers.settings import CheckpointSettings, problems

INPUTS = torch.linspace(-1, 1, 32).reshape(16, 2)


class Model(nn.Module):
    """Two layers that share a weight, and one of their own."""

    scale: Tensor

    def __init__(self, scale: float = 1.0) -> None:
        super().__init__()
        self.first = nn.Linear(2, 2, bias=False)
        self.second = nn.Linear(2, 2, bias=False)
        self.second.weight = self.first.weight
        self.head = nn.Linear(2, 2)
        self.register_buffer("scale", torch.tensor([scale]))

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = torch.tanh(self.second(torch.tanh(self.first(inputs)))) * self.scale
        output: Tensor = self.head(hidden)
        return output


def train(
    directory: Path, seen: Callable[[nn.Module, torch.optim.Optimizer], None], **init: Any
) -> None:
    """Train two steps; ``seen`` gets model and optimizer before the first."""

    def task(session: Session) -> None:
        model = session.model(Model)
        optimizer = session.optimizer(lambda held: torch.optim.AdamW(held.values()))
        if session.step == 0:
            seen(model, optimizer)
        for step in session.steps(len(INPUTS)):
            for samples in step.micro_batches():
                loss = functional.mse_loss(model(INPUTS[samples]), INPUTS[samples])
                step.backward(loss, tokens=len(samples))
            step.apply()

    settings = Settings(
        run=RunSettings(directory="run", **init),
        checkpoint=CheckpointSettings(every_steps=1, keep=0),
    )
    run(
        task, directory=str(directory), settings=settings,
        steps=2, global_batch=4, micro_batch=2, warmup_steps=0, schedule="constant",
    )  # fmt: skip


def weights(model: nn.Module) -> dict[str, Tensor]:
    named: Any = model.named_parameters()
    return {name: value.full_tensor().clone() for name, value in named}


def huggingface(folder: Path, **tensors: Tensor) -> str:
    folder.mkdir()
    names = {name.replace("__", "."): value.contiguous() for name, value in tensors.items()}
    save_file(names, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps({"model_type": "none"}))
    return str(folder)


SHARED = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
WEIGHT = torch.tensor([[0.5, 0.25], [-1.0, 2.0]])
BIAS = torch.tensor([1.5, -2.0])
MOMENTS = ("exp_avg", "exp_avg_sq")


def test_weights_of_another_format_and_dtype_are_the_first_ones(tmp_path: Path) -> None:
    """A fine-tuning begins with a model from the hub, in bfloat16."""
    path = huggingface(
        tmp_path / "hub",
        first__weight=SHARED.bfloat16(),
        head__weight=WEIGHT.bfloat16(),
        head__bias=BIAS.half(),
        unused=BIAS,
    )
    seen: dict[str, Tensor] = {}
    train(tmp_path / "run", lambda model, _: seen.update(weights(model)), init_from=path)

    assert seen.keys() == {"first.weight", "head.weight", "head.bias"}
    assert torch.equal(seen["first.weight"], SHARED)
    assert torch.equal(seen["head.weight"], WEIGHT)
    assert torch.equal(seen["head.bias"], BIAS)


def test_a_tied_parameter_is_found_by_its_other_name(tmp_path: Path) -> None:
    """Which of the two names a checkpoint has is the choice of whoever saved it."""
    path = huggingface(
        tmp_path / "hub", second__weight=SHARED, head__weight=WEIGHT, head__bias=BIAS
    )
    seen: dict[str, Tensor] = {}
    train(tmp_path / "run", lambda model, _: seen.update(weights(model)), init_from=path)

    assert torch.equal(seen["first.weight"], SHARED)


BOTH = {"first__weight": SHARED, "head__weight": WEIGHT, "head__bias": BIAS}


def test_two_equal_tensors_are_one_tied_parameter_and_nothing_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Some tools write every name of a tied tensor."""
    path = huggingface(tmp_path / "hub", **BOTH, second__weight=SHARED.clone())
    seen: dict[str, Tensor] = {}
    train(tmp_path / "run", lambda model, _: seen.update(weights(model)), init_from=path)

    assert torch.equal(seen["first.weight"], SHARED)
    assert caplog.messages == []


def test_two_different_tensors_are_no_tied_parameter(tmp_path: Path) -> None:
    """One of them would be dropped, and the model would not compute what it was trained to."""
    other = SHARED.clone()
    other[1, 1] += 1e-3
    path = huggingface(tmp_path / "hub", **BOTH, second__weight=other)

    with pytest.raises(TaskError) as raised:
        train(tmp_path / "run", lambda *_: None, init_from=path)

    told = str(raised.value)
    assert f"run.init_from: {path}: second.weight and first.weight differ in it" in told
    assert 'run.init_rename ({"second.weight": "unused.second.weight"})' in told
    assert "does not tie them" in told
    assert not (tmp_path / "run/checkpoints").exists()


def test_one_of_two_different_tensors_is_left_out_by_a_new_name(tmp_path: Path) -> None:
    """As the error says."""
    path = huggingface(tmp_path / "hub", **BOTH, second__weight=2 * SHARED)
    seen: dict[str, Tensor] = {}
    train(
        tmp_path / "run",
        lambda model, _: seen.update(weights(model)),
        init_from=path,
        init_rename={"second.weight": "unused.second.weight"},
    )
    assert torch.equal(seen["first.weight"], SHARED)

    train(
        tmp_path / "other",
        lambda model, _: seen.update(weights(model)),
        init_from=path,
        init_rename={"first.weight": "unused"},
    )
    assert torch.equal(seen["first.weight"], 2 * SHARED)


def test_equal_tensors_of_different_dtypes_are_one_parameter(tmp_path: Path) -> None:
    """Values count, not bytes: bfloat16 is widened."""
    value = torch.tensor([[1.0, 3.0], [-0.0, 4.0]])
    given = {**BOTH, "first__weight": value, "second__weight": value.bfloat16()}
    path = huggingface(tmp_path / "hub", **given)
    seen: dict[str, Tensor] = {}
    train(tmp_path / "run", lambda model, _: seen.update(weights(model)), init_from=path)

    assert torch.equal(seen["first.weight"], value)


def test_names_are_mapped_and_new_parts_keep_their_initial_values(tmp_path: Path) -> None:
    """A base model has other names than the model with a head, and no head."""
    path = huggingface(tmp_path / "hub", base__first__weight=SHARED)
    seen: dict[str, Tensor] = {}
    train(
        tmp_path / "run",
        lambda model, _: seen.update(weights(model)),
        init_from=path,
        init_rename={"base.*": "*"},
        init_missing=("head.*",),
    )
    new: dict[str, Tensor] = {}
    train(tmp_path / "new", lambda model, _: new.update(weights(model)))

    assert torch.equal(seen["first.weight"], SHARED)
    assert torch.equal(seen["head.weight"], new["head.weight"])


def test_what_does_not_fit_is_named(tmp_path: Path) -> None:
    """Before the first step, with what is there instead."""
    path = huggingface(tmp_path / "hub", model__first__weight=SHARED, head__weight=WEIGHT[:1])
    with pytest.raises(TaskError) as raised:
        train(tmp_path / "run", lambda *_: None, init_from=path)

    assert "lacks first.weight, head.bias" in str(raised.value)
    assert "has model.first.weight" in str(raised.value)
    assert "head.weight is F32[1, 2] in it and F32[2, 2] in the model" in str(raised.value)
    assert "init_rename" in str(raised.value)
    assert not (tmp_path / "run/checkpoints").exists()


def test_names_of_single_experts_need_weights_alone(tmp_path: Path) -> None:
    """They are joined only then, which is not what a list of unknown names says."""
    path = huggingface(tmp_path / "hub", experts__0__weight=SHARED, head__weight=WEIGHT)
    hint = "one tensor per expert, set run.init_state: weights"

    with pytest.raises(TaskError, match=hint):
        train(tmp_path / "run", lambda *_: None, init_from=path, init_state="all")
    with pytest.raises(TaskError) as raised:
        train(tmp_path / "run", lambda *_: None, init_from=path)
    assert hint not in str(raised.value)


class Vocabulary(nn.Module):
    """An embedding and a head for some tokens."""

    def __init__(self, size: int, *, tied: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(size, 2)
        self.head = nn.Linear(2, size)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.head(self.embed(tokens))
        return functional.cross_entropy(logits, (tokens + 1) % 3)


def _begun(directory: Path, size: int, *, tied: bool = False, **init: Any) -> dict[str, Tensor]:
    """Return weights and moments before the first step of a run, which it then trains."""
    found: dict[str, Tensor] = {}

    def task(session: Session) -> None:
        model = session.model(lambda: Vocabulary(size, tied=tied))
        optimizer = session.optimizer(lambda held: torch.optim.AdamW(held.values()))
        found.update(weights(model))
        names = list(found)
        for name, state in zip(names, optimizer.state.values(), strict=False):
            found.update({f"{name}.{slot}": value.clone() for slot, value in state.items()})
        for _ in session.steps(len(INPUTS)):
            session.train_step(lambda samples: model(torch.as_tensor(samples) % 3))

    settings = Settings(
        run=RunSettings(directory="run", **init),
        checkpoint=CheckpointSettings(every_steps=1, keep=0),
    )
    run(
        task, directory=str(directory), settings=settings,
        steps=2, global_batch=4, micro_batch=2, warmup_steps=0, schedule="constant",
    )  # fmt: skip
    return found


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("size", [8, 3])
def test_a_vocabulary_may_have_another_size(tmp_path: Path, size: int, *, tied: bool) -> None:
    """Common rows keep weights and moments; new ones are those of a new model without moments."""
    _begun(tmp_path / "first", 5, tied=tied)
    source = str(tmp_path / "first/checkpoints/step-00000002")
    held = _begun(tmp_path / "same", 5, tied=tied, init_from=source, init_state="all")
    new = _begun(tmp_path / "new", size, tied=tied)
    rows = ["embed.weight", "head.bias"] + ["head.weight"] * (not tied)

    with pytest.raises(TaskError) as raised:
        _begun(tmp_path / "refused", size, tied=tied, init_from=source, init_state="all")
    assert f"run.init_rows: {json.dumps(rows)}" in str(raised.value)
    init = {"init_from": source, "init_state": "all", "init_rows": tuple(rows)}
    found = _begun(tmp_path / "other", size, tied=tied, **init)

    common = min(5, size)
    assert len(found) == 4 * len(rows)
    for name, value in found.items():
        if name.endswith(".step"):
            assert value == held[name] == 2
            continue
        assert value.shape[0] == size
        assert torch.equal(value[:common], held[name][:common]), name
        rest = new.get(name, torch.zeros_like(value))
        assert torch.equal(value[common:], rest[common:]), name


@pytest.mark.parametrize("value", [torch.nan, -torch.inf])
def test_a_weight_that_is_not_finite_is_named(tmp_path: Path, value: float) -> None:
    """The first step would blame its loss on the learning rate; a buffer may be a mask."""
    weight = WEIGHT.clone()
    tensors = {"first__weight": SHARED, "head__bias": BIAS, "scale": torch.tensor([-torch.inf])}
    sound = huggingface(tmp_path / "sound", **tensors, head__weight=weight)
    weight[1, 0] = value
    spoiled = huggingface(tmp_path / "spoiled", **tensors, head__weight=weight)

    with pytest.raises(TaskError, match=r"head\.weight \(weight\) has values that are not finite"):
        train(tmp_path / "run", lambda *_: None, init_from=spoiled)
    with contextlib.suppress(NotFiniteError):
        train(tmp_path / "run", lambda *_: None, init_from=sound)


def test_moments_without_their_step_are_refused(tmp_path: Path) -> None:
    """A reader finds none where a file has none; AdamW would correct them as those of step 1."""
    shapes = {"first.weight": (2, 2), "head.weight": (2, 2), "head.bias": (2,)}
    values = {(fqn, slot): shape for fqn, shape in shapes.items() for slot in ("weight", *MOMENTS)}
    steps = {(fqn, "step"): () for fqn in shapes if fqn != "head.bias"}
    tensors = [
        tensor_of(fqn, shape, memoryview(torch.ones(shape).numpy().tobytes()), slot=slot)
        for (fqn, slot), shape in {**values, **steps}.items()
    ]
    store, folder = open_store(str(tmp_path / "source"))
    save_part(store, folder, tensors, attempt=0, param_groups=[{"params": list(shapes)}])

    with pytest.raises(TaskError, match=r"optimizer state of head\.bias without its step"):
        train(tmp_path / "run", lambda *_: None, init_from=folder, init_state="all")


def test_a_buffer_has_the_value_of_the_checkpoint(tmp_path: Path) -> None:
    """Also after a resume, when it is no longer checked."""
    path = huggingface(
        tmp_path / "hub",
        first__weight=SHARED,
        head__weight=WEIGHT,
        head__bias=BIAS,
        scale=torch.tensor([2.0]),
    )
    seen: list[float] = []
    train(
        tmp_path / "run",
        lambda model, _: seen.append(dict(model.named_buffers())["scale"].item()),
        init_from=path,
    )
    assert seen == [2.0]
    held = ucp_core.open(tmp_path / "run/checkpoints/step-00000002")
    saved = memoryview(bytearray(4))
    shape = (1,)
    need = tensor_of("scale", shape, saved)
    ucp_core.load(held, [need])
    assert saved.cast("f")[0] == 2.0


def test_all_state_goes_on_and_a_resume_does_not_look_there_again(tmp_path: Path) -> None:
    """The optimizer's moments and its count of steps, too; later the checkpoint may be gone."""
    train(tmp_path / "first", lambda *_: None)
    source = tmp_path / "first/checkpoints/step-00000002"
    held = ucp_core.open(source)
    seen: list[Any] = []

    def look(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        seen.append(weights(model))
        seen.append([{k: v.clone() for k, v in one.items()} for one in optimizer.state.values()])

    train(tmp_path / "run", look, init_from=str(source), init_state="all")

    assert [float(state["step"]) for state in seen[1]] == [2.0, 2.0, 2.0]
    assert all(state["exp_avg_sq"].abs().sum() > 0 for state in seen[1])
    assert held.extra["optimizer"]["step"] == 2.0
    shutil.rmtree(tmp_path / "first")
    (tmp_path / "run/result.json").unlink()
    train(tmp_path / "run", look, init_from=str(source), init_state="all")
    assert (tmp_path / "run/result.json").exists()


def test_weights_alone_are_no_whole_state(tmp_path: Path) -> None:
    path = huggingface(tmp_path / "hub", first__weight=SHARED, head__weight=WEIGHT, head__bias=BIAS)
    with pytest.raises(TaskError, match=r"no optimizer state; set run.init_state: weights"):
        train(tmp_path / "run", lambda *_: None, init_from=path, init_state="all")


def test_settings_that_cannot_work_are_told_at_once() -> None:
    found = problems(
        Settings(
            run=RunSettings(
                directory="run",
                init_state="some",  # type: ignore[arg-type]
                init_rename={"a.*": "b"},
                init_missing=("head.*",),
            )
        )
    )

    assert [line.partition(":")[0] for line in found] == [
        "run.init_state",
        "run.init_from",
        "run.init_rename",
    ]
