"""Merges the optimizer's groups: each pipeline stage knows only its own parameters. Pure."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from ucp_core.formats.shared.values import json_value

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ucp_core.storage import Store


class Groups:
    """Merges the optimizer's groups over pipeline stages and tensor parallel ranks.

    Args:
        store: Store of the folder, which small tensors among hyper-parameters are read from.
    """

    def __init__(self, store: Store, directory: str) -> None:
        self._store, self._directory = store, directory
        self._groups: list[dict[str, Any]] = []
        self._keys: list[str] = []

    def add(
        self, groups: Sequence[Mapping[str, Any]], names: Sequence[Sequence[str]], where: str
    ) -> None:
        """Add hyper-parameters and names of one rank's groups, in order.

        A stage may lack a group, so groups of two ranks are the same if their hyper-parameters are
        equal. Each rank has a group at most once.

        Args:
            groups: As an optimizer saves them; their ``params`` do not count.
            where: Their file, and where in it, for messages.
        """
        met: set[int] = set()
        for index, (group, own) in enumerate(zip(groups, names, strict=True)):
            values = json_value(
                {name: value for name, value in group.items() if name != "params"},
                self._store,
                self._directory,
                f"{where}: param_groups[{index}]",
            )
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
            self._groups[chosen]["params"] = list(dict.fromkeys([*params, *own]))

    def result(self) -> list[dict[str, Any]]:
        """Return the groups in the form of a manifest."""
        return self._groups
