"""Cut models of ``transformers`` by their own plans for tensors, experts, sequences and stages.

Adapters of ``peft`` are cut like the matrices that they change. Written for transformers 5.24.
"""

import copy
import inspect
import re
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from math import gcd
from typing import Any, Final

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate

from workers.errors import LayoutRefusedError
from workers.models import HUB_NAME, hub_attention, pretrained, stage_layers
from workers.parallel.fsdp import WRAPPERS
from workers.parallel.mesh import ExpertMesh, Mesh

#: Styles of ``transformers`` for modules that take and return whole tensors.
_WHOLE: Final = {
    "colwise_gather_output", "colwise_rep", "embedding_colwise", "embedding_rowwise", "replicate",
    "rowwise_rep", "rowwise_split_input",
}  # fmt: skip
#: For each style of a base, the matrix of its adapter that is cut in the same way. The other matrix
#: is whole.
_CUT_ADAPTERS: Final = {
    "colwise": "lora_B", "packed_colwise": "lora_B", "rowwise": "lora_A", "packed_rowwise": "lora_A"
}  # fmt: skip
_ADAPTER: Final = re.compile(r"(.+)\.(lora_[^.]+)\..+")
#: Inputs that only a model's head takes, for its loss.
_OF_HEAD: Final = {"labels", "logits_to_keep", "num_items_in_batch", "return_dict", "shift_labels"}
#: The style of modules that send tokens to the ranks of their experts.
_DISPATCH: Final = "ep_dispatch_experts"
#: Entries of a batch with positions along dim 1.
SEQUENCE: Final = ("input_ids", "labels", "position_ids")
#: Layers that mix positions by attention alone.
_ATTENTION: Final = {"full_attention", "sliding_attention"}
#: Rotary embeddings of these kinds depend on the length of a sequence.
_BY_LENGTH: Final = {"dynamic", "longrope"}
_NUMBER: Final = re.compile(r"(?<=\.)\d+(?=\.|$)")


def cut_tensors(model: nn.Module, mesh: Mesh) -> bool:
    """Cut the models of ``transformers`` in ``model``, on the meta device, by their own plans.

    Experts that ``cut_experts`` cuts are left to it. Return whether any model has a plan. Raise
    ``LayoutRefusedError`` if attention heads or adapters cannot be cut.
    """
    assert mesh.tensor is not None, "there are ranks to cut for"
    degree = mesh.tensor.size()
    found = [one for one in pretrained(model) if getattr(one, "tp_plan", None)]
    for one in found:
        apart = tuple(f"{name}." for name in one.ep_plan if mesh.experts is not None)
        plan = {
            name: rule for name, rule in one.tp_plan.items() if not f"{name}.".startswith(apart)
        }
        named = _own_modules(one)
        _refuse_heads(named, plan, degree)
        for module, styles in _styles(named, plan, "tp", degree).items():
            if "mla_kv_a_proj" in styles.values():
                module.config = one.config.get_text_config()
            for name, style in styles.items():
                _apply(style, module, name, mesh.tensor)
    return bool(found)


def cut_experts(model: nn.Module, mesh: ExpertMesh) -> bool:
    """Give each rank an equal share of the experts of ``transformers`` models, by their own plans.

    Ranks send each token to the ranks of its experts and get the results back. Return whether a
    plan covers experts. Raise ``LayoutRefusedError`` if the experts cannot be cut.
    """
    degree, is_found = mesh.ranks.size(), False
    for one in pretrained(model):
        plan = getattr(one, "ep_plan", None) or {}
        named = _own_modules(one)
        for module, styles in _styles(named, plan, "ep", degree).items():
            name = next(name for name, each in named.items() if each is module)
            _refuse_experts(name, module, styles, degree)
            _apply_experts(module, styles, mesh)
            is_found = True
    return is_found


def _own_modules(model: nn.Module) -> dict[str, nn.Module]:
    """Return the modules of ``model`` by name; a wrapped module takes its wrapper's place."""
    # The wrapped module comes last and has the same name.
    return {
        WRAPPERS.sub("", f"{name}.")[:-1]: module
        for name, module in model.named_modules()
        if not isinstance(module, _Absent)
    }


