"""Start a run from an existing checkpoint, in any format that ``ucp_core.open`` knows.

Each rank reads its own boxes; nothing is copied on disk. Weights may be narrower floats than the
run's: every value stays the same.
"""

import json
import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Any, Final

import torch
from torch import Tensor, nn

import ucp_core
from ucp_core.errors import UcpError
from ucp_core.geometry import Box, TableTensor, TensorEntry, TensorKey
from ucp_core.language import rename
from ucp_core.native import Checkpoint
from ucp_core.numerics import WIDER, shortened
from workers.errors import TaskError
from workers.models import as_in_module
from workers.parallel import own_names
from workers.state import CHANGED, DTYPES, HoldsState, StateEntry
from workers.train.loading.restore import WEIGHT, without_optimizer_state

#: A kind of source, in addition to those of ``restore``.
INITIAL: Final = "initial checkpoint"
#: Fill tensors from a checkpoint, also with narrower dtypes; return the number of bytes.
Load = Callable[[Checkpoint, Sequence[StateEntry]], int]
#: Dtype and shape of a tensor.
_Described = TensorEntry | TableTensor
#: Number of tensors of a kind that an error names; it counts the others.
_TOLD: Final = 5
#: Numbers of dims of tensors whose first dim counts rows; with three dims it counts experts.
_WITH_ROWS: Final = (1, 2)

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """The source of a start and how messages name it; see ``RunSettings``."""

    init_from: str
    init_state: str = "weights"
    init_rename: Mapping[str, str] = field(default_factory=dict)
    init_missing: Sequence[str] = ()
    init_rows: Sequence[str] = ()
    said: str = "run.init_from: "  #: Begins each message.
    key: str = "run.init_"  #: Begins the name of each option.
    #: Advice that avoids loading optimizer state.
    weights_alone: str = "set run.init_state: weights"
    only_finite: bool = True  #: Whether to refuse values that are not finite.
    opened: Checkpoint | None = None  #: The checkpoint, if the caller has opened it.


@dataclass(frozen=True, slots=True, kw_only=True)
class Needed:
    """A parameter or persistent buffer of the model."""

    dtype: torch.dtype  #: Its dtype in the run.
    shape: tuple[int, ...]
    #: Whether it keeps its built value if the checkpoint lacks it; so for a buffer.
    is_optional: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Initial:
    """The checkpoint that a run started from."""

    size_bytes: int  #: Bytes that this rank loaded.
    #: Parameters that the checkpoint lacks, as ``run.init_missing`` allows.
    missing: frozenset[str]
    #: The checkpoint's number of rows of parameters with fewer rows there, as ``run.init_rows``
    #: allows.
    rows: Mapping[str, int] = field(default_factory=dict)
    without_state: frozenset[str] = frozenset()  #: Parameters without optimizer state in it.
    #: The optimizer's scalars by name; see ``TrainingState.scalars``.
    scalars: Mapping[str, Any] = field(default_factory=dict)
    #: The optimizer's values that changed; see ``Optimizers.changed``.
    changed: Sequence[Mapping[str, Any]] = ()
    param_groups: Sequence[
        Mapping[str, Any]
    ] = ()  #: The optimizer's groups, with the model's names.


