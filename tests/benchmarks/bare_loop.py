"""The peer of a session's step: the same model in a plain loop of torch, in the same processes."""

import functools
import itertools
import statistics
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module

from tests.benchmarks.common import paired
from tests.benchmarks.steps import Job, Meter, batch
from tests.support.ranks import Place, running
from ucp_core.layout import ParallelLayout
from ucp_core.storage import open_store
from workers.models import PRESETS, Decoder, mean_loss, tensor_plan
from workers.parallel import Mesh, ModelPlan, fsdp_modules, shard_model
from workers.protocol import Assignment, Completed
from workers.settings import CheckpointSettings, Settings, SnapshotSettings, TrainSettings
from workers.telemetry import ProgressRecord
from workers.train import Session, WorkerContext, run_attempt
from workers.train.executor import reduction_of
from workers.train.lm import adamw

WAYS: Final = ("bare", "alike", "session")
#: Samples in a pass, unless a job says otherwise.
MICRO_BATCH: Final = 2
NUM_SAMPLES: Final = 1 << 20
#: Llama as transformers builds it, in about the sizes of our presets.
LLAMAS: Final = {"llama-small": "small", "llama-10m": "10m", "llama-125m": "125m"}
MODELS: Final = ("tiny", "small", "10m", "125m", "350m", *LLAMAS)
RUN_S_MAX: Final = 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """A model to train."""

    build: Callable[[], nn.Module]  #: Makes it.
    #: Returns its loss on inputs and targets, ``(samples, sequence)`` each.
    loss_of: Callable[[nn.Module, Tensor, Tensor], Tensor]
    vocab_size: int  #: Its number of tokens.


def kind_of(model: str, *, compiled: bool = False, untied: bool = False) -> Kind:
    """Return the model of a name in ``MODELS``.

    Args:
        compiled: Whether its blocks are compiled.
        untied: Whether the output layer is not the embedding, so that stages can share it out.
    """
    shape = PRESETS[LLAMAS.get(model, model)]
    shape = replace(shape, tied=shape.tied and not untied)
    if model not in LLAMAS:

        def build() -> nn.Module:
            decoder = Decoder(shape)
            for layer in decoder.layers.values() if compiled else ():
                layer.compile()
            return decoder

        return Kind(
            build=build,
            loss_of=lambda model, inputs, targets: mean_loss(model(inputs), targets),
            vocab_size=shape.vocab_size,
        )
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=shape.vocab_size, hidden_size=shape.dim, num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads, num_key_value_heads=shape.num_kv_heads,
        intermediate_size=shape.ffn_dim, tie_word_embeddings=shape.tied, use_cache=False,
    )  # fmt: skip
    return Kind(
        build=lambda: transformers.LlamaForCausalLM(config),
        loss_of=lambda model, inputs, targets: mean_loss(model(input_ids=inputs).logits, targets),
        vocab_size=shape.vocab_size,
    )


class Loop(Protocol):
    """Trains one step when it is called, on the samples of this rank."""

    def __call__(self) -> float:
        """Return the loss of the step."""


