"""Makes Megatron's older checkpoints, a folder per rank, without Megatron, and spoils them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from tests.support.deepspeed_folders import CLASSES, SLOTS, Array, namespace, tensor
from ucp_core.storage import LocalStore
from ucp_core.torch_files import write_torch_file

LAYERS = 2
EXPERTS = 4
EMBEDDING = "embedding.word_embeddings.weight"


def _halves(whole: Array, tp: int) -> list[Array]:
    parts = [np.split(part, tp) for part in np.split(whole, 2)]
    return [np.concatenate([part[rank] for part in parts]) for rank in range(tp)]


def _dim(dim: int) -> Callable[[Array, int], list[Array]]:
    return lambda whole, tp: np.split(whole, tp, axis=dim)


def _all(whole: Array, tp: int) -> list[Array]:
    return [whole] * tp


def _fused(number: int, expert_rank: int, ep: int, *, gated: bool) -> Callable[..., list[Array]]:
    """Return the cut of one parameter of all experts of a rank: ``[in, out]`` each."""

    def cut(whole: Array, tp: int) -> list[Array]:
        experts = np.split(whole, ep)[expert_rank]
        dense = _dim(1) if number == 2 else _halves if gated else _dim(0)
        by_expert = [dense(expert, tp) for expert in experts]
        rows = whole.shape[2] if number == 1 else len(experts) * whole.shape[2] // tp
        return [
            np.stack([parts[rank].T for parts in by_expert]).reshape(rows, -1) for rank in range(tp)
        ]

    return cut


#: Names in a layer, their shapes, and how they are cut.
LAYER: dict[str, tuple[tuple[int, ...], Callable[[Array, int], list[Array]]]] = {
    "input_layernorm.weight": ((6,), _all),
    "self_attention.linear_qkv.weight": ((24, 6), _dim(0)),
    "self_attention.linear_proj.weight": ((6, 8), _dim(1)),
    "mlp.linear_fc1.weight": ((20, 6), _halves),
    "mlp.linear_fc2.weight": ((6, 10), _dim(1)),
}


def _value(name: str, slot: str, shape: tuple[int, ...]) -> Array:
    values = np.random.default_rng([*f"{name}/{slot}".encode()]).standard_normal(shape)
    return np.asarray(values, np.float32)


class Megatron:
    """A checkpoint before it is written: trees by file.

    Args:
        tp: Tensor parallel ranks.
        pp: Pipeline stages.
        distributed: The optimizer has flat buffers.
        frozen: Ends of the names that it does not have.
        norms: The weights of all norms; None: random ones.
        ep: Expert parallel ranks.
        gated: The first linear is a gate and an up projection.
        dense: The first layers without experts.
        expert: Module of each expert, where there are several ranks of them; empty: all that a rank
            has are one parameter, also where it is the only one.
    """

    def __init__(  # noqa: PLR0913 - the axes of a layout
        self,
        *,
        tp: int = 1,
        pp: int = 1,
        distributed: bool = False,
        frozen: tuple[str, ...] = (),
        norms: float | None = None,
        ep: int = 1,
        gated: bool = True,
        expert: str = "experts.local_experts.{}",
        dense: int = 0,
    ) -> None:
        self.trees: dict[str, Any] = {}
        self._frozen, self._norms, self._ep = frozen, norms, ep
        self._gated, self._expert, self._dense = gated, expert, dense
        self.expected: dict[tuple[str, str], Array] = {}
        self._tp, self._pp = tp, pp
        for stage in range(pp):
            for rank in range(tp):
                for expert_rank in range(ep):
                    self._add(stage, rank, expert_rank, distributed=distributed)

    def _params(self, stage: int, expert_rank: int) -> list[tuple[str, str, tuple[int, ...], Any]]:
        """Return the local name, the name in the model, the shape and the cut of each."""
        found: list[tuple[str, str, tuple[int, ...], Any]] = []
        if stage == 0:
            found.append((EMBEDDING, EMBEDDING, (8, 6), _dim(0)))
        count = LAYERS // self._pp
        for layer in range(count):
            number = stage * count + layer
            ends = [(name, name, *kind) for name, kind in self._layer().items()]
            own = self._experts(expert_rank) if number >= self._dense else []
            for local, whole, shape, cut in [*ends, *own]:
                names = f"decoder.layers.{layer}.{local}", f"decoder.layers.{number}.{whole}"
                found.append((*names, shape, cut))
        if stage == self._pp - 1:
            norm = "decoder.final_layernorm.weight"
            found.append((norm, norm, (6,), _all))
            if self._pp > 1:
                found.append(("output_layer.weight", EMBEDDING, (8, 6), _dim(0)))
        return found

    def _layer(self) -> dict[str, Any]:
        if self._gated:
            return LAYER
        return {**LAYER, "mlp.linear_fc1.weight": ((10, 6), _dim(0))}

    def _experts(self, expert_rank: int) -> list[tuple[str, str, tuple[int, ...], Any]]:
        found: list[tuple[str, str, tuple[int, ...], Any]] = []
        for number in (1, 2) if not self._expert else ():
            shape, _ = self._layer()[f"mlp.linear_fc{number}.weight"]
            whole = f"mlp.experts.experts.linear_fc{number}.weight"
            cut = _fused(number, expert_rank, self._ep, gated=self._gated)
            found.append((f"mlp.experts.weight{number}", whole, (EXPERTS, *shape), cut))
        for expert in range(EXPERTS // self._ep if self._expert and self._ep > 1 else 0):
            own = expert_rank * (EXPERTS // self._ep) + expert
            for name in ("linear_fc1.weight", "linear_fc2.weight"):
                local, whole = (f"mlp.{self._expert.format(n)}.{name}" for n in (expert, own))
                found.append((local, whole, *self._layer()[f"mlp.{name}"]))
        return found

    def _add(self, stage: int, rank: int, expert_rank: int, *, distributed: bool) -> None:
        params = self._params(stage, expert_rank)
        model: dict[str, Any] = {}
        shards: dict[tuple[str, str], Array] = {}
        for local, whole, shape, cut in params:
            for slot in ("weight", *SLOTS):
                value = _value(whole, slot, shape)
                if slot == "weight" and "norm" in whole and self._norms is not None:
                    value = np.full(shape, self._norms, np.float32)
                self.expected[whole, slot] = value
                shards[local, slot] = cut(value, self._tp)[rank]
            model[local] = tensor(shards[local, "weight"].astype(np.float16))
        model["decoder.layers.0.mlp._extra_state"] = None
        params = [param for param in params if not param[1].endswith(self._frozen)]
        folder = f"mp_rank_{rank:02d}" + (f"_{stage:03d}" if self._pp > 1 else "")
        folder += f"_{expert_rank:03d}" if self._ep > 1 else ""
        optimizers, flats = [], []
        is_chained = self._ep > 1 and any("experts." in param[0] for param in params)
        for experts in (False, True) if is_chained else (False,):
            own = [p for p in params if self._ep == 1 or ("experts." in p[0]) == experts]
            hyper = [
                {"lr": 0.1, "wd_mult": wd, "step": 5, "is_expert_parallel": experts}
                for wd in ((1.0,) if experts else (1.0, 0.0))
            ]
            groups = [[p[0] for p in own if (len(p[2]) > 1) == bool(g["wd_mult"])] for g in hyper]
            if distributed:
                optimizers.append({"optimizer": {"param_groups": hyper}})
                # The first of the ranks that repeat a parameter gathers its state.
                flats.append(self._flat(own, shards) if experts or expert_rank == 0 else None)
            else:
                optimizers.append(_numbered(groups, hyper, shards))
        optimizer = optimizers if is_chained else optimizers[0]
        if distributed and any(flats):
            self.trees[f"{folder}/distrib_optim.pt"] = flats if is_chained else flats[0]
        self.trees[f"{folder}/model_optim_rng.pt"] = {
            "args": namespace(
                tensor_model_parallel_size=self._tp,
                pipeline_model_parallel_size=self._pp,
                num_layers=LAYERS,
                swiglu=self._gated,
                **self._expert_arguments(),
            ),
            "checkpoint_version": 3.0,
            "iteration": 5,
            "model": model,
            "optimizer": optimizer,
            "opt_param_scheduler": {"num_steps": 5},
            "rng_state": [1],
        }

    def _expert_arguments(self) -> dict[str, Any]:
        if self._expert and self._ep == 1:
            return {}
        return {
            "expert_model_parallel_size": self._ep,
            "num_experts": EXPERTS,
            "moe_grouped_gemm": not self._expert,
            "hidden_size": 6,
            "moe_ffn_hidden_size": 10,
        }

    def _flat(self, params: Any, shards: Any) -> dict[Any, Any]:
        """Return a buffer of two buckets: reversed, aligned, unpadded at the end of each."""
        parts: dict[str, list[Array]] = {slot: [] for slot in ("weight", *SLOTS)}
        end = bucket = 0
        for index, (local, _, _, _) in enumerate(reversed(params)):
            if index == len(params) // 2:
                bucket = end
            start = bucket + -(-(end - bucket) // 64) * 64
            for slot, arrays in parts.items():
                arrays += [np.zeros(start - end, np.float32), shards[local, slot].ravel()]
            end = start + shards[local, "weight"].size
        flat = {slot: tensor(np.concatenate(arrays)) for slot, arrays in parts.items()}
        flat["param"] = flat.pop("weight")
        return {"buckets_coalesced": True, 0: {"torch.float16": {**flat, "numel_unpadded": end}}}

    def write(self, path: Path) -> Path:
        for name, tree in self.trees.items():
            (path / "iter_0000005" / name).parent.mkdir(parents=True, exist_ok=True)
            file = str(path / "iter_0000005" / name)
            write_torch_file(LocalStore(), file, tree, allow=CLASSES, fsync=False)
        (path / "latest_checkpointed_iteration.txt").write_text("5")
        return path


def _numbered(names: list[list[str]], hyper: list[dict[str, Any]], shards: Any) -> dict[str, Any]:
    order = [name for group in names for name in group]
    state = {
        number: {slot: tensor(shards[name, slot]) for slot in SLOTS}
        for number, name in enumerate(order)
    }
    groups = [
        {**values, "params": [order.index(name) for name in group]}
        for values, group in zip(hyper, names, strict=True)
    ]
    masters = [[tensor(shards[name, "weight"]) for name in group] for group in names]
    return {
        "optimizer": {"state": state, "param_groups": groups},
        "fp32_from_fp16_params": masters,
    }
