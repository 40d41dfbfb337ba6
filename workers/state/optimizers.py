"""Fit a script's optimizer to shards, and refuse an optimizer that cannot update them.

An optimizer gets this worker's shard of every parameter. If it treats every element alike, shards
give the same result as whole parameters. If it uses whole matrices, its steps silently depend on
the number of workers, and its state need not show this: Muon's momentum has its parameter's shape.
torch's own optimizers are known by class. Any other one is refused unless the script declares it.
``workers.state.entries`` refuses optimizers of any class whose state cannot be saved in shards.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

from torch import Tensor, nn, optim

from ucp_core.layout import ParallelLayout
from workers.errors import StateError, TaskError
from workers.parallel import LocalShard
from workers.state.own_values import OwnValues
from workers.state.twins import state_of_a_step
from workers.state.whole_vectors import in_whole_vectors

#: The key under which a version keeps changed values of optimizers.
CHANGED: Final = "optimizer_changed"
#: The key that says that the optimizers have not done a step.
UNSTARTED: Final = "optimizer_unstarted"
#: Optimizers of torch that are refused for any number of workers (2.13).
_NEVER: Final[Mapping[type[optim.Optimizer], str]] = {
    optim.Adafactor: "scales by sums over whole rows, columns and parameters, and keeps the "
    "sums, which cannot be saved in parts",
    optim.LBFGS: "computes the loss several times in a step, and keeps one history for all "
    "parameters, which cannot be saved in parts",
    optim.SparseAdam: "takes only sparse gradients, but between workers gradients are dense",
}
#: Optimizers of torch that treat every element alike (2.13). A subclass may not do so.
_ELEMENTWISE: Final = frozenset(
    {
        optim.ASGD,
        optim.Adadelta,
        optim.Adagrad,
        optim.Adam,
        optim.AdamW,
        optim.Adamax,
        optim.NAdam,
        optim.RAdam,
        optim.RMSprop,
        optim.Rprop,
        optim.SGD,
    }
)


class Optimizers:
    """The optimizers of a session as one.

    ``every`` is empty before they are made. ``StateError`` is raised if two of them update the same
    parameter.

    Attributes:
        unstarted: Whether no step was done, even if there is state to save.
    """

    def __init__(
        self, every: Iterable[optim.Optimizer], parameters: Mapping[str, nn.Parameter]
    ) -> None:
        self.every = tuple(every)
        self.unstarted = True
        names = {id(parameter): fqn for fqn, parameter in parameters.items()}
        self._owners: dict[int, optim.Optimizer] = {}
        for one in self.every:
            for group in one.param_groups:
                for parameter in group["params"]:
                    owner = self._owners.setdefault(id(parameter), one)
                    if owner is not one:
                        fqn = names.get(id(parameter), "a parameter")
                        raise StateError(
                            f"{fqn} is in two optimizers ({type(owner).__name__}, "
                            f"{type(one).__name__}); give each parameter to one",
                            fqn=fqn,
                        )
        #: Each group with the learning rate that was set last.
        self._rates = {id(group): (group, _noted(group["lr"])) for group in self.param_groups}
        #: The state that ``prime`` replaced.
        self._made: list[tuple[optim.Optimizer, nn.Parameter, dict[str, Any] | None]] = []
        self._own = OwnValues(self.every, self.unknown)
        self.changed, self.set_changed = self._own.changed, self._own.set_changed

    @property
    def unknown(self) -> tuple[optim.Optimizer, ...]:
        """Return the optimizers whose class is not known to treat every element alike."""
        return tuple(one for one in self.every if type(one) not in _ELEMENTWISE)

    def set_rates(self, optimizer: optim.Optimizer, rate: float) -> None:
        """Set the learning rates of ``optimizer`` to ``rate`` times the group's ``lr_scale``."""
        for group in optimizer.param_groups:
            own = rate * group.get("lr_scale", 1.0)
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(own)
            else:
                group["lr"] = own
            self._rates[id(group)] = group, _noted(group["lr"])

    def refuse_rates(self, step: int, is_scheduled: Callable[[optim.Optimizer], bool]) -> None:
        """Raise ``TaskError`` if a script has set learning rates that the session would overwrite.

        This does not wait for a device.
        """
        for group, noted in self._rates.values():
            if _noted(group["lr"]) == noted:
                continue
            owner = next(one for one in self.every if any(group is g for g in one.param_groups))
            if not is_scheduled(owner):
                name = type(owner).__name__
                raise TaskError(
                    f"step {step}: the learning rate of {name} was set to {float(group['lr']):g} "
                    "by the script, or by a scheduler that is not registered, and train.lr and "
                    "train.schedule would overwrite it. Register the scheduler (session.register): "
                    "one of torch's, or any with optimizer, step and get_last_lr; write a rule of "
                    'your own as LambdaLR. For a ratio between groups set group["lr_scale"]',
                    optimizer=name,
                    step=step,
                )

    @property
    def state(self) -> Mapping[Any, dict[str, Any]]:
        """Return the state of every parameter that has state, for reading."""
        return self.every[0].state if len(self.every) == 1 else _States(self)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Return the groups of all optimizers, in order."""
        return [group for one in self.every for group in one.param_groups]

    def owner(self, parameter: nn.Parameter) -> optim.Optimizer | None:
        """Return the optimizer that updates ``parameter``, or None."""
        return self._owners.get(id(parameter))

    def prime(self) -> None:
        """Allocate state of zeros for all trained parameters; ``forget`` undoes it.

        Weights and the optimizers' other values do not change.
        """
        self.forget(parameter for _, parameter, _ in self._made)
        self.unstarted, self._made = True, []
        for one in self.every:
            known = type(one) in _ELEMENTWISE
            for parameter, state in state_of_a_step(one, shares_weights=known).items():
                self._made.append((one, parameter, one.state.get(parameter)))
                one.state[parameter] = state

    def forget(self, parameters: Iterable[nn.Parameter]) -> None:
        """Restore the state that ``parameters`` had before ``prime``, or none."""
        chosen = {id(parameter) for parameter in parameters}
        for owner, parameter, state in self._made:
            if id(parameter) in chosen:
                if state is None:
                    owner.state.pop(parameter, None)
                else:
                    owner.state[parameter] = state

    def begin(self) -> None:
        """Note that all state belongs to a step that was loaded or is about to be done."""
        self.unstarted = False
        self._made = []


class _States(Mapping[Any, dict[str, Any]]):
    """The state of every parameter. Unlike in an optimizer, a lookup creates no state."""

    def __init__(self, optimizers: Optimizers) -> None:
        self._optimizers = optimizers

    def __getitem__(self, parameter: Any) -> dict[str, Any]:
        owner = self._optimizers.owner(parameter)
        if owner is None or parameter not in owner.state:
            raise KeyError(parameter)
        found: dict[str, Any] = owner.state[parameter]
        return found

    def __iter__(self) -> Iterator[Any]:
        return itertools.chain.from_iterable(one.state for one in self._optimizers.every)

    def __len__(self) -> int:
        return sum(len(one.state) for one in self._optimizers.every)


def _noted(value: Any) -> Any:
    """Return a value that shows whether a rate has changed, without reading from a device."""
    return (value, value._version) if isinstance(value, Tensor) else value  # noqa: SLF001


def adopt(
    optimizer: optim.Optimizer,
    shards: Sequence[LocalShard],
    parameters: Mapping[str, nn.Parameter],
) -> None:
    """Make a new optimizer update the shards instead of the model's parameters.

    An optimizer that was made over ``parameters``, as it should be, does not change. Raise
    ``StateError`` if it has parameters of neither, or already has state for the model's.
    """
    own = {id(parameter) for parameter in parameters.values()}
    of_model = {id(shard.parameter): parameters[shard.fqn] for shard in shards}
    for group in optimizer.param_groups:
        for place, parameter in enumerate(group["params"]):
            if id(parameter) in own:
                continue
            local = of_model.get(id(parameter))
            if local is None or parameter in optimizer.state:
                why = (
                    "keeps state for"
                    if local is not None
                    else "does not belong to this session and has"
                )
                raise StateError(
                    f"optimizer {type(optimizer).__name__} {why} a parameter of shape "
                    f"{tuple(parameter.shape)}; make it over the parameters that it is given: "
                    "session.optimizer(lambda parameters: torch.optim.AdamW(parameters.values()))",
                    optimizer=type(optimizer).__name__,
                )
            group["params"][place] = local


def take_whole_vectors(optimizer: optim.Optimizer) -> None:
    """Pad an optimizer's parameters to whole vectors if it treats every element alike."""
    if type(optimizer) in _ELEMENTWISE:
        parameters = [one for group in optimizer.param_groups for one in group["params"]]
        in_whole_vectors(parameters, optimizer.state)