def load_initial(
    run: Start,
    needed: Mapping[str, Needed],
    entries: Callable[[], Sequence[StateEntry]],
    *,
    model: nn.Module,
    load: Load,
    everywhere: Callable[[bool], bool],
    tell: bool,
) -> Initial:
    """Fill the state in place from ``run.init_from``. Every rank calls it.

    Args:
        entries: Returns the tensors to fill: weights, and the optimizer's slots if
            ``run.init_state`` is "all". Called once the checkpoint is known to fit.
        everywhere: Returns whether all ranks agree; all of them call it once.
        tell: Whether to log tensors that the checkpoint has and the model lacks.
    """
    aliases = aliases_of(model)
    checkpoint = _opened(run, needed, model, aliases)
    held = checkpoint.state_map.tensors
    missing = frozenset(name for name in needed if TensorKey(name, WEIGHT) not in held)
    rows = _other_rows(run, held, needed, tell=tell)
    _refuse_misfits(run, checkpoint, needed, missing, rows)
    bare = without_optimizer_state(held)
    if run.init_state == "weights":
        bare = frozenset(needed)
    elif bare.issuperset(needed.keys() - missing) or not any(key.slot != WEIGHT for key in held):
        raise TaskError(
            f"{run.said}{run.init_from} has no optimizer state; {run.weights_alone}",
            path=run.init_from,
        )
    doubles = {
        alias: owner
        for alias, owner in aliases.items()
        if TensorKey(alias, WEIGHT) in held and TensorKey(owner, WEIGHT) in held
    }
    unused = {key.fqn for key in held if key.slot == WEIGHT} - needed.keys() - doubles.keys()
    if unused and tell:
        log.warning(
            "%s has %s, which the model lacks", run.init_from, shortened(sorted(unused), _TOLD)
        )
    need = [entry for entry in entries() if entry.fqn not in missing]
    need = [entry for entry in need if entry.slot == WEIGHT or entry.fqn not in bare]
    need = [part for entry in need if (part := _common_rows(entry, rows)) is not None]
    try:
        size_bytes = load(checkpoint, need)
        finite = need if run.only_finite else ()
        _refuse_not_finite(run, [one for one in finite if not needed[one.fqn].is_optional])
        if not everywhere(_are_equal(checkpoint, need, doubles, load)):
            raise _untied(run, doubles)
        scalars = _scalars(checkpoint, needed.keys() - bare) if run.init_state == "all" else {}
    except UcpError as error:
        raise TaskError(f"{run.said}{error}", path=run.init_from) from error
    return Initial(
        size_bytes=size_bytes,
        missing=missing,
        rows={name: count for name, count in rows.items() if count < needed[name].shape[0]},
        without_state=bare | missing,
        scalars=scalars,
        changed=checkpoint.extra.get(CHANGED, ()) if run.init_state == "all" else (),
        param_groups=checkpoint.param_groups,
    )


def _opened(
    run: Start, needed: Collection[str], model: nn.Module, aliases: Mapping[str, str]
) -> Checkpoint:
    """Return the checkpoint with the model's names."""
    try:
        checkpoint = run.opened or ucp_core.open(run.init_from)
        checkpoint = _renamed(checkpoint, run.init_rename)
        if run.init_state == "weights":
            manifest = as_in_module(checkpoint.manifest, model, needed)
            checkpoint = replace(checkpoint, manifest=manifest)
        return _tied(checkpoint, needed, aliases)
    except UcpError as error:
        raise TaskError(f"{run.said}{error}", path=run.init_from) from error


def _other_rows(
    run: Start,
    held: Mapping[TensorKey, _Described],
    needed: Mapping[str, Needed],
    *,
    tell: bool,
) -> dict[str, int]:
    """Return the checkpoint's number of rows for the parameters of ``run.init_rows``."""
    rows: dict[str, int] = {}
    for name, one in needed.items():
        entry = held.get(TensorKey(name, WEIGHT))
        if entry is None or not _differs_in_rows(entry, one):
            continue
        if any(fnmatchcase(name, pattern) for pattern in run.init_rows):
            rows[name], ours = entry.shape[0], one.shape[0]
            others = "begin with new values" if ours > rows[name] else "are dropped"
            told = "%s has %d rows of %s and the model %d: the others %s"
            log.warning(told, run.init_from, rows[name], name, ours, others) if tell else None
    return rows


def _refuse_not_finite(run: Start, loaded: Sequence[StateEntry]) -> None:
    """Refuse weights and moments that no step can repair; a buffer may hold an infinite mask."""
    for entry in loaded:
        values = entry.tensor
        if values.is_floating_point() and values.itemsize > 1 and values.numel():
            # Unlike ``isfinite``, this makes no tensor of the same size.
            if torch.stack(torch.aminmax(values)).isfinite().all():
                continue
            raise TaskError(
                f"{run.said}{run.init_from}: {entry.fqn} ({entry.slot}) has values that are "
                "not finite: use another checkpoint",
                path=run.init_from,
                fqn=entry.fqn,
            )


def _common_rows(entry: StateEntry, rows: Mapping[str, int]) -> StateEntry | None:
    """Return the part of the checkpoint's rows that this rank needs, in its shape."""
    if entry.fqn not in rows:
        return entry
    shape = (rows[entry.fqn], *entry.shape[1:])
    common = entry.box.intersect(Box.full(shape))
    return None if common is None else replace(entry.rows(common), shape=shape)


