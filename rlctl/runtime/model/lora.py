"""LoRA adapters: W + lora_alpha / lora_rank · B A, W frozen (Hu et al. 2021, arXiv 2106.09685).

`peft` injects them into the model's layers, so training needs no other code. Rollout engines and
exports receive ordinary weights, base plus adapter, under the names of the model without adapters.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from rlctl.errors import ConfigError, MissingExtraError
from rlctl.recipes import schema
from rlctl.runtime.model.sharding import full_tensor

_NAME = "default"  # peft's name of the only adapter
_BASE, _A, _B = ".base_layer.", f".lora_A.{_NAME}.", f".lora_B.{_NAME}."


def check_peft() -> None:
    """Raise MissingExtraError if `peft` is not installed."""
    if find_spec("peft") is None:
        raise MissingExtraError(
            "LoRA needs peft, which is not installed",
            where="lora_rank",
            hint="pip install 'rlctl[peft]'",
        )


def add_adapters(hf: nn.Module, model: schema.Model, seed: int) -> None:
    """Freeze `hf` and inject adapters, in place; no-op if `model.lora_rank` is 0.

    Initially adapters add nothing: B is zero and A is drawn from `seed`.

    Raises:
        MissingExtraError: peft is not installed.
        ConfigError: target modules are missing from the model or not linear layers.
    """
    if model.lora_rank == 0:
        return
    check_peft()
    from peft import LoraConfig, inject_adapter_in_model
    from peft.tuners.lora import Linear

    names, dtype = list(model.target_modules), next(hf.parameters()).dtype
    config = LoraConfig(
        r=model.lora_rank,
        lora_alpha=model.lora_alpha,
        target_modules=names[0] if names == ["all-linear"] else names,
        task_type="CAUSAL_LM",
        base_model_name_or_path=model.path,
    )
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            inject_adapter_in_model(config, hf, adapter_name=_NAME)
    except ValueError as error:
        hint = "use all-linear, or names such as [q_proj, v_proj]"
        raise ConfigError(str(error).splitlines()[0], where="target_modules", hint=hint) from error
    others = {name for name, layer in _adapted(hf).items() if not isinstance(layer, Linear)}
    if others:
        raise ConfigError(
            f"adapters require linear layers; {sorted(others)[0]} is not linear",
            where="target_modules",
            hint="use all-linear",
        )
    for name, parameter in hf.named_parameters():
        parameter.requires_grad_(_A in name or _B in name)
        if parameter.requires_grad:
            parameter.data = parameter.data.to(dtype)


def has_adapters(module: nn.Module) -> bool:
    """Return True if the module has LoRA adapters."""
    return bool(_adapted(module))


@contextmanager
def without_adapters(module: nn.Module) -> Iterator[None]:
    """Disable adapters within the block, leaving the frozen base model.

    peft's own switch would also change `requires_grad`, which the optimizer relies on.
    """
    layers: list[Any] = list(_adapted(module).values())
    try:
        for layer in layers:
            layer._disable_adapters = True
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False


def merged_parameters(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield full parameters (N, ...) with adapters merged, by name without adapters. Collective."""
    layers = _adapted(module)
    for name, parameter in module.named_parameters():
        if _A in name or _B in name:
            continue
        prefix, base, leaf = name.partition(_BASE)
        value = full_tensor(parameter)
        if base and leaf == "weight":
            value = value + _delta(layers[prefix]).to(value.dtype)
        yield (f"{prefix}.{leaf}" if base else name), value


def _delta(layer: Any) -> Tensor:
    """Return the adapter's change of the weight (out, in), in float32 and the layer's layout."""
    b, a = (
        full_tensor(layer.lora_B[_NAME].weight).float(),
        full_tensor(layer.lora_A[_NAME].weight).float(),
    )
    delta = layer.scaling[_NAME] * (b @ a)
    return delta.T if layer.fan_in_fan_out else delta


def adapter_parameters(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the full adapter matrices, (R, in) and (out, R), by peft's names. Collective."""
    for name, parameter in module.named_parameters():
        if _A in name or _B in name:
            yield f"base_model.model.{name.replace(f'.{_NAME}.', '.')}", full_tensor(parameter)


def write_adapter(folder: Path, hf: PreTrainedModel, weights: Mapping[str, Tensor]) -> None:
    """Write adapters (R, in), (out, R) for `PeftModel.from_pretrained(base, folder)`."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    save_file(
        {name: value.contiguous() for name, value in weights.items()},
        folder / "adapter_model.safetensors",
        {"format": "pt"},
    )
    config: Any = hf.peft_config  # set by peft, unknown to transformers' types
    config[_NAME].save_pretrained(str(folder))


def _adapted(module: nn.Module) -> dict[str, nn.Module]:
    """Return the layers with adapters, by name."""
    return {
        name: layer
        for name, layer in module.named_modules()
        if hasattr(layer, "lora_A") and hasattr(layer, "base_layer")
    }
