"""Values that no checkpoint holds: a model's buffers, and its weights before the first step."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from workers.data import drawn, seeded
from workers.parallel import own_names

__all__ = ["initial_values"]


def initial_values(
    build: Callable[[], nn.Module], seed: int, *, with_weights: bool
) -> dict[str, Tensor]:
    """Return the buffers of the model that ``build`` makes on the CPU, by name.

    Args:
        build: Makes the model; called with seeded random numbers.
        seed: Their seed.
        with_weights: Whether to return the parameters, too: then the whole model is in memory.
    """
    found = None if with_weights else _buffers_alone(build, seed)
    if found is not None:
        return found
    with seeded(seed):
        whole = build()
    buffers = whole.named_buffers(remove_duplicate=False)
    return own_names([*whole.named_parameters(), *buffers])


def _buffers_alone(build: Callable[[], nn.Module], seed: int) -> dict[str, Tensor] | None:
    """Return the buffers, made without parameters; None if they might have other values then.

    Parameters have no values, so none are initialised. A buffer that depends on one has no value,
    either; and one that is random depends on all random numbers before it.
    """

    def without_values(
        _module: nn.Module, _name: str, parameter: nn.Parameter | None
    ) -> nn.Parameter | None:
        if parameter is None or parameter.is_meta:
            return None
        return nn.Parameter(parameter.detach().to("meta"), parameter.requires_grad)

    with seeded(seed):
        before = drawn()
        hook = register_module_parameter_registration_hook(
            without_values  # type: ignore[arg-type]  # a result replaces the parameter
        )
        try:
            model = build()
        except Exception:  # noqa: BLE001  it used a value; the whole model may be built
            return None
        finally:
            hook.remove()
        if drawn() != before:
            return None
    buffers = own_names(model.named_buffers(remove_duplicate=False))
    return None if any(buffer.is_meta for buffer in buffers.values()) else buffers
