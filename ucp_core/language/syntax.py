"""The text form of rules and renamings: YAML, with the line and column of every problem.

``RULES.md`` describes the language.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from typing import Any, TypeVar

import yaml

from ucp_core.errors import PatternError, Place, Problem, RulesError
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
from ucp_core.yaml_places import YamlText, did_you_mean

VERSION = 1

#: People write less than this, and YAML takes 20 us per byte.
_CHARACTERS_MAX = 1 << 20
_PROBLEMS_SHOWN_MAX = 20

_T = TypeVar("_T")


class _YamlReader(YamlText):
    """Reads typed values from YAML nodes, and collects problems instead of raising.

    A missing key has no node: None reads as nothing, without a problem.
    """

    def __init__(self, text: str, where: str, *, if_empty: str) -> None:
        size, what = len(text), if_empty
        if size > _CHARACTERS_MAX:
            text, what = "", f"has {size} characters, rules may have at most {_CHARACTERS_MAX}"
        super().__init__(text, where)
        if self.root is None and not self.problems:
            self.problems.append(Problem("", what, Place(where, 1, 1)))
        self.finish()

    def finish(self) -> None:
        """Raise all problems, if there are any."""
        if not self.problems:
            return
        self.problems.sort(key=lambda problem: problem.place)
        shown = [
            f"{p.place}:{p.place.column}: {p._replace(place=Place())}"
            for p in self.problems[:_PROBLEMS_SHOWN_MAX]
        ]
        if len(self.problems) > _PROBLEMS_SHOWN_MAX:
            shown.append(f"and {len(self.problems) - _PROBLEMS_SHOWN_MAX} more problems")
        first = self.problems[0].place
        raise RulesError(
            "\n".join(shown),
            line=first.line,
            column=first.column,
            problems=tuple(self.problems),
        )

    def mapping(
        self,
        node: yaml.Node | None,
        what: str,
        known: Collection[str] = (),
        needed: Collection[str] = (),
    ) -> dict[str, yaml.Node]:
        """Return the values of a mapping by key; only ``known`` keys, unless that is empty."""
        if node is None:
            return {}
        if not isinstance(node, yaml.MappingNode):
            expected = f" with the keys {', '.join(sorted(known))}" if known else ""
            self.wrong(node, f"{what} must be a mapping{expected}, is {_kind(node)}")
            return {}
        found: dict[str, yaml.Node] = {}
        for key, (place, value) in self.pairs(node).items():
            if known and key not in known:
                hint = did_you_mean(key, known)
                self.problems.append(Problem("", f"unknown key {key!r} in {what}: {hint}", place))
            else:
                found[key] = value
        for key in needed:
            if key not in found:
                self.wrong(node, f"{what} needs the key {key!r}")
        return found

    def items(self, node: yaml.Node | None, what: str) -> list[yaml.Node]:
        """Return the items of a non-empty list."""
        if node is None:
            return []
        if not isinstance(node, yaml.SequenceNode):
            self.wrong(node, f"{what} must be a list, is {_kind(node)}")
            return []
        if not node.value:
            self.wrong(node, f"{what} is an empty list")
        return list(node.value)

    def flag(self, node: yaml.Node | None, what: str) -> bool:
        """Return a boolean; False if the key is missing."""
        value = node is not None and self.value(node)
        if node is not None and not isinstance(value, bool):
            self.wrong(node, f"{what} must be true or false")
        return value is True

    def text(self, node: yaml.Node | None, what: str) -> str | None:
        """Return a text, or None if it is something else."""
        if node is None:
            return None
        if isinstance(node, yaml.ScalarNode) and node.tag == "tag:yaml.org,2002:str":
            return str(node.value)
        self.wrong(node, f"{what} must be text, is {_kind(node)}; put it in quotes")
        return None

    def number(self, node: yaml.Node | None, what: str, least: int | None) -> int | None:
        """Return an integer of at least ``least``, or None if it is something else."""
        if node is None:
            return None
        value = self.value(node) if isinstance(node, yaml.ScalarNode) else None
        if not isinstance(value, int) or isinstance(value, bool):
            self.wrong(node, f"{what} must be a whole number, is {_kind(node)}")
            return None
        if least is not None and value < least:
            self.wrong(node, f"{what} must be at least {least}, is {value}")
            return None
        return value

    def numbers(self, node: yaml.Node, what: str, least: int) -> tuple[int, ...] | None:
        """Return a list of integers, or None if an item is something else."""
        return self.each(node, what, lambda item: self.number(item, f"an item of {what}", least))

    def each(
        self, node: yaml.Node, what: str, read: Callable[[yaml.Node], _T | None]
    ) -> tuple[_T, ...] | None:
        """Return the result of ``read`` for every item, or None if one of them is wrong."""
        nodes = self.items(node, what)
        values = [value for item in nodes if (value := read(item)) is not None]
        return tuple(values) if values and len(values) == len(nodes) else None

    def regex(self, node: yaml.Node | None, what: str, groups: int | None = None) -> str | None:
        """Return the text of a regular expression, or None if it does not compile."""
        text = self.text(node, what)
        if node is None or text is None:
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

    def regexes(self, node: yaml.Node | None, what: str) -> tuple[str, ...]:
        """Return one regular expression or a list of them."""
        if not isinstance(node, yaml.SequenceNode):
            one = self.regex(node, what)
            return () if one is None else (one,)
        return self.each(node, what, lambda item: self.regex(item, f"an item of {what}")) or ()


def _kind(node: yaml.Node) -> str:
    if isinstance(node, yaml.ScalarNode):
        return f"{node.value[:40]!r}" if node.value else "empty"
    return "a mapping" if isinstance(node, yaml.MappingNode) else "a list"


def read_rules(text: str, where: str, families: Collection[str]) -> tuple[Rules, list[str]]:
    """Return the rules of a text and the names of the families that it extends.

    Raises:
        RulesError: All problems, each with line and column.
    """
    reader = _YamlReader(text, where, if_empty="is empty; write rules: and a list of them")
    known = ("version", "first_wins", "rules", "stages", "ties", "extends")
    keys = reader.mapping(reader.root, "a text of rules", known)
    version = reader.number(keys.get("version"), "version", 1) or VERSION
    if version > VERSION:
        message = f"version {version}: this program reads {VERSION}; update everstep"
        reader.wrong(keys["version"], message)
    first_wins = reader.flag(keys.get("first_wins"), "first_wins")
    ties = {
        alias: reader.text(owner, f"ties.{alias}") or ""
        for alias, owner in reader.mapping(keys.get("ties"), "ties").items()
    }
    extends = []
    for node in reader.items(keys.get("extends"), "extends"):
        name = reader.text(node, "an item of extends")
        if name is not None and name not in families:
            reader.wrong(node, f"unknown family {name!r}: {did_you_mean(name, families)}")
        extends.append(name or "")
    rules: list[Rule] = []
    for node in reader.items(keys.get("rules"), "rules"):
        _read_rule(reader, node, rules)
    stages = _stages(reader, keys.get("stages"))
    reader.finish()
    return Rules(tuple(rules), first_wins, stages, ties), extends


def _stages(reader: _YamlReader, node: yaml.Node | None) -> Stages | None:
    keys = reader.mapping(node, "stages", ("layer", "first", "last"), ("layer",))
    layer = reader.regex(keys.get("layer"), "layer", groups=1)
    first, last = (reader.regexes(keys.get(name), name) for name in ("first", "last"))
    return None if layer is None else Stages(layer, first, last)


def _read_rule(reader: _YamlReader, node: yaml.Node, found: list[Rule]) -> None:
    known = ("match", "slot", "pattern", "optional")
    keys = reader.mapping(node, "a rule", known, ("match", "pattern"))
    slot = reader.text(keys.get("slot"), "slot")
    pattern = _pattern(reader, keys["pattern"]) if "pattern" in keys else None
    optional = reader.flag(keys.get("optional"), "optional")
    for name in reader.regexes(keys.get("match"), "match"):
        same = [rule for rule in found if (rule.match, rule.slot) == (name, slot)]
        if same:
            line = same[0].where.rpartition(":")[2]
            reader.wrong(keys["match"], f"{name!r} is matched by the rule at line {line} already")
        elif pattern is not None:
            found.append(Rule(name, pattern, slot, str(reader.place(node)), optional))


def _pattern(reader: _YamlReader, node: yaml.Node) -> Pattern | None:
    """Return the pattern that a word or a one-key mapping describes."""
    words = (*_WORDS, *_NEEDED)
    place, inner = node, None
    if isinstance(node, yaml.MappingNode) and len(node.value) == 1:
        place, inner = node.value[0]
    elif not isinstance(node, yaml.ScalarNode):
        message = f"a pattern is one of {', '.join(words)}, or one of them with its settings"
        reader.wrong(node, message)
        return None
    name = str(place.value)
    pattern: Pattern | None = None
    if name not in words:
        reader.wrong(place, f"unknown pattern {name!r}: {did_you_mean(name, words)}")
    elif inner is None and name in _NEEDED:
        reader.wrong(place, f"{name} needs {_NEEDED[name]}")
    elif inner is None:
        pattern = _WORDS[name]
    elif name not in _SETTINGS:
        reader.wrong(inner, f"{name} has no settings")
    else:
        pattern = _SETTINGS[name](reader, inner)
    for problem in () if pattern is None else pattern_problems(pattern):
        reader.wrong(place, f"{name}: {problem}")
    return pattern


def _replicated(reader: _YamlReader, node: yaml.Node) -> Pattern | None:
    keys = reader.mapping(node, "replicated", ("check",))
    check = reader.text(keys["check"], "check") if "check" in keys else "equal"
    if check == "equal":
        return Replicated("equal")
    if check == "first":
        return Replicated("first")
    if check is not None:
        reader.wrong(keys["check"], f"check must be equal or first, is {check!r}")
    return None


def _cut(reader: _YamlReader, node: yaml.Node) -> Cut | None:
    if isinstance(node, yaml.ScalarNode):
        dim = reader.number(node, "the dim of a cut", None)
        return None if dim is None else Cut(dim)
    keys = reader.mapping(node, "cut", tuple(_CUT), ("dim",))
    before = len(reader.problems)
    found = {name: read(reader, keys[name], name) for name, read in _CUT.items() if name in keys}
    return None if len(reader.problems) > before or "dim" not in keys else Cut(**found)


#: How to read each setting of a cut; also gets the setting's name.
_CUT: dict[str, Callable[[_YamlReader, yaml.Node, str], Any]] = {
    "dim": lambda reader, node, what: reader.number(node, what, None),
    "widths": lambda reader, node, what: reader.numbers(node, what, 0),
    "parts": lambda reader, node, what: (
        reader.numbers if isinstance(node, yaml.SequenceNode) else reader.number
    )(node, what, 1),
    "ratio": lambda reader, node, what: reader.numbers(node, what, 1),
    "part_widths": lambda reader, node, what: reader.each(
        node, what, lambda item: reader.numbers(item, f"an item of {what}", 0)
    ),
    "unpadded": lambda reader, node, what: reader.number(node, what, 0),
}


def _grid(reader: _YamlReader, node: yaml.Node) -> Grid | None:
    keys = reader.mapping(node, "grid", ("cuts", "degrees"), ("cuts", "degrees"))
    if len(keys) < 2:  # noqa: PLR2004 - both are needed, and what is missing was noted
        return None
    cuts = reader.each(keys["cuts"], "cuts", lambda item: _cut(reader, item))
    degrees = reader.numbers(keys["degrees"], "degrees", 0)
    return None if cuts is None or degrees is None else Grid(cuts, degrees)


def _affine(reader: _YamlReader, node: yaml.Node) -> Pattern | None:
    try:
        return parse_affine(reader.value(node))
    except PatternError as error:
        reader.wrong(node, str(error))
        return None


#: Patterns that are a single word.
_WORDS: dict[str, Pattern] = {
    "unique": Unique(),
    "replicated": Replicated(),
    "average": Average(),
}
#: Fields that the other patterns need.
_NEEDED = {
    "cut": "a dim, as in cut: 0 or cut: {dim: 0, parts: [64, 16, 16]}",
    "grid": "cuts and degrees: {cuts: [0, 1], degrees: [2, 4]}",
    "affine": "logical_shape and ranks, as DeepSpeed writes them",
}
_SETTINGS: Mapping[str, Callable[[_YamlReader, yaml.Node], Pattern | None]] = {
    "replicated": _replicated,
    "cut": _cut,
    "grid": _grid,
    "affine": _affine,
}


def read_renames(text: str, where: str) -> Renames:
    """Return the renamings of a text; a ``RulesError`` lists all problems with their places."""
    reader = _YamlReader(text, where, if_empty="is empty; write a list of {match: ..., to: ...}")
    found: list[Rename] = []
    for node in reader.items(reader.root, "a text of renamings"):
        known = ("match", "to", "optional")
        keys = reader.mapping(node, "a renaming", known, ("match", "to"))
        match, to = reader.regex(keys.get("match"), "match"), reader.text(keys.get("to"), "to")
        if match is None or to is None:
            continue
        try:
            re.compile(match).sub(to, "")
        except (re.error, IndexError) as error:
            reader.wrong(keys["to"], f"{to!r} does not fit {match!r}: {error}")
        optional = reader.flag(keys.get("optional"), "optional")
        found.append(Rename(match, to, optional, str(reader.place(node))))
    reader.finish()
    return Renames(tuple(found))