def _are_equal(
    checkpoint: Checkpoint,
    need: Sequence[StateEntry],
    doubles: Mapping[str, str],
    load: Load,
) -> bool:
    """Return whether the tensors ``doubles`` equal the ones that this rank has loaded.

    ``doubles`` maps each other name of a parameter in the checkpoint to the name that was loaded.
    """
    pairs = [
        (entry, replace(entry, fqn=alias, tensor=torch.empty_like(entry.tensor)))
        for alias, owner in doubles.items()
        for entry in need
        if (entry.fqn, entry.slot) == (owner, WEIGHT)
    ]
    if any(
        checkpoint.state_map.tensors[TensorKey(other.fqn, WEIGHT)].shape != entry.shape
        for entry, other in pairs
    ):
        return False
    load(checkpoint, [other for _, other in pairs])
    return all(torch.equal(entry.tensor, other.tensor) for entry, other in pairs)


def _untied(run: Start, doubles: Mapping[str, str]) -> TaskError:
    named = ", ".join(f"{alias} and {owner}" for alias, owner in doubles.items())
    alias = next(iter(doubles))
    return TaskError(
        f"{run.said}{run.init_from}: {named} differ in it, and are one parameter of the "
        "model. Build a model that does not tie them (tie_word_embeddings: false in the "
        "configuration of a Hugging Face model), or leave one of them out with "
        f'{run.key}rename ({{"{alias}": "unused.{alias}"}})',
        path=run.init_from,
        doubles=tuple(doubles),
    )


def _renamed(checkpoint: Checkpoint, patterns: Mapping[str, str]) -> Checkpoint:
    """Return the checkpoint with the user's names."""
    manifest = checkpoint.manifest
    theirs = {key.fqn for key in manifest.state_map.entries} | manifest.ties.keys()
    names = {name: new for name in theirs if (new := _new_name(name, patterns)) != name}
    return replace(checkpoint, manifest=rename(manifest, names)) if names else checkpoint


def _tied(
    checkpoint: Checkpoint, needed: Collection[str], aliases: Mapping[str, str]
) -> Checkpoint:
    """Return the checkpoint with the model's names of tied parameters."""
    manifest = checkpoint.manifest
    held = {key.fqn for key in manifest.state_map.entries}
    tied: dict[str, str] = {}
    for alias, owner in (
        *manifest.ties.items(),
        *((name, alias) for alias, name in aliases.items()),
    ):
        is_free = alias not in held and alias not in tied.values()
        if alias in needed and is_free and owner in held and owner not in needed:
            tied[owner] = alias
            if alias in manifest.ties:
                tied[alias] = owner
    return replace(checkpoint, manifest=rename(manifest, tied) if tied else manifest)


def aliases_of(model: nn.Module) -> dict[str, str]:
    """Return the other names of tied parameters, each with the first one."""
    first = {id(value): name for name, value in own_names(model.named_parameters()).items()}
    every = own_names(model.named_parameters(remove_duplicate=False))
    return {name: first[id(one)] for name, one in every.items() if first[id(one)] != name}


def _new_name(name: str, patterns: Mapping[str, str]) -> str:
    for pattern, new in patterns.items():
        before, star, after = pattern.partition("*")
        if not star:
            if name == pattern:
                return new
        elif (
            name.startswith(before)
            and name.endswith(after)
            and len(name) >= len(before) + len(after)
        ):
            return new.replace("*", name[len(before) : len(name) - len(after)], 1)
    return name


def _refuse_misfits(
    run: Start,
    checkpoint: Checkpoint,
    needed: Mapping[str, Needed],
    missing: frozenset[str],
    rows: Collection[str],
) -> None:
    """Raise ``TaskError`` unless every parameter has a value of its shape, or may lack one.

    Parameters in ``rows`` may have more or fewer rows.
    """
    held = checkpoint.state_map.tensors
    unexpected = sorted({key.fqn for key in held if key.slot == WEIGHT} - needed.keys())
    refused = sorted(
        name
        for name in missing
        if not needed[name].is_optional
        and not any(fnmatchcase(name, pattern) for pattern in run.init_missing)
    )
    found: list[str] = []
    if refused:
        found.append(f"it lacks {shortened(refused, _TOLD)}")
        if unexpected:
            found.append(f"and has {shortened(unexpected, _TOLD)}, which the model lacks")
    misfits = {
        name: entry
        for name, one in sorted(needed.items())
        if (entry := held.get(TensorKey(name, WEIGHT))) is not None
        and not _fits(entry, one)
        and name not in rows
    }
    found += _told_misfits(misfits, needed, f"{run.key}rows")
    if found:
        experts = (
            f"; for files with one tensor per expert, {run.weights_alone}"
            if run.init_state == "all" and refused and unexpected
            else ""
        )
        raise TaskError(
            f"{run.said}{run.init_from} does not fit the model: {', '.join(found)}. Map names "
            f'with {run.key}rename ({{"theirs.*": "ours.*"}}), or list in {run.key}missing what '
            f"may begin with new values{experts}",
            path=run.init_from,
            missing=tuple(refused),
            unexpected=tuple(unexpected),
        )


