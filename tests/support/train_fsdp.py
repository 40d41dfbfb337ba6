"""A small model under FSDP2 and tensor parallel that saves and loads with torch's own DCP."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy.typing as npt
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from tests.support.ranks import Place

VOCAB, WIDTH, INNER, BATCH, LENGTH = 13, 6, 10, 4, 5


class Save(NamedTuple):
    """A checkpoint of DCP: where, and how its optimizer's state is laid out."""

    directory: str
    flatten: bool


class Seen(NamedTuple):
    """The findings of a process; ``state`` has whole tensors by fqn and slot."""

    losses: list[float]
    state: dict[tuple[str, str], npt.NDArray[Any]]
    groups: list[dict[str, Any]]


class Block(nn.Module):
    """A feed-forward layer with a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, INNER, bias=False)
        self.down = nn.Linear(INNER, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.down(torch.tanh(self.up(self.norm(x))))
        return out


class Model(nn.Module):
    """Tied embeddings, a frozen gain, a counting buffer, and extents that nothing divides."""

    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.gain = nn.Parameter(torch.full((WIDTH,), 1.5), requires_grad=False)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("seen", torch.tensor(0))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids[:, :-1])
        for block in self.blocks:
            x = block(x)
        logits = self.head(x * self.gain)
        return nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())


def build(fsdp: int, tp: int) -> tuple[Model, torch.optim.Optimizer]:
    """Return model and optimizer, sharded unless both degrees are 1 and there is no other rank."""
    torch.manual_seed(0)
    model = Model()
    if dist.is_initialized():
        mesh = init_device_mesh("cpu", (fsdp, tp), mesh_dim_names=("fsdp", "tp"))
        if tp > 1:
            plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
            for block in model.blocks:
                parallelize_module(block, mesh["tp"], plan)
        for block in model.blocks:
            fully_shard(block, mesh=mesh["fsdp"])
        fully_shard(model, mesh=mesh["fsdp"])
    decayed = [p for n, p in model.named_parameters() if p.dim() > 1]
    others = [p for n, p in model.named_parameters() if p.dim() == 1 and p.requires_grad]
    groups = [
        {"params": decayed, "weight_decay": 0.1, "lr": 1e-2},
        {"params": others, "weight_decay": 0.0, "lr": 2e-2},
    ]
    return model, torch.optim.AdamW(groups, betas=(0.8, 0.95))


def train(
    model: Model, optimizer: torch.optim.Optimizer, steps: Sequence[int], fsdp: int
) -> list[float]:
    """Train some steps and return the loss of each over the whole batch."""
    losses = []
    place = dist.get_rank() // (dist.get_world_size() // fsdp) if dist.is_initialized() else 0
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        ids = torch.randint(0, VOCAB, (BATCH, LENGTH), generator=generator)
        loss = model(ids.chunk(fsdp)[place])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        model.seen.add_(BATCH)
        mean = loss.detach().clone()
        if dist.is_initialized():
            dist.all_reduce(mean)
            mean /= dist.get_world_size()
        losses.append(float(mean))
    return losses


def _state_dict(model: Model, optimizer: torch.optim.Optimizer, save: Save, steps: int) -> Any:
    options = StateDictOptions(flatten_optimizer_state_dict=save.flatten)
    weights, moments = get_state_dict(model, optimizer, options=options)
    return {"model": weights, "optim": moments, "train": {"step": steps}}


def load(model: Model, optimizer: torch.optim.Optimizer, save: Save) -> int:
    """Load with stock DCP and return the step."""
    state = _state_dict(model, optimizer, save, 0)
    dcp.load(state, checkpoint_id=save.directory, no_dist=not dist.is_initialized())
    set_state_dict(
        model,
        optimizer,
        model_state_dict=state["model"],
        optim_state_dict=state["optim"],
        options=StateDictOptions(flatten_optimizer_state_dict=save.flatten),
    )
    return int(state["train"]["step"])


def _whole(tensor: Tensor) -> npt.NDArray[Any]:
    if isinstance(tensor, DTensor):
        tensor = tensor.full_tensor()
    found: npt.NDArray[Any] = tensor.detach().clone().numpy()
    return found


def look(model: Model, optimizer: torch.optim.Optimizer, losses: list[float]) -> Seen:
    """Return the whole state; every rank must call it."""
    state = {(name, "weight"): _whole(p) for name, p in model.named_parameters()}
    state |= {(name, "weight"): _whole(b) for name, b in model.named_buffers()}
    for name, parameter in model.named_parameters():
        for slot, value in optimizer.state.get(parameter, {}).items():
            state[name, slot] = _whole(value)
    groups = [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
    return Seen(losses, state, groups)


def _join(place: Place, world_size: int) -> None:
    store = dist.PrefixStore("fsdp", dist.TCPStore("127.0.0.1", place.port, is_master=False))
    dist.init_process_group("gloo", store=store, rank=place.rank, world_size=world_size)


def train_and_save(
    place: Place, *, fsdp: int, tp: int, saves: Sequence[Save]
) -> tuple[Seen, list[float]]:
    """Train 2 steps, save them in every convention, and train 2 more."""
    _join(place, fsdp * tp)
    model, optimizer = build(fsdp, tp)
    losses = train(model, optimizer, range(2), fsdp)
    for save in saves:
        dcp.save(_state_dict(model, optimizer, save, 2), checkpoint_id=save.directory)
    seen = look(model, optimizer, losses)
    after = train(model, optimizer, range(2, 4), fsdp)
    dist.destroy_process_group()
    return seen, after


def load_and_train(
    place: Place, *, fsdp: int, tp: int, saves: Sequence[Save]
) -> list[tuple[Seen, list[float]]]:
    """Load each checkpoint into a new model, and train the next 2 steps."""
    _join(place, fsdp * tp)
    found = []
    for save in saves:
        model, optimizer = build(fsdp, tp)
        step = load(model, optimizer, save)
        seen = look(model, optimizer, [])
        found.append((seen, train(model, optimizer, range(step, step + 2), fsdp)))
    dist.destroy_process_group()
    return found