def plain_loop(kind: Kind, mesh: DeviceMesh, job: Job, *, alike: bool) -> Loop:
    """Return a plain loop of FSDP2 that reads the loss of all ranks after every step."""
    num_micro_batches = job.global_batch // job.micro_batch // mesh.size()
    device = torch.device(mesh.device_type)
    model: Any = kind.build().to(device)
    keeps_gathered = False
    if alike:
        layout = ParallelLayout(dp_shard=mesh.size())
        ours = Mesh(sharding=mesh, layout=layout, rank=mesh.get_rank())
        keeps_gathered = shard_model(
            model, ours, precision=job.precision, reshard_after_forward=True
        )
        if device.type == "cpu":
            reduction_of(model, torch.device("cpu"), deterministic=False)
    else:
        is_bf16 = job.precision == "bf16"
        policy = MixedPrecisionPolicy(
            param_dtype=torch.bfloat16 if is_bf16 else None,
            reduce_dtype=torch.float32 if is_bf16 else None,
        )
        for layer in _layers(model):
            fully_shard(layer, mesh=mesh, mp_policy=policy)
        fully_shard(model, mesh=mesh, mp_policy=policy)
    if isinstance(model, Decoder):
        model.tie()
    scale = 1 / num_micro_batches / (mesh.size() if alike else 1)
    optimizer = adamw(dict(model.named_parameters()), TrainSettings())
    samples = itertools.count(mesh.get_rank() * (NUM_SAMPLES // mesh.size()))

    def step() -> float:
        total = torch.zeros((), device=device)
        for number in range(num_micro_batches):
            is_last = number == num_micro_batches - 1
            model.set_requires_gradient_sync(is_last)
            if keeps_gathered:
                for module in fsdp_modules(model):
                    module.set_reshard_after_backward(is_last, recurse=False)
            drawn = [next(samples) for _ in range(job.micro_batch)]
            tokens = batch(drawn, kind.vocab_size, job.sequence_length)
            inputs, targets = (each.to(device) for each in tokens)
            loss = kind.loss_of(model, inputs, targets)
            (loss * scale).backward()
            total += loss.detach() / num_micro_batches
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        dist.all_reduce(total, group=mesh.get_group())
        return total.item() / mesh.size()

    return step


def layout_loop(kind: Kind, mesh: DeviceMesh, job: Job) -> Loop:
    """Return a plain loop of tensor-parallel ranks, or of pipeline stages, that reads its loss.

    All ranks have the same samples, and no gradient is sharded. One all-reduce of two numbers gives
    norm and loss.
    """
    assert job.layout is not None, "the job has a layout"
    num_micro_batches, has_stages = job.global_batch // job.micro_batch, job.layout.pp > 1
    device = torch.device(mesh.device_type)
    model: Any = kind.build().to(device)
    if has_stages:
        model.keep_stage(mesh.get_rank(), mesh.size())
        passes = _stage_passes(model, mesh, num_micro_batches)
    else:
        parallelize_module(model, mesh, tensor_plan())
        passes = _whole_passes(kind, model, num_micro_batches)
    parameters = dict(model.named_parameters())
    optimizer = adamw(parameters, TrainSettings())
    samples = itertools.count()

    def step() -> float:
        tokens = []
        for _ in range(num_micro_batches):
            drawn = [next(samples) for _ in range(job.micro_batch)]
            inputs, targets = batch(drawn, kind.vocab_size, job.sequence_length)
            tokens.append((inputs.to(device), targets.to(device)))
        losses = passes(tokens)
        total = torch.stack(losses).mean() if losses else torch.zeros((), device=device)
        gradients: list[Any] = [one.grad for one in parameters.values()]
        cut = [one.to_local() for one in gradients if isinstance(one, DTensor)]
        whole = [one for one in gradients if not isinstance(one, DTensor)]
        numbers = torch.stack((_square(whole if has_stages else cut), total))
        dist.all_reduce(numbers, group=mesh.get_group())
        square = numbers[0] if has_stages else numbers[0] + _square(whole)
        torch._foreach_mul_([*cut, *whole], (1.0 / (square.sqrt() + 1e-6)).clamp(max=1.0))
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return numbers[1].item() / (1 if has_stages else mesh.size())

    return step


#: Computes all micro-batches of a step; returns their losses, if they are here.
_Passes = Callable[[list[tuple[Tensor, Tensor]]], list[Tensor]]


def _whole_passes(kind: Kind, model: nn.Module, num_micro_batches: int) -> _Passes:
    def passes(tokens: list[tuple[Tensor, Tensor]]) -> list[Tensor]:
        found: list[Tensor] = []
        for inputs, targets in tokens:
            loss = kind.loss_of(model, inputs, targets)
            (loss / num_micro_batches).backward()
            found.append(loss.detach())
        return found

    return passes


def _stage_passes(model: nn.Module, mesh: DeviceMesh, num_micro_batches: int) -> _Passes:
    rank, device = mesh.get_rank(), torch.device(mesh.device_type)
    stage = PipelineStage(model, rank, mesh.size(), device, group=mesh.get_group())
    schedule = Schedule1F1B(stage, num_micro_batches, loss_fn=mean_loss)

    def passes(tokens: list[tuple[Tensor, Tensor]]) -> list[Tensor]:
        inputs, targets = (torch.cat(each) for each in zip(*tokens, strict=True))
        losses: list[Tensor] = []
        given = () if rank else (inputs,)
        schedule.step(*given, target=targets, losses=losses, return_outputs=False)
        return [loss.detach() for loss in losses]

    return passes


def _square(gradients: list[Tensor]) -> Tensor:
    norms: Any = torch._foreach_norm(gradients)
    return torch.stack(norms).square().sum()


def session_loop(kind: Kind, session: Session, job: Job) -> tuple[Loop, Iterator[Any]]:
    """Return a loop that trains a step of ``session``, and the steps that it takes."""
    plan = ModelPlan(tensor=tensor_plan(), keep_stage=Decoder.keep_stage)
    model = session.model(kind.build, plan=None if job.layout is None else plan)
    session.optimizer(lambda parameters: adamw(parameters, session.settings.train))
    steps = session.steps(NUM_SAMPLES)

    def loss_of(samples: Any) -> tuple[Tensor, int]:
        drawn = batch(samples.tolist(), kind.vocab_size, job.sequence_length)
        inputs, targets = (each.to(session.device) for each in drawn)
        return kind.loss_of(model, inputs, targets), targets.numel()

    def whole_step() -> float:
        next(steps)
        return session.train_step(loss_of).loss

    if job.layout is not None:
        return whole_step, steps

    def step() -> float:
        one = next(steps)
        for samples in one.micro_batches():
            one.backward(*loss_of(samples))
        one.apply()
        return one.loss

    return step, steps


def compare(job: Job, model: str, folder: Path) -> dict[str, Any]:
    """Train in turns; return what a step takes each way, and the ratios to the plain ones."""
    with running(functools.partial(_rank, job=job, model=model), job.workers, folder) as ranks:
        seen = ranks.results(RUN_S_MAX)
    wall_s: dict[str, list[float]] = {way: [] for way in job.ways}
    used_s: dict[str, list[float]] = {way: [] for way in job.ways}
    for way, first, last in job.blocks():
        times_s = seen[0]["times_s"][first : last + 1]
        wall_s[way].append(statistics.median(b - a for a, b in itertools.pairwise(times_s)))
        total_s = sum(one["used_s"][last] - one["used_s"][first] for one in seen)
        used_s[way].append(total_s / (last - first))
    found: dict[str, Any] = {
        "device": "cuda" if torch.cuda.is_available() else "cpu",
        "step_ms": {way: round(1e3 * statistics.median(wall_s[way]), 2) for way in job.ways},
    }
    for plain in job.ways[:-1]:
        found[f"session_of_{plain}"] = {
            "wall": paired(wall_s["session"], wall_s[plain]),
            "processor": paired(used_s["session"], used_s[plain]),
        }
    return found


def _rank(place: Place, *, job: Job, model: str) -> dict[str, Any]:
    """Be one worker; return what the meter saw."""
    # FSDP2 warns of gradients that are not reduced with gloo.
    warnings.simplefilter("ignore")
    if torch.cuda.is_available():
        torch.cuda.set_device(place.rank)
    store, directory = open_store(str(place.directory / "run"))
    meter = Meter(job, [])
    ours = sum(job.way(step) == "session" for step in range(1, job.num_steps + 1))
    context = WorkerContext(
        worker=f"w{place.rank:04d}",
        settings=Settings(
            train=TrainSettings(
                steps=ours,
                global_batch=job.global_batch,
                micro_batch=job.micro_batch,
                precision=job.precision,
                warmup_steps=0,
                schedule="constant",
            ),
            checkpoint=CheckpointSettings(every_steps=10**9),
            snapshot=SnapshotSettings(every_steps=0),
        ),
        store=store,
        directory=directory,
        progress=ProgressRecord.create(place.progress_path, worker=f"w{place.rank:04d}"),
        ring_path=str(place.ring_path),
        yield_requested=lambda _: False,
        fenced=lambda _: False,
    )
    assignment = Assignment(
        attempt=1,
        rank=place.rank,
        layout=job.layout or ParallelLayout(dp_shard=job.workers),
        store_host="127.0.0.1",
        store_port=place.port,
        resume_step=0,
        resume_attempt=0,
        lineage=((1, 0),),
    )
    kind = kind_of(model, compiled=job.compiled, untied=job.layout is not None)
    task = functools.partial(_take_turns, job=job, kind=kind, meter=meter)
    outcome = run_attempt(assignment, context, task)
    assert isinstance(outcome, Completed), outcome
    return meter.seen()


def _take_turns(session: Session, *, job: Job, kind: Kind, meter: Meter) -> None:
    ours, steps = session_loop(kind, session, job)
    is_cuda = session.device.type == "cuda"
    group = dist.new_group(backend="nccl" if is_cuda else "gloo")
    mesh = DeviceMesh.from_group(group, session.device.type)
    loops: dict[str, Loop] = {"session": ours}
    for way in job.ways[:-1]:
        if job.layout is None:
            loops[way] = plain_loop(kind, mesh, job, alike=way == "alike")
        else:
            loops[way] = layout_loop(kind, mesh, job)
    for number in range(1, job.num_steps + 1):
        meter.tick()
        # Its return waits for the device, since the loss is read.
        loops[job.way(number)]()
    # The session's last step ends when the next one is asked for.
    assert next(steps, None) is None


def _layers(model: Any) -> list[nn.Module]:
    layers = model.layers if isinstance(model, Decoder) else model.model.layers
    return list(layers.values() if isinstance(layers, nn.ModuleDict) else layers)
