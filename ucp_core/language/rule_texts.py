"""Rules and renamings from texts, and the families of rules that everstep ships.

``syntax`` is imported only when a text is read: YAML takes 50 ms to import.
"""

from dataclasses import replace
from functools import cache
from importlib.resources import files
from importlib.resources.abc import Traversable

from ucp_core.errors import RulesError
from ucp_core.language.rules import Renames, Rules


def load_rules(text: str, where: str) -> Rules:
    """Return the rules of a text; the families that it ``extends`` match the remaining names."""
    from ucp_core.language.syntax import read_rules

    rules, extends = read_rules(text, where, builtin_names())
    for name in extends:
        rules = rules.over(builtin_rules(name))
    return rules


def load_renames(text: str, where: str) -> Renames:
    """Return renamings: the text is a list of ``{match: regex, to: template, optional?: bool}``."""
    from ucp_core.language.syntax import read_renames

    return read_renames(text, where)


@cache
def builtin_names() -> tuple[str, ...]:
    """Return the names of the built-in families."""
    names = (path.name for path in _families().iterdir())
    return tuple(sorted(n.removesuffix(".yaml") for n in names if n.endswith(".yaml")))


@cache
def builtin_rules(name: str) -> Rules:
    """Return the rules of a built-in family; raise ``RulesError`` if it does not exist."""
    if name not in builtin_names():
        raise RulesError(
            f"there are no built-in rules {name!r}; there are {', '.join(builtin_names())}"
        )
    text = (_families() / f"{name}.yaml").read_text(encoding="utf-8")
    rules = load_rules(text, f"{name}.yaml")
    # A model need not have all the tensors of its family.
    return replace(rules, rules=tuple(replace(rule, optional=True) for rule in rules.rules))


def _families() -> Traversable:
    return files("ucp_core.language") / "families"
