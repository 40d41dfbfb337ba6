"""Causal language models of ``transformers``, dense or MoE, from a folder with ``config.json``."""

import copy
import hashlib
import json
import sys
import tempfile
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn

from ucp_core.formats import lies_beside
from workers.errors import TaskError
from workers.models.decoder import mean_loss

#: The name that ``peft`` gives to the configuration of adapters in a folder.
_ADAPTERS: Final = "adapter_config.json"


def causal_lm(folder: str) -> Any:
    """Return the model that ``folder/config.json`` describes, in float32, without weights."""
    try:
        from transformers import AutoConfig, AutoModelForCausalLM
    except ModuleNotFoundError as error:
        raise TaskError(
            f"model.preset: hf: needs {error.name}; pip install 'everstep[hf]'"
        ) from error
    try:
        config = AutoConfig.from_pretrained(folder)
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    except (ValueError, OSError) as error:
        raise TaskError(f"model.preset: hf:{folder}: {error}", path=folder) from error


def causal_lm_loss(
    model: Any, inputs: Tensor, targets: Tensor, positions: Tensor | None = None
) -> Tensor:
    """Return the mean cross entropy over all tokens, plus a MoE's balancing loss in training.

    Args:
        inputs: Token ids, ``(sequences, positions)``, int64.
        positions: Positions of the tokens, ``(1, positions)``; None if they begin at 0.
    """
    output = model(input_ids=inputs, position_ids=positions, use_cache=False)
    loss = mean_loss(output.logits, targets)
    aux_loss = getattr(output, "aux_loss", None)
    if aux_loss is not None and model.training:
        loss = loss + model.config.router_aux_loss_coef * aux_loss
    return loss


def documents(model: nn.Module) -> dict[str, bytes]:
    """Return the files that ``save_pretrained`` writes beside the weights of ``model``, by name.

    These are its configuration, its generation settings and the tokenizer of its folder, if that
    exists; {} for a model that is not of ``transformers``. Code is not included.
    """
    transformers = sys.modules.get("transformers")
    if transformers is None or not isinstance(model, transformers.PreTrainedModel):
        return {}
    config = copy.deepcopy(model.config)
    config.architectures = [type(model).__name__]
    config.dtype = model.dtype
    found = {"config.json": config.to_json_string().encode()}
    if model.can_generate():
        # ``save_pretrained`` would refuse settings that generation itself accepts.
        found["generation_config.json"] = model.generation_config.to_json_string().encode()
    folder = Path(model.name_or_path or "-")
    there = sorted(folder.iterdir()) if folder.is_dir() else []
    read = {one.name: one.read_bytes() for one in there if lies_beside(one.name)}
    return read | found


def saved_by(one: Any) -> dict[str, bytes]:
    """Return the files that ``save_pretrained`` of a tokenizer writes, by name."""
    with tempfile.TemporaryDirectory(prefix="everstep-") as folder:
        one.save_pretrained(folder)
        files = [file for file in sorted(Path(folder).iterdir()) if lies_beside(file.name)]
        return {file.name: file.read_bytes() for file in files}


def adapter_documents(model: nn.Module) -> dict[str, Any]:
    """Return the configuration of a model's ``peft`` adapters for an export; {} without adapters.

    A checkpoint stores it as a small value. Without it no file says how to scale the adapters.
    """
    for module in model.modules():
        configs = getattr(module, "peft_config", None)
        if isinstance(configs, dict) and "default" in configs:
            with tempfile.TemporaryDirectory(prefix="everstep-") as folder:
                configs["default"].save_pretrained(folder)
                document = json.loads(Path(folder, _ADAPTERS).read_text())
            return {"huggingface": {_ADAPTERS: document}}
    return {}


def initial_parameter(model: Any, fqn: str, *, seed: int) -> Tensor:
    """Return the initial value of one whole parameter, float32 on the CPU, by the model's own rule.

    Each parameter has its own random numbers, seeded with the seed and the name, so no rank
    builds the whole model.
    """
    path, _, name = fqn.rpartition(".")
    module = model.get_submodule(path)
    alone = copy.copy(module)
    alone.__dict__ = {**module.__dict__, "_modules": {}, "_buffers": {}}
    alone.__dict__["_parameters"] = {
        key: None if one is None else nn.Parameter(torch.full(one.shape, torch.nan))
        for key, one in module._parameters.items()  # noqa: SLF001
    }
    key = hashlib.sha256(f"{seed}/{fqn}".encode()).digest()
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        # torch takes a signed seed, hence 63 bits.
        torch.manual_seed(int.from_bytes(key[:8], "little") >> 1)
        model._init_weights(alone)  # noqa: SLF001  what transformers itself calls per module
    value: Tensor = getattr(alone, name).detach()
    if value.isnan().any():
        raise TaskError(
            f"model.preset: {type(model).__name__} has no initial value for {fqn}; start from its "
            "weights (a folder with model.safetensors, or run.init_from)",
            fqn=fqn,
        )
    return value
