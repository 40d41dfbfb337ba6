"""The optimizers that files without ZeRO hold, and the parameters that each numbers, in order."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from ucp_core.errors import CheckpointCorruptError, UnsupportedVersionError
from ucp_core.formats.deepspeed.reading.plain_names import told_names
from ucp_core.formats.deepspeed.reading.topology import Native
from ucp_core.formats.deepspeed.reading.weights import Modules
from ucp_core.formats.deepspeed.reading.zero import EXPERT, param_shapes
from ucp_core.formats.shared import DISTRIBUTE_IT, NAME_THEM, Rank, unclear
from ucp_core.torch_files import TensorRef

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    Params = Sequence[tuple[str, TensorRef]]

_EP_GROUP = "ep_size_"


class Source(NamedTuple):
    """One optimizer.

    Attributes:
        file: Where it is.
        tree: What it saved.
        rank: Whose shards it has; a pipeline's weights are all read as of its first stage.
        params: What it can number, in the model's order.
        names: By group, where the file tells those of all that are trained.
        told: By group, where the optimizer tells what it was made of, frozen ones too.
        remedy: What to do where the names cannot be told.
    """

    file: str
    tree: Mapping[str, Any]
    rank: Rank
    params: Params
    names: list[list[str]] | None
    told: list[list[str]] | None = None
    remedy: str = DISTRIBUTE_IT


def sources(native: Native, modules: Modules) -> Iterator[Source]:
    """Yield the optimizers of all model-parallel and expert parallel ranks that saved one.

    Raises:
        CheckpointCorruptError: A file is missing, or holds what no DeepSpeed writes.
        UnsupportedVersionError: Experts are in a pipeline.
    """
    for mp in range(native.tp * native.pp):
        file = native.model[0, mp]
        tree = native.files.trees[file].get("optimizer")
        if tree is None:
            continue
        if native.experts:
            yield from _of_experts(native, modules, mp)
            continue
        shapes = param_shapes(native.files.trees[file], file)
        names = None if shapes is None else [list(group) for group in shapes]
        tp = native.rank(mp).tp
        if modules.pipeline is not None:
            # The names of a stage are not those of the whole.
            params: Params = modules.pipeline.params.get(mp, [])
            yield Source(file, _checked(tree, file), Rank(0, tp), params, names)
            continue
        params = modules.order.get(tp, [])
        told = told_names(_checked(tree, file), params)
        yield Source(file, tree, Rank(0, tp), params, names, told, NAME_THEM)


def _checked(tree: Any, file: str) -> Mapping[str, Any]:
    if not isinstance(tree, dict):
        raise CheckpointCorruptError(f"{file}: optimizer is no dict", file=file)
    return tree


def _of_experts(native: Native, modules: Modules, mp: int) -> Iterator[Source]:
    """Yield the optimizers of the expert parallel ranks: each has its own experts, and the rest."""
    if native.pp > 1:
        raise UnsupportedVersionError(
            f"{native.files.directory}: experts in a pipeline without ZeRO keep no names of the "
            "optimizer's parameters; save with ZeRO stage 1",
            path=native.files.directory,
        )
    files = {ep: file for (ep, of), file in native.expert_optim.items() if of == mp}
    degree = 1 + max(files, default=0)
    for file in files.values():
        tree = _checked(native.files.trees[file].get("optimizer"), file)
        degree = max(degree, _told_degree(tree, file))
    missing = [f"expp_rank_{ep}_mp_rank_{mp:02d}_optim_states.pt" for ep in range(degree)]
    missing = [name for ep, name in enumerate(missing) if ep not in files]
    if missing:
        raise CheckpointCorruptError(
            f"{native.files.directory} lacks {', '.join(missing[:4])}, the optimizer of experts: "
            "the checkpoint was not copied or saved completely; use another one",
            path=native.files.directory,
            missing=tuple(missing),
        )
    for ep, file in sorted(files.items()):
        tree = _checked(native.files.trees[file].get("optimizer"), file)
        params = _with_experts(native, modules, mp, (ep, degree), file)
        yield Source(file, tree, native.rank(mp), params, None)


def _told_degree(tree: Mapping[str, Any], file: str) -> int:
    """Return the expert parallel ranks that names of groups tell: 1 if they tell none."""
    inner = tree.get("optimizer_state_dict", tree)
    groups = inner.get("param_groups") if isinstance(inner, dict) else None
    names = {str(g.get("name", "")) for g in groups or () if isinstance(g, dict) and g.get("moe")}
    degrees = {int(n[len(_EP_GROUP) :]) for n in names if n[len(_EP_GROUP) :].isdecimal()}
    if len(degrees) > 1:
        raise UnsupportedVersionError(
            f"{file}: layers of experts with {sorted(degrees)} expert parallel ranks, without "
            "ZeRO: which rank has which experts is not told; save with ZeRO stage 1",
            file=file,
        )
    return max(degrees, default=1)


def _with_experts(
    native: Native, modules: Modules, mp: int, ep: tuple[int, int], file: str
) -> Params:
    """Return the parameters of one of several expert parallel ranks; its experts are in place.

    A layer registers its gate, then its experts; those are in files of their own.
    """
    rank, degree = ep
    held: dict[str, list[tuple[int, str, TensorRef]]] = {}
    for (_, number, of), name in sorted(native.experts.items()):
        if of == mp:
            for fqn, ref in native.files.trees[name].items():
                match = EXPERT.fullmatch(str(fqn))
                if match is not None and isinstance(ref, TensorRef):
                    held.setdefault(match[1], []).append((number, str(fqn), ref))
    behind: dict[str, list[tuple[str, TensorRef]]] = {}
    params = list(modules.order.get(native.rank(mp).tp, []))
    for prefix, experts in held.items():
        layer = prefix.removesuffix("experts.deepspeed_experts.")
        gates = [name for name, _ in params if name.startswith(f"{layer}gate.")]
        total = 1 + max(number for number, _, _ in experts)
        if not gates or total % degree:
            raise unclear(
                file,
                f"{layer} has {total} experts over {degree} expert parallel ranks"
                + ("" if gates else " and no gate behind which they would stand"),
            )
        local = total // degree
        mine = [(n, ref) for number, n, ref in experts if number // local == rank]
        behind.setdefault(gates[-1], []).extend(mine)
    return [item for name, ref in params for item in ((name, ref), *behind.get(name, ()))]
