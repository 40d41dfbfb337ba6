"""One optimizer step: micro-batches, reduction, gradient norm, learning rate, signals."""

from typing import TYPE_CHECKING

from ucp_core.lazy import lazy_door

if TYPE_CHECKING:
    from workers.train.executor.average import Average, AverageOfWeights
    from workers.train.executor.exchange import (
        all_agree,
        are_everywhere,
        by_rank,
        exchanged,
        summed,
    )
    from workers.train.executor.gradient_sums import GradientSums, room_of
    from workers.train.executor.kernels import checksums, described, machine_kind
    from workers.train.executor.not_finite import Finiteness
    from workers.train.executor.own_changes import refuse_hooks
    from workers.train.executor.quotas import quota
    from workers.train.executor.rank_calls import RankCalls
    from workers.train.executor.recheck import Recheck, odd_results, sum_of_words
    from workers.train.executor.reduction import reduction_of, use_deterministic_kernels
    from workers.train.executor.sharded_model import BuiltModel, ShardedModel
    from workers.train.executor.signals import Signals
    from workers.train.executor.step import Step
    from workers.train.executor.tensor_replicas import TensorReplicas
    from workers.train.executor.trained import Trained
    from workers.train.executor.whole_gradients import WholeGradients


__getattr__ = lazy_door(__name__)
