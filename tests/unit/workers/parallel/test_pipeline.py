"""A model is cut into stages, and a script calls one of them as if it were whole."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from workers.errors import LayoutRefusedError, TaskError
from workers.models import Decoder, resolve
from workers.parallel import ModelPlan, StageModel, Stages, materialize, own_names
from workers.state import PersistentBuffers

PLAN = ModelPlan(keep_stage=Decoder.keep_stage)


def decoder(**sizes: Any) -> Decoder:
    return Decoder(resolve("tiny", {"num_layers": 5, "tied": False, **sizes}))


def on_meta(**sizes: Any) -> Decoder:
    with torch.device("meta"):
        return decoder(**sizes)


def test_stages_have_every_parameter_under_its_own_name() -> None:
    """A checkpoint of stages is loaded by a whole model, and by another number of stages."""
    whole = on_meta()
    names = [name for name, _ in whole.named_parameters()]
    for num_stages in (2, 3, 5):
        stages, held = Stages(whole, PLAN, num_stages), list[str]()
        for number in range(num_stages):
            stages.keep(stage := on_meta(), number)
            held += [name for name, _ in stage.named_parameters()]
        assert sorted(held) == sorted(names)
        assert [name for name, _ in whole.named_parameters()] == names


def test_stages_one_after_another_are_the_whole_model() -> None:
    """The second of two stages begins with layer 2, and takes what layer 1 returns."""
    whole, first, second = decoder(), decoder(), decoder()
    for number, stage in enumerate((first, second)):
        stage.load_state_dict(whole.state_dict())
        stage.keep_stage(number, 2)
    tokens = torch.arange(12).reshape(2, 6)

    assert torch.equal(second(first(tokens)), whole(tokens))


def scaled() -> nn.Module:
    """Return a decoder with a buffer that every stage has."""
    model = decoder()
    model.register_buffer("scale", torch.ones(3))
    return model


def test_a_rank_has_every_other_stage_and_their_buffers_once() -> None:
    """Their names are those of the whole model, in which a checkpoint has each of them once."""
    model = Stages(scaled(), PLAN, 2, 2).of_rank(1, scaled)
    assert model.numbers == (1, 3)
    materialize(model.stages, torch.device("cpu"))
    model.share_buffers()

    other = Stages(scaled(), PLAN, 2, 2).of_rank(0, scaled)
    found = [name for one in (model, other) for name in own_names(one.stages.named_parameters())]
    assert sorted(found) == sorted(name for name, _ in scaled().named_parameters())
    assert PersistentBuffers(model.stages).named().keys() == {"scale"}
    first, second = model.stages.children()
    assert first.scale is second.scale


def test_activations_are_described_without_computing_them() -> None:
    """A stage must know the shape of what it receives before the first pass."""
    stages = Stages(on_meta(), PLAN, 2)

    inputs = [torch.arange(12).reshape(2, 6)]
    tokens, hidden, logits = stages.described(1, inputs, {}, torch.bfloat16)

    assert [tuple(one.shape) for (one,) in (tokens, hidden, logits)] == [
        (2, 6),
        (2, 6, 64),
        (2, 6, 264),
    ]
    assert [one.dtype for (one,) in (tokens, hidden, logits)] == [
        torch.int64,
        torch.bfloat16,
        torch.bfloat16,
    ]
    assert logits[0].is_meta


class Reading(nn.Module):
    """Decides by values."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.layers = how, nn.ModuleDict({"0": nn.Linear(4, 4), "1": nn.Linear(4, 4)})

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers.values():
            if self.how == "if" and x.mean() > 0:
                continue
            if self.how == "rows":
                x = x[x[:, 0] > 0]
            if self.how == "numpy":
                x = x * x.numpy().sum()
            x = layer(x)
        return x

    def keep_stage(self, number: int, num_stages: int) -> None:
        del self.layers[str((number + 1) % num_stages)]


@pytest.mark.parametrize("how", ["if", "rows", "numpy"])
def test_a_model_that_decides_by_values_is_refused_with_its_line(how: str) -> None:
    """torch says something of meta tensors, which the script has never heard of."""
    with torch.device("meta"):
        stages = Stages(Reading(how), ModelPlan(keep_stage=Reading.keep_stage), 2)
    with pytest.raises(
        LayoutRefusedError, match=r"pp=2: test_pipeline.py:\d+ in Reading reads values of a tensor"
    ):
        stages.described(1, (torch.ones(2, 4),), {}, None)


def forget(model: Decoder, number: int, num_stages: int) -> None:
    model.keep_stage(number, num_stages)
    model.embedding = None


@pytest.mark.parametrize(
    ("plan", "tied", "told"),
    [
        (ModelPlan(), False, "parallel.pp=2: model Decoder has no plan for it"),
        (
            PLAN,
            True,
            "embedding.weight and head.weight of model Decoder are one parameter on stages",
        ),
        (
            ModelPlan(keep_stage=forget),
            False,
            "leaves embedding.weight of model Decoder on no stage",
        ),
        (
            ModelPlan(keep_stage=lambda _model, _number, _count: None),
            False,
            "leaves embedding.weight of model Decoder on stages 0, 1",
        ),
    ],
)
def test_a_model_that_stages_cannot_share_out_is_refused(
    plan: ModelPlan, *, tied: bool, told: str
) -> None:
    """A parameter on two stages would be trained twice, and saved as one of them has it."""
    with pytest.raises(TaskError, match=told):
        Stages(on_meta(tied=tied), plan, 2)


def staged(number: int) -> StageModel:
    linear = nn.Linear(3, 3)
    nn.init.eye_(linear.weight)
    nn.init.zeros_(linear.bias)
    return StageModel({number: linear}, 3)


@pytest.mark.parametrize("number", [0, 1, 2])
def test_a_function_of_the_loss_is_called_alike_on_every_stage(number: int) -> None:
    """It prepares its batch, and only the last stage has outputs to compute a loss of."""
    model = staged(number)
    batch, received = torch.ones(2, 3), torch.full((2, 3), 5.0)
    prepared = []

    def loss_of() -> tuple[Tensor, int]:
        prepared.append(batch)
        try:
            outputs = model(batch * 2)
        except Exception:  # noqa: BLE001 - as a script might
            pytest.fail("the script caught what ends its function")
        return outputs.sum(), 7

    returned = model.compute(number, loss_of, () if number == 0 else (received,))

    assert len(prepared) == 1
    if number == 2:
        assert (returned[0].item(), returned[1]) == (30.0, 7)
    else:
        assert torch.equal(returned, batch * 2 if number == 0 else received)


def test_a_function_that_calls_the_model_never_or_twice_is_refused() -> None:
    """The second call would get the same outputs again, whatever it asked for."""
    first, last = staged(0), staged(2)
    received = (torch.ones(2, 3),)
    with pytest.raises(TaskError, match="without calling the model"):
        first.compute(0, lambda: torch.zeros(()), ())
    with pytest.raises(TaskError, match="did not call the model"):
        last.compute(2, lambda: torch.zeros(()), received)
    with pytest.raises(TaskError, match="call the model once"):
        last.compute(2, lambda: last(received[0]) + last(received[0]), received)
    with pytest.raises(TaskError, match="call the model once"):
        first(received[0])