def share_sequences(model: nn.Module, degree: int) -> bool:
    """Run the attention of ``transformers`` models in ``model`` over parts of sequences.

    Return whether there is such a model. Raise ``LayoutRefusedError`` if a layer other than
    attention mixes positions, or the model takes neither positions nor our attention.
    """
    found = list(pretrained(model))
    for one in found:
        config, modules = one.config.get_text_config(), list(one.modules())
        kinds = set(getattr(config, "layer_types", None) or ()) - _ATTENTION
        kinds |= {type(each).__name__ for each in modules if isinstance(each, nn.Conv1d)}
        rotary = {str(getattr(each, "rope_type", "")) for each in modules}
        kinds |= {f"rope_type={each}" for each in rotary & _BY_LENGTH}
        if "position_ids" not in inspect.signature(type(one).forward).parameters:
            kinds.add("no position_ids")
        if not one._can_set_attn_implementation():  # noqa: SLF001
            kinds.add("its own attention")
        if kinds:
            raise LayoutRefusedError(
                f"parallel.cp={degree}: model {type(one).__name__} has "
                f"{', '.join(sorted(kinds))}, so it would compute parts of a sequence wrongly; "
                "write parallel.cp: 1",
                axis="cp",
            )
        _set_attention(modules)
    return bool(found)


def _set_attention(modules: Iterable[nn.Module]) -> None:
    """Make modules use our attention, by copies of configurations that others may share."""
    from transformers import AttentionInterface

    AttentionInterface.register(HUB_NAME, hub_attention)
    copies: dict[int, Any] = {}
    for module in modules:
        config: Any = vars(module).get("config")
        if hasattr(config, "_attn_implementation"):
            own = module.config = copy.deepcopy(config, copies)
            own._attn_implementation = HUB_NAME  # noqa: SLF001


def has_stages(model: nn.Module) -> bool:
    """Return whether ``keep_stage`` can cut ``model``, of ``transformers`` or ``peft``."""
    found = list(pretrained(model))
    is_around = model in found or type(model).__module__.startswith("peft.")
    return is_around and len(found) == 1 and bool(getattr(found[0], "pp_plan", None))


def keep_stage(model: nn.Module, number: int, num_stages: int) -> None:
    """Remove from a ``transformers`` model what a pipeline stage does not have.

    Modules that the forward pass calls keep their names but do nothing.
    """
    (inner,) = pretrained(model)
    plan = {name: (inner.get_submodule(name), takes) for name, (takes, _) in inner.pp_plan.items()}
    layers = _layers(inner)
    is_last = number == num_stages - 1
    head = _size(inner.get_output_embeddings()) / max(_size(layers[0]), 1)
    kept = stage_layers(len(layers), number, num_stages, head)
    for at in set(range(len(layers))).difference(kept):
        layers[at] = _Absent()
    for name, (module, takes) in plan.items():
        is_after = "hidden_states" in takes
        if module is not layers and (not is_last if is_after else number > 0):
            inner.set_submodule(name, _Absent())
    base = inner.base_model
    if not is_last:
        for name, _ in list(inner.named_children()) if base is not inner else ():
            if inner.get_submodule(name) is not base:
                inner.set_submodule(name, _Absent())
        inner.forward = partial(_hidden_states, base.forward if base is inner else base)
    embed = inner.get_input_embeddings() if number == 0 else None
    before = layers[kept.start - 1] if number else None
    model.forward = partial(_stage_forward, model.forward, embed, before)


class _Absent(nn.Module):
    """Replaces a module of another stage.

    The last layer before a stage returns what that stage received.
    """

    received: Tensor | None = None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the first argument, or what the stage received."""
        if self.received is not None:
            return self.received
        return args[0] if args else next(iter(kwargs.values()))


def _stage_forward(
    forward: Callable[..., Any],
    embed: nn.Module | None,
    before: _Absent | None,
    given: Tensor | None = None,
    /,
    **kwargs: Any,
) -> Any:
    """Compute a stage: the first one takes token ids, others hidden states.

    On the meta device only the shape matters. Layers keep it, so they are skipped: a mask would
    need values.
    """
    kwargs["use_cache"] = False
    if embed is not None:
        if given is not None:
            kwargs["input_ids"] = given
        tokens, embedded = kwargs.get("input_ids"), kwargs.get("inputs_embeds")
        if embedded is None and tokens is not None and tokens.is_meta:
            embedded = embed(tokens)
        is_asked = embedded is not None and embedded.is_meta
        return embedded if is_asked else forward(**kwargs)
    assert before is not None, "a stage but the first has layers before it"
    assert given is not None, "it receives hidden states"
    if given.is_meta:
        return given
    kwargs.pop("input_ids", None)
    kwargs["inputs_embeds"] = given
    # The first stage has computed what the model does between embedding and layers.
    before.received = given
    try:
        return forward(**kwargs)
    finally:
        before.received = None


def _hidden_states(base: Callable[..., Any], *args: Any, **kwargs: Any) -> Tensor:
    """Return the output of a stage's last layer, as the head would get it."""
    named = {name: value for name, value in kwargs.items() if name not in _OF_HEAD}
    hidden: Tensor = base(*args, **named).last_hidden_state
    return hidden


