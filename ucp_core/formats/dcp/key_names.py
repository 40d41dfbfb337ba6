"""Sorts the keys of a torch DCP checkpoint: parameters, optimizer state, groups, others. Pure.

Programs save ``{"model": ..., "optim": ...}`` under names of their own (torchtitan, Accelerate,
Lightning, the tutorial's ``app``). The names of parameters in the optimizer's keys show which other
keys belong to the model.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

_OPTIMIZER = re.compile(
    r"(?P<root>(?:[\w-]+\.)*?(?:optim|opt|optimizers?|optimizer_states?|optimizer_state_dict)"
    r"(?:[_.]\d+)?)\.(?P<part>state|param_groups)\.(?P<rest>.+)"
)
_GROUP = re.compile(r"(\d+)\.([^.]+)")
#: If the optimizer fits two of them, because an average of the weights was saved too, the first
#: wins.
_PREFIXES = ("model.", "", "module.", "state_dict.", "app.model.", "model.module.")


@dataclass(slots=True)
class KeyNames:
    """The keys by their meaning."""

    weights: dict[str, str] = field(default_factory=dict)  #: Key to fqn: tensors of the model.
    #: Key to fqn and slot: tensors and values of the optimizer.
    states: dict[str, tuple[str, str]] = field(default_factory=dict)
    #: Key to root, group (its index, or the fqn of its only parameter) and name of a
    #: hyper-parameter.
    groups: dict[str, tuple[str, int | str, str]] = field(default_factory=dict)
    others: list[str] = field(default_factory=list)
    #: The fqn by number, if the optimizer has only numbers.
    numbers: dict[int, str] = field(default_factory=dict)


def classify(
    shapes: Mapping[str, Sequence[int]],
    values: Collection[str],
    paths: Mapping[str, tuple[Any, ...]],
) -> KeyNames:
    """Sort the keys of a checkpoint."""
    names = KeyNames()
    optimizer: dict[str, re.Match[str]] = {}
    plain: list[str] = []
    for key in (*shapes, *values):
        match = _OPTIMIZER.fullmatch(key)
        if match:
            optimizer[key] = match
        else:
            plain.append(key)
    tensors = [key for key in plain if key in shapes]
    suffixes = _suffixes(tensors)
    for key, match in optimizer.items():
        root, rest = match["root"], match["rest"]
        if match["part"] == "state":
            below = _below(paths.get(key), "state")
            named = (str(below[0]), below[1]) if below else _split(rest, suffixes)
            names.states[key] = named
        else:
            group, name = _group_name(rest, f"{root}.param_groups", paths.get(key), values)
            if isinstance(group, str):
                group, name = _split(rest, suffixes)
            names.groups[key] = (root, group, name)
    prefix = _prefix(tensors, {fqn for fqn, _ in names.states.values()}, suffixes, paths)
    for key in plain:
        # Without a prefix the model's keys are at the top level, and other states in dicts.
        is_model = prefix or len(paths.get(key, (key,))) == 1
        if key in shapes and key.startswith(prefix) and is_model:
            names.weights[key] = key[len(prefix) :]
        else:
            names.others.append(key)
    return names


def _suffixes(keys: Iterable[str]) -> dict[str, list[str]]:
    """Return the keys by suffix: a suffix begins at the start of the key or after a dot."""
    found: dict[str, list[str]] = defaultdict(list)
    for key in keys:
        rest = key
        while True:
            found[rest].append(key)
            _, dot, rest = rest.partition(".")
            if not dot:
                break
    return found


def _split(rest: str, suffixes: Collection[str]) -> tuple[str, str]:
    """Split ``fqn.slot`` after the fqn of a known tensor, otherwise before the last dot."""
    head, _, tail = rest.rpartition(".")
    cut = head
    while cut:
        if cut in suffixes:
            return cut, rest[len(cut) + 1 :]
        cut = cut.rpartition(".")[0]
    return head, tail


def _below(path: tuple[Any, ...] | None, part: str) -> tuple[Any, str] | None:
    """Return what follows ``part`` in a path: one key, and the rest as a name; None: too little."""
    at = path.index(part) + 1 if path is not None and part in path else 0
    return (
        (path[at], ".".join(map(str, path[at + 1 :]))) if path and 0 < at < len(path) - 1 else None
    )


def _group_name(
    rest: str, root: str, path: tuple[Any, ...] | None, values: Collection[str]
) -> tuple[int | str, str]:
    """Return the group's index and the name; two strings if the group belongs to one fqn."""
    below = _below(path, "param_groups")
    if below is not None and type(below[0]) is int:
        return below
    match = _GROUP.fullmatch(rest)
    if match and f"{root}.{match[1]}.params" in values:
        return int(match[1]), match[2]
    return rest, ""


def _prefix(
    tensors: Sequence[str],
    fqns: Collection[str],
    suffixes: Mapping[str, Sequence[str]],
    paths: Mapping[str, tuple[Any, ...]],
) -> str:
    """Return the prefix of fqns in the keys of the model."""
    votes: Counter[str] = Counter()
    for fqn in fqns:
        votes.update(key[: len(key) - len(fqn)] for key in suffixes.get(fqn, ()))
    if not votes:
        for key in tensors:
            path = paths.get(key, (key,))
            votes["".join(f"{part}." for part in path[:-1])] += 1
        # Without an optimizer the usual name decides, even if others have more tensors.
        usual = [prefix for prefix in _PREFIXES if prefix]
        named = [prefix for prefix in usual if prefix in votes]
        # A dict with that name may hold several models, each only a part of the whole.
        named += [prefix for prefix in usual if any(vote.startswith(prefix) for vote in votes)]
        if named:
            return named[0]
    if not votes:
        return ""
    most = max(votes.values())
    best = [prefix for prefix, count in votes.items() if count == most]
    return next((prefix for prefix in _PREFIXES if prefix in best), best[0])
