"""The outputs of a model in an evaluation, gathered for ``compute_metrics`` as in Trainer."""

from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import EvalPrediction
from transformers.trainer_pt_utils import EvalLoopContainer, nested_detach

from everstep.torch_names import tree_flatten, tree_unflatten

#: Fills up shorter rows.
_PADDING = -100


class Predictions:
    """Outputs and labels of one evaluation."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        config = getattr(trainer.model, "config", None)
        self._ignored = {"loss", *getattr(config, "keys_to_ignore_at_inference", ["cache"])}
        self._form: Any = None
        self.last: list[Tensor] = []  #: The values of the batch that was last added, flat.
        #: The values of all batches of all workers, by number.
        self.gathered: dict[int, list[Tensor]] = {}

    def add(self, batch: dict[str, Any], returned: Any) -> None:
        """Add the model's outputs for a batch."""
        is_named = isinstance(returned, dict)
        logits = nested_detach(
            tuple(value for name, value in returned.items() if name not in self._ignored)
            if is_named
            else returned[1:]
        )
        labels = nested_detach(tuple(batch.get(name) for name in self._trainer.label_names))
        logits, labels = (one[0] if len(one) == 1 else one for one in (logits, labels))
        preprocess = self._trainer.preprocess_logits_for_metrics
        if preprocess is not None:
            logits = preprocess(logits, labels)
        leaves, self._form = tree_flatten((logits, labels))
        self.last = [one.full_tensor() if isinstance(one, DTensor) else one for one in leaves]

    def whole(self) -> EvalPrediction:
        """Return the outputs and labels of all samples, in their order."""
        joins = self._trainer.args.eval_do_concat_batches
        every = [EvalLoopContainer(joins, padding_index=_PADDING) for _ in range(2)]
        for number in sorted(self.gathered):
            parts = tree_unflatten(self.gathered[number], self._form)
            for one, part in zip(every, parts, strict=True):
                one.add(part)
        predictions, labels = (one.get_arrays() for one in every)
        return EvalPrediction(predictions=predictions, label_ids=labels)
