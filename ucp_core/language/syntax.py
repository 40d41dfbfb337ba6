"""The text form of rules and renamings: YAML, with the line and column of every problem.

``RULES.md`` describes the language. The classes here are its words; pydantic reads them.
"""

import json
import re
from collections.abc import Collection
from typing import Annotated, Any, TypeVar, cast

from pydantic import AfterValidator, BaseModel, Field, TypeAdapter, ValidationError

from ucp_core.errors import PatternError, Place, RulesError
from ucp_core.language.affine import Affine, parse_affine
from ucp_core.language.patterns import (
    Average,
    Cut,
    Grid,
    Pattern,
    Replicated,
    Unique,
    pattern_problems,
)
from ucp_core.language.rules import Rename, Renames, Rule, Rules
from ucp_core.yaml_places import KeyPath, YamlText, did_you_mean

VERSION = 1

#: People write less than this, and YAML takes 20 us per byte.
_CHARACTERS_MAX = 1 << 20
_PROBLEMS_SHOWN_MAX = 20

_T = TypeVar("_T")


def _regex(text: str) -> str:
    try:
        re.compile(text)
    except (re.error, RecursionError, OverflowError) as error:
        raise ValueError(f"is not a regular expression: {error}") from error
    return text


def _version(version: int) -> int:
    if version > VERSION:
        raise ValueError(f"is {version}, this program reads {VERSION}; update everstep")
    return version


def _affine(entry: dict[str, Any]) -> Affine:
    try:
        return parse_affine(entry)
    except PatternError as error:
        raise ValueError(str(error)) from error


def _some(values: tuple[_T, ...]) -> tuple[_T, ...]:
    if not values:
        raise ValueError("is an empty list")
    return values


_Regex = Annotated[str, AfterValidator(_regex)]
_Regexes = Annotated[tuple[_Regex, ...], AfterValidator(_some)]


class _Words(BaseModel, extra="forbid", strict=True):
    """A mapping with these keys and no others."""


class _Pattern(_Words):
    """One of the patterns, with its settings."""

    unique: Unique | None = None
    replicated: Replicated | None = None
    average: Average | None = None
    cut: Cut | None = None
    grid: Grid | None = None
    affine: Annotated[dict[str, Any], AfterValidator(_affine)] | None = None

    def only(self) -> Pattern:
        found: list[Pattern] = [value for _, value in self if value is not None]
        if len(found) != 1:
            raise ValueError(f"must be one of {', '.join(_Pattern.model_fields)}")
        if problems := pattern_problems(found[0]):
            raise ValueError("; ".join(problems))
        return found[0]


class _Rule(_Words):
    match: _Regexes
    pattern: Annotated[_Pattern, AfterValidator(_Pattern.only)]
    slot: str | None = None
    optional: bool = False


class _Rules(_Words):
    version: Annotated[int, Field(ge=1), AfterValidator(_version)] = VERSION
    first_wins: bool = False
    rules: Annotated[tuple[_Rule, ...], AfterValidator(_some)] = ()
    ties: dict[str, str] = {}
    extends: Annotated[tuple[str, ...], AfterValidator(_some)] = ()


class _Rename(_Words):
    match: _Regex
    to: str
    optional: bool = False


#: By key, the class that lists the keys below it.
_BELOW: dict[str, type[Any]] = {
    "": _Rules,
    "rules": _Rule,
    "pattern": _Pattern,
    "replicated": Replicated,
    "cut": Cut,
    "cuts": Cut,
    "grid": Grid,
    "0": _Rename,
}


def _full(value: Any, key: str = "") -> Any:
    """Return the value of a key without the short forms that the language allows."""
    if isinstance(value, dict):
        return {name: v if name == "ties" else _full(v, name) for name, v in value.items()}
    if isinstance(value, list):
        return [_full(item, "cut" if key == "cuts" else "") for item in value]
    if key == "pattern" and isinstance(value, str):
        return {value: {}}
    if key == "cut":
        return {"dim": value}
    # One expression needs no list around it.
    return [value] if key == "match" else value