def refuse_unfit(
    optimizer: optim.Optimizer, layout: ParallelLayout, *, elementwise: bool = False
) -> None:
    """Raise ``StateError`` if ``optimizer`` would update shards differently from whole parameters.

    This is so if its class or a base class is known not to fit, or if parameters are in parts and
    the class is unknown. ``elementwise`` says that the script declares that it treats every element
    alike.
    """
    name = type(optimizer).__name__
    reason = next((why for kind, why in _NEVER.items() if isinstance(optimizer, kind)), None)
    advice = "use one that treats every element alike, as AdamW or SGD"
    if elementwise and isinstance(optimizer, optim.Muon):
        reason = "makes the update of a whole matrix orthogonal"
        advice = "call session.optimizer without elementwise=True, for workers with whole matrices"
    elif reason is None and layout.dp_shard * layout.cp * layout.tp > 1:
        parts = f"and here every worker has a part of it ({layout})"
        whole = "have every worker hold the whole model: parallel.dp_replicate as large as "
        whole += "workers.max"
        if isinstance(optimizer, optim.Muon):
            reason = f"makes the update of a whole matrix orthogonal, {parts}"
            advice += f", or {whole}"
        elif not elementwise and type(optimizer) not in _ELEMENTWISE:
            reason = f"is not one of torch's, and may use a whole matrix, {parts}"
            advice = "if it treats every element alike, say so: session.optimizer(make, "
            advice += f"elementwise=True); else use AdamW or SGD, or {whole}"
    if reason is not None:
        name = type(optimizer).__name__
        raise StateError(f"optimizer {name} {reason}; {advice}", optimizer=name, layout=str(layout))
