"""Rules: which tensors have which pattern, by name. ``RULES.md`` describes their text."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache

from ucp_core.errors import RulesError
from ucp_core.language.patterns import Pattern


@dataclass(frozen=True, slots=True)
class Rule:
    """One rule."""

    match: str  #: A regular expression for whole names (``re.fullmatch``).
    pattern: Pattern
    #: The only slot it applies to; None: all slots without a rule of their own.
    slot: str | None = None
    where: str = ""  #: ``file:line``, for errors.
    optional: bool = False  #: The rule may match no name.


@dataclass(frozen=True, slots=True)
class Rules:
    """Rules in order."""

    #: If several rules match a name, they must agree on its pattern.
    rules: tuple[Rule, ...] = ()
    first_wins: bool = False  #: The first rule that matches wins instead.
    ties: Mapping[str, str] = field(default_factory=dict)  #: Tensors by alias.
    fallback: Rules | None = None  #: Rules for names that none of these match.

    @property
    def num_rules(self) -> int:
        """Return the number of rules, including the fallback's."""
        return len(self.rules) + (self.fallback.num_rules if self.fallback is not None else 0)

    def match(self, fqn: str, slot: str | None = None) -> Pattern | None:
        """Return the pattern of a tensor, or None; raise ``RulesError`` if two rules disagree."""
        hits = [rule for rule in self.rules if _matches(rule.match, fqn)]
        chosen = [rule for rule in hits if slot is not None and rule.slot == slot]
        chosen = chosen or [rule for rule in hits if rule.slot is None]
        if not chosen:
            return None if self.fallback is None else self.fallback.match(fqn, slot)
        first = chosen[0]
        for other in () if self.first_wins else chosen[1:]:
            if other.pattern != first.pattern:
                raise RulesError(
                    f"{fqn}: {_told(first)} and {_told(other)} give it different patterns; make "
                    "one of them narrower, or say first_wins: true",
                    fqn=fqn,
                )
        return first.pattern

    def refuse_idle(self, fqns: Iterable[str]) -> None:
        """Check that every rule that is not optional matches a name.

        The rules of the fallback belong to families, so they are optional.
        """
        _refuse_idle(self.rules, fqns)

    def over(self, fallback: Rules) -> Rules:
        """Return these rules, with others for the names that they do not match."""
        if self.fallback is not None:
            fallback = self.fallback.over(fallback)
        return Rules(
            rules=self.rules,
            first_wins=self.first_wins,
            ties={**fallback.ties, **self.ties},
            fallback=fallback,
        )


@dataclass(frozen=True, slots=True)
class Rename:
    """One renaming."""

    match: str  #: A regular expression for whole names.
    to: str  #: The new name, a template of ``re.sub``.
    optional: bool = False  #: The renaming may match no name.
    where: str = ""  #: ``file:line``, for errors.


@dataclass(frozen=True, slots=True)
class Renames:
    """New names for tensors; the first renaming that matches wins."""

    renames: tuple[Rename, ...]

    def mapping(self, fqns: Iterable[str]) -> dict[str, str]:
        """Return the new names by old ones, for the names that change."""
        found: dict[str, str] = {}
        for fqn in fqns:
            for rename in self.renames:
                hit = _compiled(rename.match).fullmatch(fqn)
                if hit is not None:
                    found[fqn] = hit.expand(rename.to)
                    break
        return {old: new for old, new in found.items() if old != new}

    def refuse_idle(self, fqns: Iterable[str]) -> None:
        """Raise ``RulesError`` if a renaming that is not optional matches none of the names."""
        _refuse_idle(self.renames, fqns)


def _refuse_idle(wanted: Iterable[Rule | Rename], fqns: Iterable[str]) -> None:
    names = list(fqns)
    idle = [
        each
        for each in wanted
        if not each.optional and not any(_matches(each.match, fqn) for fqn in names)
    ]
    if idle:
        shown = ", ".join(sorted(names)[:3])
        raise RulesError(
            "\n".join(
                f"{each.where}: {each.match!r} matches none of the {len(names)} names "
                f"({shown}, ...): correct it, or say optional: true"
                for each in idle
            ),
            matches=tuple(each.match for each in idle),
        )


@cache
def _compiled(regex: str) -> re.Pattern[str]:
    return re.compile(regex)


def _matches(regex: str, name: str) -> bool:
    return _compiled(regex).fullmatch(name) is not None


def _told(rule: Rule) -> str:
    return f"{rule.match!r}" + (f" ({rule.where})" if rule.where else "")