class _Text(YamlText):
    """A text of rules or renamings; it raises all its problems at once."""

    def __init__(self, text: str, where: str) -> None:
        size = len(text)
        super().__init__(text if size <= _CHARACTERS_MAX else "", where)
        if size > _CHARACTERS_MAX:
            self.wrong((), f"has {size} characters, but rules may have at most {_CHARACTERS_MAX}")
        elif self.root is None and not self.problems:
            self.wrong((), "is empty; RULES.md says what to write")
        self.finish()

    def wrong(self, path: KeyPath, message: str) -> None:
        """Add a problem at ``path``; of several at one place, only the first counts."""
        found = self.problem(path, message)
        place = found.place if found.place.line else Place(self.name, 1, 1)
        if (place, found.path) not in {(one.place, one.path) for one in self.problems}:
            self.problems.append(found._replace(place=place))

    def read(self, kind: type[_T], value: Any) -> _T:
        """Return the value as ``kind``."""
        try:
            # In JSON, unlike in Python, a list is also a strict tuple.
            return TypeAdapter(kind).validate_json(json.dumps(value, default=str))
        except ValidationError as error:
            for detail in error.errors():
                # Pydantic also names the branches of ``parts``.
                path = tuple(part for part in detail["loc"] if "int" not in str(part))
                self.wrong(path, _told(detail))
            self.finish()
            raise

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


def _told(detail: Any) -> str:
    """Return what is wrong with a value, from pydantic's details."""
    kind, message = detail["type"], str(detail["msg"])
    *above, key = detail["loc"] or ("",)
    if kind.startswith("missing"):
        return "is missing"
    if kind in {"extra_forbidden", "unexpected_keyword_argument"}:
        parent = next((part for part in reversed(above) if isinstance(part, str)), "")
        known = _BELOW.get("0" if above and not parent else parent, Unique).__annotations__
        return f"is not a key here; {did_you_mean(key, known)}"
    _, should, wanted = message.partition(" should ")
    quotes = "; put it in quotes" if kind == "string_type" else ""
    if should:
        return f"must {wanted}, not {detail['input']!r}{quotes}"
    return message.removeprefix("Value error, ")


def read_rules(text: str, where: str, families: Collection[str]) -> tuple[Rules, tuple[str, ...]]:
    """Return the rules of a text and the names of the families that it extends."""
    source = _Text(text, where)
    read = source.read(_Rules, _full(source.value))
    for index, name in enumerate(read.extends):
        if name not in families:
            hint = did_you_mean(name, families)
            source.wrong(("extends", index), f"unknown family {name!r}: {hint}")
    rules: dict[tuple[str, str | None], Rule] = {}
    for index, rule in enumerate(read.rules):
        place = str(source.places["rules", index])
        for name in rule.match:
            made = Rule(name, cast("Pattern", rule.pattern), rule.slot, place, rule.optional)
            other = rules.setdefault((name, rule.slot), made)
            if other is not made:
                line = other.where.rpartition(":")[2]
                message = f"{name!r} is matched by the rule at line {line} already"
                source.wrong(("rules", index, "match"), message)
    source.finish()
    return Rules(tuple(rules.values()), read.first_wins, read.ties), read.extends


def read_renames(text: str, where: str) -> Renames:
    """Return the renamings of a text; a ``RulesError`` lists all problems with their places."""
    source = _Text(text, where)
    read = source.read(tuple[_Rename, ...], source.value)
    for index, rename in enumerate(read):
        try:
            re.compile(rename.match).sub(rename.to, "")
        except (re.error, IndexError) as error:
            source.wrong((index, "to"), f"{rename.to!r} does not fit {rename.match!r}: {error}")
    source.finish()
    return Renames(
        tuple(
            Rename(one.match, one.to, one.optional, str(source.places[(index,)]))
            for index, one in enumerate(read)
        )
    )
