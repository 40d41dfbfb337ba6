"""Merges the optimizer's groups: each pipeline stage knows only its own parameters. Pure."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


class Groups:
    """Merges the optimizer's groups over pipeline stages and tensor parallel ranks."""

    def __init__(self) -> None:
        self._groups: list[dict[str, Any]] = []
        self._keys: list[str] = []

    def add(self, groups: Sequence[tuple[Mapping[str, Any], Sequence[str]]]) -> None:
        """Add hyper-parameters and names of one rank's groups, in order.

        A stage may lack a group, so groups of two ranks are the same if their hyper-parameters are
        equal. Each rank has a group at most once.
        """
        met: set[int] = set()
        for index, (values, names) in enumerate(groups):
            key = json.dumps(values, sort_keys=True)
            fits = [i for i, k in enumerate(self._keys) if k == key and i not in met]
            if fits:
                chosen = index if index in fits else fits[0]
            else:
                chosen = len(self._groups)
                self._groups.append({"params": [], **values})
                self._keys.append(key)
            met.add(chosen)
            params = self._groups[chosen]["params"]
            self._groups[chosen]["params"] = list(dict.fromkeys([*params, *names]))

    def result(self) -> list[dict[str, Any]]:
        """Return the groups in the form of a manifest."""
        return self._groups