def _told_misfits(
    misfits: Mapping[str, _Described], needed: Mapping[str, Needed], rows: str
) -> Iterator[str]:
    """Yield the tensors that do not fit, for people; ``rows`` is the option for other rows."""
    wrong = [
        f"{name} is {entry.dtype}{list(entry.shape)} in it and {DTYPES[needed[name].dtype]}"
        f"{list(needed[name].shape)} in the model"
        for name, entry in misfits.items()
    ]
    if wrong:
        yield "; ".join(wrong[:_TOLD])
    if len(wrong) > _TOLD:
        yield f"and {len(wrong) - _TOLD} more"
    # A vocabulary of another size. Other changes of a model also show in columns.
    if wrong and all(_differs_in_rows(entry, needed[name]) for name, entry in misfits.items()):
        yield (
            f"which {rows}: {json.dumps([*misfits])} allows: it loads the rows that both "
            "have, and others begin with new values or are left out"
        )


def _fits(entry: _Described, needed: Needed) -> bool:
    fitting = (entry.dtype, *WIDER.get(entry.dtype, ()))
    return entry.shape == needed.shape and DTYPES[needed.dtype] in fitting


def _differs_in_rows(entry: _Described, needed: Needed) -> bool:
    """Return whether a parameter would fit with another number of rows, as of a vocabulary."""
    shape = needed.shape[:1] + entry.shape[1:]
    is_matrix = len(shape) in _WITH_ROWS and not needed.is_optional
    return (
        is_matrix
        and entry.shape != shape
        and _fits(TableTensor(entry.key, entry.dtype, shape), needed)
    )


def refuse_uncounted(
    run: Start,
    initial: Initial,
    parameters: Mapping[str, Any],
    optimizer: HoldsState,
    names: AbstractSet[str],
) -> None:
    """Refuse moments without their step: the optimizer would treat them as a first step's.

    ``names`` are those of the optimizer's numbers.
    """
    for fqn, parameter in parameters.items():
        state = optimizer.state.get(parameter, {})
        for name in names & state.keys() if fqn not in initial.without_state else ():
            held = initial.scalars.get(name)
            # Moments of a parameter without a dim are numbers, too.
            if getattr(state[name], "ndim", 0):
                continue
            if held is None or (isinstance(held, Mapping) and fqn not in held):
                raise TaskError(
                    f"{run.said}{run.init_from} has optimizer state of {fqn} without its {name}, "
                    f"which would begin at its first value: use another checkpoint, or "
                    f"{run.weights_alone}",
                    path=run.init_from,
                    fqn=fqn,
                )


def _scalars(checkpoint: Checkpoint, names: Collection[str]) -> dict[str, Any]:
    """Return the optimizer's scalars: slots without a shape, or the small values of our own."""
    entries = [
        checkpoint.state_map.entries[key]
        for key, tensor in checkpoint.state_map.tensors.items()
        if key.slot != WEIGHT and not tensor.shape and key.fqn in names
    ]
    found: dict[str, Any] = {}
    for entry, value in zip(entries, read_whole(checkpoint, entries), strict=True):
        found.setdefault(entry.key.slot, {})[entry.key.fqn] = value.item()
    own = checkpoint.extra.get("optimizer")
    return found or (own if isinstance(own, dict) else {})


def read_whole(
    checkpoint: Checkpoint, entries: Sequence[TensorEntry], dtype: torch.dtype = torch.float64
) -> list[Tensor]:
    """Return whole tensors, in a dtype that holds their values."""
    found = [torch.zeros(entry.shape, dtype=dtype) for entry in entries]
    need = [
        StateEntry(
            fqn=entry.key.fqn,
            slot=entry.key.slot,
            shape=entry.shape,
            box=Box.full(entry.shape),
            tensor=tensor,
        ).local_tensor(tensor)
        for entry, tensor in zip(entries, found, strict=True)
    ]
    ucp_core.load(checkpoint, need, widen=True)
    return found
