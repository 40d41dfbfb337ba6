"""The text form of rules and renamings: YAML, with line and column of every problem.

``RULES.md`` describes the language. No other module of ucp_core imports YAML.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from difflib import get_close_matches
from typing import Any, NamedTuple, TypeVar

import yaml

from ucp_core.errors import PatternError, RulesError
from ucp_core.language.affine import parse_affine
from ucp_core.language.patterns import (
    Average,
    Cut,
    Grid,
    Pattern,
    Replicated,
    Unique,
    pattern_problems,
)
from ucp_core.language.rules import Rename, Renames, Rule, Rules, Stages

VERSION = 1

#: People write less, and YAML takes 20 us a byte.
_CHARACTERS_MAX = 1 << 20
_PROBLEMS_SHOWN_MAX = 20

_T = TypeVar("_T")


class Problem(NamedTuple):
    """One thing that is wrong with a text; line and column count from 1."""

    line: int
    column: int
    text: str


class _Reader:
    """Reads typed values from YAML nodes, and collects problems instead of raising."""

    def __init__(self, text: str, where: str) -> None:
        self.where = where
        self.problems: list[Problem] = []
        self._loader: yaml.SafeLoader | None = None
        self.root = self._compose(text)

    def _compose(self, text: str) -> yaml.Node | None:
        if len(text) > _CHARACTERS_MAX:
            self._add(0, 0, f"has {len(text)} characters, rules have at most {_CHARACTERS_MAX}")
            return None
        try:
            self._loader = yaml.SafeLoader(text)
            node: yaml.Node | None = self._loader.get_single_node()
        except yaml.MarkedYAMLError as error:
            mark = error.problem_mark or error.context_mark
            line, column = (mark.line, mark.column) if mark else (0, 0)
            self._add(line, column, f"is not YAML: {error.problem or error.context}")
            return None
        except (yaml.YAMLError, RecursionError) as error:
            self._add(0, 0, f"is not YAML: {str(error).splitlines()[0]}")
            return None
        return node

    def _add(self, line: int, column: int, text: str) -> None:
        self.problems.append(Problem(line + 1, column + 1, text))

    def wrong(self, node: yaml.Node, text: str) -> None:
        """Add a problem at ``node``."""
        self._add(node.start_mark.line, node.start_mark.column, text)

    def root_or(self, problem: str) -> yaml.Node:
        """Return the root; raise if the text is not YAML, or has the ``problem`` to be empty."""
        if self.root is None:
            if not self.problems:
                self._add(0, 0, problem)
            self.finish()
            raise AssertionError("finish raises what was noted")
        return self.root

    def place(self, node: yaml.Node) -> str:
        """Return ``file:line`` of a node."""
        return f"{self.where}:{node.start_mark.line + 1}"

    def finish(self) -> None:
        """Raise all problems, if there are any."""
        if not self.problems:
            return
        self.problems.sort()
        shown = [
            f"{self.where}:{p.line}:{p.column}: {p.text}"
            for p in self.problems[:_PROBLEMS_SHOWN_MAX]
        ]
        if len(self.problems) > _PROBLEMS_SHOWN_MAX:
            shown.append(f"and {len(self.problems) - _PROBLEMS_SHOWN_MAX} more problems")
        raise RulesError(
            "\n".join(shown),
            line=self.problems[0].line,
            column=self.problems[0].column,
            problems=tuple(self.problems),
        )

    def value(self, node: yaml.Node) -> Any:
        """Return the plain value of a node, mappings and lists included."""
        assert self._loader is not None
        try:
            return self._loader.construct_object(node, deep=True)
        except (yaml.YAMLError, ValueError, RecursionError) as error:
            self.wrong(node, f"cannot be read: {str(error).splitlines()[0]}")
            return None

    def mapping(
        self, node: yaml.Node, what: str, known: Collection[str], needed: Collection[str] = ()
    ) -> dict[str, yaml.Node]:
        """Return the values of a mapping by key; unknown and repeated keys are problems."""
        found = self._pairs(node, what, known)
        for key in needed:
            if isinstance(node, yaml.MappingNode) and key not in found:
                self.wrong(node, f"{what} needs the key {key!r}")
        return found

    def _pairs(
        self, node: yaml.Node, what: str, known: Collection[str] | None
    ) -> dict[str, yaml.Node]:
        found: dict[str, yaml.Node] = {}
        if not isinstance(node, yaml.MappingNode):
            expected = "" if known is None else f" with the keys {_choice(sorted(known))}"
            self.wrong(node, f"{what} must be a mapping{expected}, is {_kind(node)}")
            return found
        for key_node, value in node.value:
            key = key_node.value if isinstance(key_node, yaml.ScalarNode) else None
            if key is None:
                self.wrong(key_node, f"a key of {what} must be a word")
            elif known is not None and key not in known:
                self.wrong(key_node, f"unknown key {key!r} in {what}: {_hint(key, known)}")
            elif key in found:
                self.wrong(key_node, f"the key {key!r} of {what} is written twice")
            else:
                found[key] = value
        return found

    def text_pairs(self, node: yaml.Node, what: str) -> dict[str, str]:
        """Return a mapping of free names to texts."""
        pairs = self._pairs(node, what, None)
        return {key: self.text(value, f"{what}.{key}") or "" for key, value in pairs.items()}

    def items(self, node: yaml.Node, what: str) -> list[yaml.Node]:
        """Return the items of a list that is not empty."""
        if not isinstance(node, yaml.SequenceNode):
            self.wrong(node, f"{what} must be a list, is {_kind(node)}")
            return []
        if not node.value:
            self.wrong(node, f"{what} is an empty list")
        return list(node.value)

    def text(self, node: yaml.Node, what: str) -> str | None:
        """Return a text, or None if it is something else."""
        if isinstance(node, yaml.ScalarNode) and node.tag == "tag:yaml.org,2002:str":
            return str(node.value)
        self.wrong(node, f"{what} must be text, is {_kind(node)}; put it in quotes")
        return None

    def number(self, node: yaml.Node, what: str, least: int | None) -> int | None:
        """Return a whole number of at least ``least``, or None if it is something else."""
        value = self.value(node) if isinstance(node, yaml.ScalarNode) else None
        if not isinstance(value, int) or isinstance(value, bool):
            self.wrong(node, f"{what} must be a whole number, is {_kind(node)}")
            return None
        if least is not None and value < least:
            self.wrong(node, f"{what} must be at least {least}, is {value}")
            return None
        return value

    def numbers(self, node: yaml.Node, what: str, least: int) -> tuple[int, ...] | None:
        """Return a list of whole numbers, or None if one of them is none."""
        return self.each(node, what, lambda item: self.number(item, f"an item of {what}", least))

    def each(
        self, node: yaml.Node, what: str, read: Callable[[yaml.Node], _T | None]
    ) -> tuple[_T, ...] | None:
        """Return what ``read`` returns of every item, or None if one of them is wrong."""
        nodes = self.items(node, what)
        values = [value for item in nodes if (value := read(item)) is not None]
        return tuple(values) if values and len(values) == len(nodes) else None

    def regex(self, node: yaml.Node, what: str, groups: int | None = None) -> str | None:
        """Return a regular expression that compiles, or None."""
        text = self.text(node, what)
        if text is None:
            return None
        try:
            compiled = re.compile(text)
        except (re.error, RecursionError, OverflowError) as error:
            at = getattr(error, "pos", None)
            place = "" if at is None else f" at its character {at + 1}"
            reason = getattr(error, "msg", str(error))
            self.wrong(node, f"{what} is not a regular expression: {reason}{place}")
            return None
        if groups is not None and compiled.groups != groups:
            self.wrong(node, f"{what} must have {groups} group, has {compiled.groups}")
            return None
        return text

    def regexes(self, node: yaml.Node, what: str) -> tuple[str, ...]:
        """Return one regular expression or a list of them."""
        if not isinstance(node, yaml.SequenceNode):
            one = self.regex(node, what)
            return () if one is None else (one,)
        return self.each(node, what, lambda item: self.regex(item, f"an item of {what}")) or ()


def _kind(node: yaml.Node) -> str:
    if isinstance(node, yaml.ScalarNode):
        return f"{node.value[:40]!r}" if node.value else "empty"
    return "a mapping" if isinstance(node, yaml.MappingNode) else "a list"


def _choice(words: Sequence[str]) -> str:
    return ", ".join(words)


def _hint(word: str, known: Collection[str]) -> str:
    near = get_close_matches(word, known, n=1, cutoff=0.6)
    return f"did you mean {near[0]!r}?" if near else f"known are {_choice(sorted(known))}"


def read_rules(text: str, where: str, families: Collection[str]) -> tuple[Rules, list[str]]:
    """Return the rules of a text, and the names of the families that it extends.

    Raises:
        RulesError: All problems, each with line and column.
    """
    reader = _Reader(text, where)
    root = reader.root_or("is empty; write rules: and a list of them")
    known = ("version", "first_wins", "rules", "stages", "ties", "extends")
    keys = reader.mapping(root, "a text of rules", known)
    _check_version(reader, keys)
    first_wins = _flag(reader, keys, "first_wins")
    ties = reader.text_pairs(keys["ties"], "ties") if "ties" in keys else {}
    extends = _extends(reader, keys, families)
    rules: list[Rule] = []
    for node in reader.items(keys["rules"], "rules") if "rules" in keys else ():
        _read_rule(reader, node, rules)
    stages = _stages(reader, keys["stages"]) if "stages" in keys else None
    reader.finish()
    return Rules(tuple(rules), first_wins, stages, ties), extends


def _check_version(reader: _Reader, keys: Mapping[str, yaml.Node]) -> None:
    version = reader.number(keys["version"], "version", 1) if "version" in keys else None
    if version is not None and version > VERSION:
        reader.wrong(
            keys["version"], f"version {version}: this program reads {VERSION}; update everstep"
        )


def _extends(
    reader: _Reader, keys: Mapping[str, yaml.Node], families: Collection[str]
) -> list[str]:
    found: list[str] = []
    for node in reader.items(keys["extends"], "extends") if "extends" in keys else ():
        name = reader.text(node, "an item of extends")
        if name is not None and name not in families:
            reader.wrong(node, f"unknown family {name!r}: {_hint(name, families)}")
        found.append(name or "")
    return found


def _flag(reader: _Reader, keys: Mapping[str, yaml.Node], key: str) -> bool:
    """Return a boolean; False if the key is missing."""
    if key not in keys:
        return False
    value = reader.value(keys[key])
    if not isinstance(value, bool):
        reader.wrong(keys[key], f"{key} must be true or false")
    return value is True


def _stages(reader: _Reader, node: yaml.Node) -> Stages | None:
    keys = reader.mapping(node, "stages", ("layer", "first", "last"), ("layer",))
    layer = reader.regex(keys["layer"], "layer", groups=1) if "layer" in keys else None
    first, last = (
        reader.regexes(keys[name], name) if name in keys else () for name in ("first", "last")
    )
    return None if layer is None else Stages(layer, first, last)


def _read_rule(reader: _Reader, node: yaml.Node, found: list[Rule]) -> None:
    known = ("match", "slot", "pattern", "optional")
    keys = reader.mapping(node, "a rule", known, ("match", "pattern"))
    slot = reader.text(keys["slot"], "slot") if "slot" in keys else None
    names = reader.regexes(keys["match"], "match") if "match" in keys else ()
    pattern = _pattern(reader, keys["pattern"]) if "pattern" in keys else None
    optional = _flag(reader, keys, "optional")
    for name in names:
        same = [rule for rule in found if (rule.match, rule.slot) == (name, slot)]
        if same:
            line = same[0].where.rpartition(":")[2]
            reader.wrong(keys["match"], f"{name!r} is matched by the rule at line {line} already")
        elif pattern is not None:
            found.append(Rule(name, pattern, slot, reader.place(node), optional))


def _pattern(reader: _Reader, node: yaml.Node) -> Pattern | None:
    """Return the pattern that a word or a mapping of one key describes."""
    words = tuple(_PATTERNS)
    if isinstance(node, yaml.ScalarNode):
        name, inner = str(node.value), None
        place: yaml.Node = node
    elif isinstance(node, yaml.MappingNode) and len(node.value) == 1:
        place, inner = node.value[0]
        name = str(place.value)
    else:
        reader.wrong(
            node, f"a pattern is one of {_choice(words)}, or one of them with its settings"
        )
        return None
    if name not in _PATTERNS:
        reader.wrong(place, f"unknown pattern {name!r}: {_hint(name, words)}")
        return None
    pattern = _PATTERNS[name](reader, place, inner)
    for problem in () if pattern is None else pattern_problems(pattern):
        reader.wrong(place, f"{name}: {problem}")
    return pattern


def _plain(kind: Callable[[], Pattern]) -> Callable[..., Pattern | None]:
    def read(reader: _Reader, place: yaml.Node, inner: yaml.Node | None) -> Pattern | None:
        if inner is not None:
            reader.wrong(inner, f"{getattr(place, 'value', 'this')} has no settings")
            return None
        return kind()

    return read


def _replicated(reader: _Reader, _place: yaml.Node, inner: yaml.Node | None) -> Pattern | None:
    if inner is None:
        return Replicated()
    keys = reader.mapping(inner, "replicated", ("check",))
    check = reader.text(keys["check"], "check") if "check" in keys else "equal"
    if check == "equal":
        return Replicated("equal")
    if check == "first":
        return Replicated("first")
    if check is not None:
        reader.wrong(keys["check"], f"check must be equal or first, is {check!r}")
    return None


def _cut(reader: _Reader, place: yaml.Node, inner: yaml.Node | None) -> Cut | None:
    if inner is None:
        reader.wrong(place, "cut needs a dim, as in cut: 0 or cut: {dim: 0, parts: [64, 16, 16]}")
        return None
    if isinstance(inner, yaml.ScalarNode):
        dim = reader.number(inner, "the dim of a cut", None)
        return None if dim is None else Cut(dim)
    known = ("dim", "widths", "parts", "ratio", "part_widths", "unpadded")
    keys = reader.mapping(inner, "cut", known, ("dim",))
    before = len(reader.problems)
    found: dict[str, Any] = {}
    if "dim" in keys:
        found["dim"] = reader.number(keys["dim"], "dim", None)
    for name, least in (("widths", 0), ("ratio", 1)):
        if name in keys:
            found[name] = reader.numbers(keys[name], name, least)
    if "parts" in keys:
        several = isinstance(keys["parts"], yaml.SequenceNode)
        found["parts"] = (reader.numbers if several else reader.number)(keys["parts"], "parts", 1)
    if "part_widths" in keys:
        found["part_widths"] = reader.each(
            keys["part_widths"],
            "part_widths",
            lambda item: reader.numbers(item, "an item of part_widths", 0),
        )
    if "unpadded" in keys:
        found["unpadded"] = reader.number(keys["unpadded"], "unpadded", 0)
    return None if len(reader.problems) > before or "dim" not in keys else Cut(**found)


def _grid(reader: _Reader, place: yaml.Node, inner: yaml.Node | None) -> Grid | None:
    if inner is None:
        reader.wrong(place, "grid needs cuts and degrees: {cuts: [0, 1], degrees: [2, 4]}")
        return None
    keys = reader.mapping(inner, "grid", ("cuts", "degrees"), ("cuts", "degrees"))
    if len(keys) < 2:  # noqa: PLR2004 - both are needed, and what is missing was noted
        return None
    cuts = reader.each(keys["cuts"], "cuts", lambda item: _cut(reader, place, item))
    degrees = reader.numbers(keys["degrees"], "degrees", 0)
    return None if cuts is None or degrees is None else Grid(cuts, degrees)


def _affine(reader: _Reader, place: yaml.Node, inner: yaml.Node | None) -> Pattern | None:
    if inner is None:
        reader.wrong(place, "affine needs logical_shape and ranks, as DeepSpeed writes them")
        return None
    try:
        return parse_affine(reader.value(inner))
    except PatternError as error:
        reader.wrong(inner, str(error))
        return None


_PATTERNS: dict[str, Callable[[_Reader, yaml.Node, yaml.Node | None], Pattern | None]] = {
    "unique": _plain(Unique),
    "replicated": _replicated,
    "average": _plain(Average),
    "cut": _cut,
    "grid": _grid,
    "affine": _affine,
}


def read_renames(text: str, where: str) -> Renames:
    """Return the renamings of a text; a ``RulesError`` lists all problems with their places."""
    reader = _Reader(text, where)
    root = reader.root_or("is empty; write a list of {match: ..., to: ...}")
    found: list[Rename] = []
    for node in reader.items(root, "a text of renamings"):
        known = ("match", "to", "optional")
        keys = reader.mapping(node, "a renaming", known, ("match", "to"))
        match = reader.regex(keys["match"], "match") if "match" in keys else None
        to = reader.text(keys["to"], "to") if "to" in keys else None
        if match is None or to is None:
            continue
        try:
            re.compile(match).sub(to, "")
        except (re.error, IndexError) as error:
            reader.wrong(keys["to"], f"{to!r} does not fit {match!r}: {error}")
        found.append(Rename(match, to, _flag(reader, keys, "optional"), reader.place(node)))
    reader.finish()
    return Renames(tuple(found))
