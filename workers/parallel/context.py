"""Share sequences by context parallelism: each rank holds a part of every sequence."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn import functional

from workers.errors import LayoutRefusedError, TaskError
from workers.models import Context, use_context
from workers.parallel import hub
from workers.parallel.mesh import Mesh
from workers.parallel.tensor import ModelPlan

#: A label that the loss ignores.
_IGNORED: Final = -100


class SequenceParts:
    """Cuts this rank's parts out of the sequences of an attempt.

    ``names`` are the entries of a batch with positions along dim 1. ``context`` are the ranks with
    the other parts; None if this rank has whole sequences.
    """

    def __init__(self, names: Sequence[str], mesh: Mesh, context: Context | None) -> None:
        self._names, self._context = set(names), context
        self._size, self._place = mesh.layout.cp, mesh.part
        self._has_stages = mesh.stages is not None
        self._is_asked = False

    def of(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """Return this rank's part of ``batch``, with shifted labels, for ``Session.part``.

        Raise ``LayoutRefusedError`` if sequences do not divide evenly, a row packs several of them,
        or one is padded on the left.
        """
        self._is_asked = True
        found = dict(batch)
        labels, shifted = found.get("labels"), found.get("shift_labels")
        if "labels" in self._names and labels is not None:
            if shifted is None:
                shifted = functional.pad(labels[:, 1:], (0, 1), value=_IGNORED)
            # transformers computes a loss only if there are labels, but takes them from
            # shift_labels.
            found["labels"] = found["shift_labels"] = shifted
        names = self._names | ({"shift_labels"} if "labels" in self._names else set())
        held = [name for name in sorted(names) if isinstance(found.get(name), Tensor)]
        if not held:
            raise TaskError(
                f"session.part: the batch has none of {', '.join(sorted(names))}; name its "
                "entries in ModelPlan(sequence=...)"
            )
        if self._context is None:
            return found
        if "position_ids" in names and found.get("position_ids") is None:
            first = found[held[0]]
            found["position_ids"] = torch.arange(first.shape[1], device=first.device)[None]
            held.append("position_ids")
        self._refuse_masked(found)
        for name in held:
            found[name] = self._cut(name, found[name])
        return found

    def refuse_unused(self) -> None:
        """Raise ``LayoutRefusedError`` if the script or its attention did not share sequences."""
        if self._context is None:
            return
        why = ""
        if not self._is_asked:
            why = "the script did not call session.part, which gives a worker its part of a batch"
        elif not self._context.is_used and not self._has_stages:
            why = "no attention of the model saw the other parts; call everstep.causal_attention"
        if why:
            raise LayoutRefusedError(
                f"parallel.cp={self._size}: {why}; or write parallel.cp: 1", axis="cp"
            )

    def _cut(self, name: str, whole: Tensor) -> Tensor:
        length = whole.shape[1] if whole.dim() > 1 else 0
        if not length or length % self._size:
            fits = max(degree for degree in range(1, self._size) if not length % degree)
            raise LayoutRefusedError(
                f"parallel.cp={self._size} does not divide dim 1 of {name} {list(whole.shape)}; "
                f"pad sequences to a multiple of it, or write parallel.cp: {fits}",
                axis="cp",
            )
        size = length // self._size
        return whole[:, self._place * size : (self._place + 1) * size].contiguous()

    def _refuse_masked(self, batch: dict[str, Any]) -> None:
        """Remove a mask that only hides padding at the end; refuse others, and packed sequences.

        Causal attention needs no mask for padding at the end, because no token sees later ones.
        """
        mask, positions = batch.pop("attention_mask", None), batch.get("position_ids")
        why = ""
        if mask is not None and (mask.dim() != 2 or bool((mask[:, 1:] > mask[:, :-1]).any())):  # noqa: PLR2004
            why = "attention_mask hides more than padding at the end"
        if positions is not None and bool((positions.diff(dim=-1) != 1).any()):
            why = "position_ids begin again within a row: it packs several sequences"
        if why:
            raise LayoutRefusedError(
                f"parallel.cp={self._size}: {why}, which attention over parts does not "
                "support; pad on the right and do not pack, or write parallel.cp: 1",
                axis="cp",
            )


def apply_sequence_plan(model: nn.Module, mesh: Mesh, plan: ModelPlan) -> SequenceParts:
    """Run the attention of ``model`` over the ranks that share its sequences.

    Raise ``LayoutRefusedError`` if several ranks share them, and the model has no plan for that.
    """
    context = Context(mesh.context) if mesh.context is not None else None
    use_context(context)
    is_of_hub = context is not None and hub.share_sequences(model, mesh.layout.cp)
    names = plan.sequence or hub.SEQUENCE
    if context is not None and not plan.sequence and not is_of_hub:
        raise LayoutRefusedError(
            f"parallel.cp={mesh.layout.cp}: model {type(model).__name__} has no plan for it; give "
            "one, session.model(build, plan=everstep.ModelPlan(sequence=(...))), or write "
            "parallel.cp: 1",
            axis="cp",
        )
    return SequenceParts(names, mesh, context)
