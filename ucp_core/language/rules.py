"""Rules: which tensors have which pattern, by their names.

A rule is a regular expression that must match the whole name, and a pattern. The text form, its
examples and the families that ship are described in ``RULES.md``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from importlib.resources import files
from importlib.resources.abc import Traversable

from ucp_core.errors import PatternError, RulesError
from ucp_core.language.patterns import Pattern


@dataclass(frozen=True, slots=True)
class Rule:
    """One rule.

    Attributes:
        match: A regular expression for whole names, as ``re.fullmatch`` has it.
        pattern: Of the tensors whose names match.
        slot: The only slot that it is for; None: all that have no rule of their own.
        where: ``file:line``, for errors.
        optional: There need not be such a name.
    """

    match: str
    pattern: Pattern
    slot: str | None = None
    where: str = ""
    optional: bool = False


@dataclass(frozen=True, slots=True)
class Stages:
    """Which pipeline stages have which tensors; layers are shared out evenly, the first get more.

    Attributes:
        layer: A regular expression with one group, the number of the layer.
        first: Regular expressions of names that the first stage has.
        last: Of names that the last stage has; a tied embedding may be in both.
    """

    layer: str
    first: tuple[str, ...] = ()
    last: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Rules:
    """Rules in order.

    Attributes:
        rules: A name that several of them match must get the same pattern from all of them.
        first_wins: Instead, the first that matches counts.
        stages: Which pipeline stages have which tensors.
        ties: Other names of tensors, by alias.
        fallback: Rules for names that none of these match.
    """

    rules: tuple[Rule, ...] = ()
    first_wins: bool = False
    stages: Stages | None = None
    ties: Mapping[str, str] = field(default_factory=dict)
    fallback: Rules | None = None

    @property
    def num_rules(self) -> int:
        """Return the number of rules, those of the fallback too."""
        return len(self.rules) + (self.fallback.num_rules if self.fallback is not None else 0)

    def match(self, fqn: str, slot: str | None = None) -> Pattern | None:
        """Return the pattern of a tensor, or None if no rule matches its name.

        Raises:
            RulesError: Two rules give it different patterns.
        """
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
        """Check that every rule that is not optional matches one of the names.

        Those of families that ship, and so those of the fallback, need not.

        Raises:
            RulesError: One does not, which would leave a tensor to other rules or to none.
        """
        _refuse_idle(self.rules, fqns)

    def over(self, fallback: Rules) -> Rules:
        """Return these rules with others for the names that they do not match."""
        if self.fallback is not None:
            fallback = self.fallback.over(fallback)
        return Rules(
            rules=self.rules,
            first_wins=self.first_wins,
            stages=self.stages or fallback.stages,
            ties={**fallback.ties, **self.ties},
            fallback=fallback,
        )

    def stages_of(self, fqns: Iterable[str], num_stages: int) -> dict[str, frozenset[int]]:
        """Return the pipeline stages that have each tensor.

        Raises:
            PatternError: There is no rule of stages, or none for a name.
        """
        stages = self.stages
        if stages is None:
            raise PatternError("the rules do not say which pipeline stage has which tensors")
        names = list(fqns)
        layers = {
            fqn: int(hit[1]) for fqn in names if (hit := _compiled(stages.layer).fullmatch(fqn))
        }
        small, extra = divmod(max(layers.values(), default=-1) + 1, num_stages)
        owner = [s for s in range(num_stages) for _ in range(small + (s < extra))]
        found: dict[str, frozenset[int]] = {}
        for fqn in names:
            if fqn in layers:
                found[fqn] = frozenset({owner[layers[fqn]]})
                continue
            ends = {0} if any(_matches(regex, fqn) for regex in stages.first) else set()
            if any(_matches(regex, fqn) for regex in stages.last):
                ends.add(num_stages - 1)
            if not ends:
                raise PatternError(
                    f"{fqn}: no rule says which of {num_stages} pipeline stages has it", fqn=fqn
                )
            found[fqn] = frozenset(ends)
        return found


@dataclass(frozen=True, slots=True)
class Rename:
    """One renaming.

    Attributes:
        match: A regular expression for whole names.
        to: What takes their place, as ``re.sub`` has it.
        optional: There need not be such a name.
        where: ``file:line``, for errors.
    """

    match: str
    to: str
    optional: bool = False
    where: str = ""


@dataclass(frozen=True, slots=True)
class Renames:
    """New names of tensors: the first renaming that matches counts."""

    renames: tuple[Rename, ...]

    def mapping(self, fqns: Iterable[str]) -> dict[str, str]:
        """Return new names by old ones, of those that change; the first that matches counts."""
        found: dict[str, str] = {}
        for fqn in fqns:
            for rename in self.renames:
                hit = _compiled(rename.match).fullmatch(fqn)
                if hit is not None:
                    found[fqn] = hit.expand(rename.to)
                    break
        return {old: new for old, new in found.items() if old != new}

    def refuse_idle(self, fqns: Iterable[str]) -> None:
        """Check that every renaming that is not optional matches one of the names.

        Raises:
            RulesError: One does not, which would leave a tensor under its old name.
        """
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
                f"({shown}, ...): mend it, or say optional: true"
                for each in idle
            ),
            matches=tuple(each.match for each in idle),
        )


def load_rules(text: str, where: str) -> Rules:
    """Return the rules that a text describes; what it ``extends`` counts for other names.

    Args:
        text: As ``RULES.md`` describes.
        where: Name of the file, for errors.

    Raises:
        RulesError: All problems, one a line, as ``file:line:column: what``.
    """
    from ucp_core.language import syntax

    found = syntax.read_rules(text, where, builtin_names())
    rules = Rules(
        rules=tuple(
            Rule(rule.match, rule.pattern, rule.slot, f"{where}:{rule.line}", rule.optional)
            for rule in found.rules
        ),
        first_wins=found.first_wins,
        stages=None if found.layer is None else Stages(found.layer, found.first, found.last),
        ties=found.ties,
    )
    for name in found.extends:
        rules = rules.over(builtin_rules(name))
    return rules


def load_renames(text: str, where: str) -> Renames:
    """Return the renamings that a text describes: a list of ``{match: regex, to: template}``.

    Those with ``optional: true`` need not match any name.

    Raises:
        RulesError: All problems, one a line, as ``file:line:column: what``.
    """
    from ucp_core.language import syntax

    return Renames(
        tuple(
            Rename(rename.match, rename.to, rename.optional, f"{where}:{rename.line}")
            for rename in syntax.read_renames(text, where)
        )
    )


@cache
def builtin_names() -> tuple[str, ...]:
    """Return the names of the families that ship."""
    names = (path.name for path in _families().iterdir())
    return tuple(sorted(n.removesuffix(".yaml") for n in names if n.endswith(".yaml")))


@cache
def builtin_rules(name: str) -> Rules:
    """Return the rules of a family that ships.

    Raises:
        RulesError: There is no such family.
    """
    if name not in builtin_names():
        raise RulesError(
            f"there are no built-in rules {name!r}; there are {', '.join(builtin_names())}"
        )
    text = (_families() / f"{name}.yaml").read_text(encoding="utf-8")
    rules = load_rules(text, f"{name}.yaml")
    # One model has not all that its family has.
    return replace(rules, rules=tuple(replace(rule, optional=True) for rule in rules.rules))


def family_of(fqns: Iterable[str]) -> str | None:
    """Return the family that ships whose rules match the most names; None if none matches any.

    Of two that match as many the one with fewer rules is meant, because families extend each
    other. Those that match every name whatsoever do not count.
    """
    names = list(fqns)
    matched = {
        family: sum(builtin_rules(family).match(fqn) is not None for fqn in names)
        for family in builtin_names()
        if builtin_rules(family).match("") is None
    }
    best = max(matched, key=lambda family: (matched[family], -builtin_rules(family).num_rules))
    return best if matched[best] else None


def _families() -> Traversable:
    return files("ucp_core.language") / "families"


@cache
def _compiled(regex: str) -> re.Pattern[str]:
    return re.compile(regex)


def _matches(regex: str, name: str) -> bool:
    return _compiled(regex).fullmatch(name) is not None


def _told(rule: Rule) -> str:
    return f"{rule.match!r}" + (f" ({rule.where})" if rule.where else "")