def _layers(model: Any) -> Any:
    named = (model.get_submodule(name) for name in model.pp_plan)
    return next(one for one in named if isinstance(one, nn.ModuleList))


def _size(module: nn.Module | None) -> int:
    return sum(one.numel() for one in module.parameters()) if module is not None else 0


def refuse_stages(model: nn.Module, num_ranks: int, per_rank: int) -> None:
    """Raise ``LayoutRefusedError`` unless each rank can have ``per_rank`` stages of a model.

    This fails if there are more stages than layers, or the loss needs the routers of all stages.
    """
    (inner,) = pretrained(model)
    num_layers = len(_layers(inner))
    config, kind = inner.config.get_text_config(), type(inner).__name__
    if num_ranks > num_layers:
        raise LayoutRefusedError(
            f"parallel.pp={num_ranks} is more than the {num_layers} layers of model {kind}; write "
            f"parallel.pp: {num_layers}",
            axis="pp",
        )
    if num_ranks * per_rank > num_layers:
        raise LayoutRefusedError(
            f"parallel.pp={num_ranks} with parallel.stages_per_worker={per_rank} is more stages "
            f"than the {num_layers} layers of model {kind}; write parallel.stages_per_worker: "
            f"{num_layers // num_ranks}",
            axis="pp",
        )
    weight = getattr(config, "router_aux_loss_coef", 0)
    if weight and getattr(config, "output_router_logits", False):
        raise LayoutRefusedError(
            f"parallel.pp={num_ranks}: the balancing loss of model {kind} "
            f"(router_aux_loss_coef={weight:g}) needs the routers of all stages; set "
            "output_router_logits to false in its configuration, or write parallel.pp: 1",
            axis="pp",
        )


def _refuse_heads(named: Mapping[str, nn.Module], plan: Mapping[str, str], degree: int) -> None:
    """Raise ``LayoutRefusedError`` if a rank would get part of an attention head."""
    heads: dict[str, int] = {}
    for name, module in named.items():
        size = getattr(named.get(name.rpartition(".")[0]), "head_dim", None)
        features = getattr(module, "out_features", None)
        generic = _NUMBER.sub("*", name)
        if isinstance(size, int) and isinstance(features, int) and plan.get(generic) == "colwise":
            heads[f"the {features // size} heads of {generic}"] = features // size
    refuse_uneven(heads, degree)


def refuse_uneven(sizes: Mapping[str, int], degree: int) -> None:
    """Raise ``LayoutRefusedError`` unless ``degree`` divides each of ``sizes``, by what has it."""
    uneven = [what for what, size in sizes.items() if size % degree]
    if uneven:
        fits = max(d for d in range(1, degree) if all(not size % d for size in sizes.values()))
        raise LayoutRefusedError(
            f"parallel.tp={degree} does not divide {', '.join(uneven)}; write parallel.tp: {fits}",
            axis="tp",
        )


def _refuse_experts(name: str, module: nn.Module, styles: Mapping[str, str], degree: int) -> None:
    """Raise ``LayoutRefusedError`` unless the ranks share the experts of ``module`` evenly."""
    odd = {rule for each, rule in styles.items() if rule != ("grouped_gemm" if each else _DISPATCH)}
    odd |= {each for each, _ in module.named_parameters() if each not in styles}
    if odd or _DISPATCH not in styles.values():
        raise LayoutRefusedError(
            f"parallel.ep={degree}: the plan of transformers for {name} uses {sorted(odd)}, "
            "which everstep does not know; write parallel.ep: 1",
            axis="ep",
        )
    num_experts = len(next(module.parameters(recurse=False)))
    if num_experts % degree:
        raise LayoutRefusedError(
            f"parallel.ep={degree} does not divide the {num_experts} experts of {name}; write "
            f"parallel.ep: {gcd(degree, num_experts)}",
            axis="ep",
        )


