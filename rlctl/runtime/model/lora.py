"""LoRA adapters: W + lora_alpha / lora_rank · B A, W frozen (Hu et al. 2021, arXiv 2106.09685).

rsLoRA divides by √lora_rank instead (Kalajdzievski 2023, arXiv 2312.03732), DoRA also learns the
norm of the rows of W. `peft` injects adapters into the model's layers, so training needs no other
code. Exports receive ordinary weights, base plus adapter, under the names of the model without
adapters; rollout engines receive those or the adapters themselves: see `engine_weights`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from rlctl.errors import ConfigError
from rlctl.files import apply_umask
from rlctl.packages import require
from rlctl.recipes import schema
from rlctl.runtime.model.adapter_names import NAME, adapted_layers, is_adapter
from rlctl.runtime.model.expert_parallel import expert_layers
from rlctl.runtime.model.sharding import full_tensor
from rlctl.runtime.model.tower import towers


def check_peft() -> None:
    """Raise MissingExtraError if `peft` is not installed."""
    require("peft", "LoRA needs peft", "peft", "lora_rank")


def add_adapters(hf: nn.Module, model: schema.Model, seed: int) -> None:
    """Freeze `hf` and inject adapters, in place; no-op if `model.lora_rank` is 0.

    The part of a vision-language model that reads images gets none.
    Initially adapters add nothing: B is zero and A is drawn from `seed`.

    Raises:
        MissingExtraError: peft is not installed.
        ConfigError: target modules are missing from the model, not linear layers, or experts.
    """
    if model.lora_rank == 0:
        return
    check_peft()
    from peft import LoraConfig, inject_adapter_in_model

    names = list(model.target_modules)
    config = cast(Any, hf.config)
    _check_experts(hf, names)
    # Weights that are still in their files may have another dtype than the config.
    dtype = config.dtype
    if not isinstance(dtype, torch.dtype):
        dtype = next(hf.parameters()).dtype
    settings = LoraConfig(
        r=model.lora_rank,
        lora_alpha=model.lora_alpha,
        use_rslora=model.use_rslora,
        use_dora=model.use_dora,
        target_modules=names[0] if names == ["all-linear"] else names,
        exclude_modules=_within(hf, towers(hf)),
        task_type="CAUSAL_LM",
        base_model_name_or_path=model.path,
    )
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            inject_adapter_in_model(settings, hf, adapter_name=NAME)
    except ValueError as error:
        hint = "use all-linear, or names such as [q_proj, v_proj]"
        raise ConfigError(str(error).splitlines()[0], where="target_modules", hint=hint) from error
    linear = {"Linear", "Linear4bit"}  # peft lacks the latter without bitsandbytes
    layers = adapted_layers(hf).items()
    others = {name for name, layer in layers if type(layer).__name__ not in linear}
    if others:
        raise ConfigError(
            f"adapters require linear layers; {sorted(others)[0]} is not linear",
            where="target_modules",
            hint="use all-linear",
        )
    for name, parameter in hf.named_parameters():
        parameter.requires_grad_(is_adapter(name))
        if parameter.requires_grad:
            parameter.data = parameter.data.to(dtype)


def _check_experts(hf: nn.Module, names: list[str]) -> None:
    """Raise ConfigError if adapters of layers `names` would be of experts, which are one tensor."""
    layers = list(expert_layers(hf))
    of_experts = {name for layer in layers for name, _ in layer.named_parameters(recurse=False)}
    # peft replaces the names that experts had as separate layers.
    of_experts |= {"all-linear", "gate_proj", "up_proj", "w1", "w2", "w3"}
    if layers and not of_experts.isdisjoint(names):
        others = (
            name
            for module in hf.modules()
            if hasattr(module, "layer_idx")  # attention, and layers with states
            for name, part in module.named_children()
            if isinstance(part, nn.Linear)
        )
        kind = cast(Any, hf.config).model_type
        raise ConfigError(
            f"the experts of models of type {kind} are one tensor, which gets no adapters",
            where="target_modules",
            hint=f"target_modules=[{','.join(dict.fromkeys(others))}]",
        )


def _within(hf: nn.Module, modules: Sequence[nn.Module]) -> str | None:
    """Return a regular expression for the names of all that `modules` of `hf` contain."""
    names = [re.escape(name) for name, module in hf.named_modules() if module in modules]
    return rf"({'|'.join(names)})\..*" if names else None


def merged(layer: Any, weight: Tensor) -> Tensor:
    """Return a full weight (M, N) with the layer's adapter merged, in its layout.

    LoRA adds the product V = W + s B A. DoRA (Liu et al. 2024, arXiv 2402.09353, eq. 5) also
    scales its rows to the magnitude m that it learns: m V / ||V||.
    """
    b = full_tensor(layer.lora_B[NAME].weight).float()
    a = full_tensor(layer.lora_A[NAME].weight).float()
    delta = layer.scaling[NAME] * (b @ a)
    dtype = layer.lora_B[NAME].weight.dtype  # the frozen weight may be rounded
    weight = weight.to(dtype)
    if NAME not in layer.lora_magnitude_vector:
        return weight + (delta.T if layer.fan_in_fan_out else delta).to(dtype)
    value = (weight.T if layer.fan_in_fan_out else weight).float() + delta
    magnitude = full_tensor(layer.lora_magnitude_vector[NAME].weight).float()
    value *= (magnitude / torch.linalg.norm(value, dim=1))[:, None]
    return (value.T if layer.fan_in_fan_out else value).to(weight.dtype)


def write_adapter(folder: Path, hf: PreTrainedModel, weights: Mapping[str, Tensor]) -> None:
    """Write adapters (R, in), (out, R) for `PeftModel.from_pretrained(base, folder)`."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "adapter_model.safetensors"
    save_file(
        {name: weight.contiguous() for name, weight in weights.items()}, path, {"format": "pt"}
    )
    apply_umask(path)
    config: Any = hf.peft_config  # set by peft, unknown to transformers' types
    config[NAME].save_pretrained(str(folder))