def _styles(
    named: Mapping[str, nn.Module], plan: Mapping[str, str], axis: str, degree: int
) -> dict[nn.Module, dict[str, str]]:
    """Return the styles of each module's parameters by name, and its own style under ""."""
    found: dict[nn.Module, dict[str, str]] = {}
    for name, module in named.items():
        generic = _NUMBER.sub("*", name)
        style = plan.get(generic)
        adapter = _ADAPTER.fullmatch(generic)
        if adapter is not None and any(True for _ in module.parameters(recurse=False)):
            style = _adapter_style(name, adapter[2], plan.get(adapter[1]), (axis, degree))
        if style and hasattr(module, "modules_to_save"):
            # Both the trained copy and the frozen original stay whole.
            style = _adapter_style(name, "modules_to_save", style, (axis, degree))
        parameters = dict(module.named_parameters(recurse=False))
        sizes = [extent for one in parameters.values() for extent in one.shape]
        if style in _WHOLE and any(extent % degree for extent in sizes):
            # A vocabulary that does not divide evenly may stay whole; every rank then computes all
            # of it.
            continue
        own = {each: rule for each in parameters if (rule := plan.get(f"{generic}.{each}", style))}
        if style or own:
            found[module] = own | ({"": style} if style else {})
    return found


def _adapter_style(name: str, adapter: str, style: str | None, ways: tuple[str, int]) -> str | None:
    """Return the style of an adapter (or its part) of a module with ``style``."""
    if style is None or style in _WHOLE:
        return None
    axis, degree = ways
    if style not in _CUT_ADAPTERS or adapter not in ("lora_A", "lora_B"):
        raise LayoutRefusedError(
            f"parallel.{axis}={degree}: {name} of peft cannot be cut like its base ({style}); "
            f"choose other target_modules, or write parallel.{axis}: 1",
            axis=axis,
        )
    return style if adapter == _CUT_ADAPTERS[style] else None


def _apply(style: str, module: nn.Module, name: str, mesh: DeviceMesh) -> None:
    """Cut a parameter of ``module``; if ``name`` is "", make the module take and return parts."""
    from transformers.distributed.parallel_utils import ALL_PARALLEL_STYLES

    if style == "replicated_with_grad_allreduce":
        if name:
            _sum_gradient(module, name, mesh)
    elif name:
        ALL_PARALLEL_STYLES[style].shard_param(module, name, mesh)
    else:
        ALL_PARALLEL_STYLES[style].install_forward(module, mesh)


def _apply_experts(module: nn.Module, styles: Mapping[str, str], mesh: ExpertMesh) -> None:
    from transformers.distributed.parallel_utils import ALL_PARALLEL_STYLES

    for name, style in styles.items():
        rule = ALL_PARALLEL_STYLES[style]
        if name:
            rule.shard_param(module, name, mesh.ranks)
        else:
            rule.install_forward(
                module,
                ep_mesh=mesh.ranks,
                tp_mesh=mesh.same_tokens,
                ep_implementation="all_to_all",
            )


def _sum_gradient(module: nn.Module, name: str, mesh: DeviceMesh) -> None:
    """Sum the gradients of a whole parameter over ranks that each compute part of them.

    transformers sums the accumulated gradient after every backward pass, which counts all but the
    last micro-batch several times. The gradient of a DTensor is summed once, when FSDP2 reduces it.
    """
    parameter = module.get_parameter(name)
    whole = DTensor.from_local(parameter.detach(), mesh, [Replicate()], run_check=False)
    module.register_parameter(name, nn.Parameter(whole, requires_grad=parameter.requires_grad))
    forward = module.forward

    def with_local_values(*args: Any, **kwargs: Any) -> Any:
        held: Any = module._parameters[name]  # noqa: SLF001
        module._parameters[name] = held.to_local(grad_placements=[Partial()])  # noqa: SLF001
        try:
            return forward(*args, **kwargs)
        finally:
            module._parameters[name] = held  # noqa: SLF001

    module.forward = with_local_values
