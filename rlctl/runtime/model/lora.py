"""LoRA adapters: W + lora_alpha / lora_rank · B A, W frozen (Hu et al. 2021, arXiv 2106.09685).

rsLoRA divides by √lora_rank instead (Kalajdzievski 2023, arXiv 2312.03732), DoRA also learns the
norm of the rows of W. `peft` injects adapters into the model's layers, so training needs no other
code. Exports receive ordinary weights, base plus adapter, under the names of the model without
adapters; rollout engines receive those or the adapters themselves: see `engine_weights`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from rlctl.errors import ConfigError
from rlctl.files import apply_umask
from rlctl.plugins import require
from rlctl.recipes import schema
from rlctl.runtime.model.expert_parallel import expert_layers
from rlctl.runtime.model.pipeline_parallel import of_all_stages
from rlctl.runtime.model.sharding import full_tensor
from rlctl.runtime.model.vision import towers

_NAME = "default"  # peft's name of the only adapter
FIRST_MATRIX = ".lora_A."
_BASE, _MAGNITUDE = ".base_layer.", ".lora_magnitude_vector"
_ADAPTERS = (FIRST_MATRIX, ".lora_B.", _MAGNITUDE)


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

    names, config = list(model.target_modules), cast(Any, hf.config)
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
            inject_adapter_in_model(settings, hf, adapter_name=_NAME)
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
    own = {name for layer in layers for name, _ in layer.named_parameters(recurse=False)}
    # peft replaces the names that experts had as layers of their own.
    own |= {"all-linear", "gate_proj", "up_proj", "w1", "w2", "w3"}
    if layers and not own.isdisjoint(names):
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


def has_adapters(module: nn.Module) -> bool:
    """Return True if the module has LoRA adapters."""
    return bool(adapted_layers(module))


@contextmanager
def without_adapters(module: nn.Module) -> Iterator[None]:
    """Disable adapters within the block, leaving the frozen base model.

    peft's own switch would also change `requires_grad`, which the optimizer relies on.
    """
    layers: list[Any] = list(adapted_layers(module).values())
    try:
        for layer in layers:
            layer._disable_adapters = True
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False


def merged_parameters(
    module: nn.Module, wanted: Callable[[str], bool] = lambda _: True
) -> Iterator[tuple[str, Tensor]]:
    """Yield full parameters (N, ...) with adapters merged, by name without adapters. Collective.

    Those whose name is not `wanted` are left out.
    """

    def plain_name(name: str) -> str | None:
        plain = engine_name(name)
        return None if is_adapter(name) or not wanted(plain) else plain

    yield from of_all_stages(module, _merged_parameters(module, plain_name), plain_name)


def _merged_parameters(
    module: nn.Module, plain_name: Callable[[str], str | None]
) -> Iterator[tuple[str, Tensor]]:
    """Yield those parameters (N, ...) of `merged_parameters` that this rank's layers have."""
    layers = adapted_layers(module)
    for name, parameter in module.named_parameters():
        if (plain := plain_name(name)) is None:
            continue
        prefix, base, leaf = name.partition(_BASE)
        value = full_tensor(parameter)
        if base and leaf == "weight":
            value = _merged(layers[prefix], value)
        yield plain, value


def _merged(layer: Any, weight: Tensor) -> Tensor:
    """Return the full `weight` (out, in) of a layer with its adapter merged, in its layout.

    LoRA adds the product V = W + s B A. DoRA (Liu et al. 2024, arXiv 2402.09353, eq. 5) also
    scales its rows to the magnitude m that it learns: m V / ||V||.
    """
    b, a = (
        full_tensor(layer.lora_B[_NAME].weight).float(),
        full_tensor(layer.lora_A[_NAME].weight).float(),
    )
    delta = layer.scaling[_NAME] * (b @ a)
    dtype = layer.lora_B[_NAME].weight.dtype  # the frozen weight may be rounded
    weight = weight.to(dtype)
    if _NAME not in layer.lora_magnitude_vector:
        return weight + (delta.T if layer.fan_in_fan_out else delta).to(dtype)
    value = (weight.T if layer.fan_in_fan_out else weight).float() + delta
    magnitude = full_tensor(layer.lora_magnitude_vector[_NAME].weight).float()
    value *= (magnitude / torch.linalg.norm(value, dim=1))[:, None]
    return (value.T if layer.fan_in_fan_out else value).to(weight.dtype)


def is_adapter(name: str) -> bool:
    """Return True for the name of a parameter of an adapter, in the model or in a file."""
    return any(suffix in name for suffix in _ADAPTERS)


def engine_name(name: str) -> str:
    """Return the name of a parameter for other programs.

    For an adapter it is peft's name in a file, for others that in the model without adapters.
    """
    if not is_adapter(name):
        return name.replace(_BASE, ".")
    name = name.replace(f".{_NAME}.", ".")
    return f"base_model.model.{name.removesuffix('.weight') if _MAGNITUDE in name else name}"


def adapter_parameters(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the full adapter matrices, (R, in) and (out, R), by peft's names. Collective.

    With DoRA also the magnitudes (out,).
    """
    yield from engine_parameters(module, is_adapter)


def engine_parameters(
    module: nn.Module, wanted: Callable[[str], bool], dtype: torch.dtype | None = None
) -> Iterator[tuple[str, Tensor]]:
    """Yield the full parameters (N, ...) whose name is `wanted`, by `engine_name`. Collective.

    Sharded ones have `dtype`: see `full_tensor`.
    """

    def name_of(name: str) -> str | None:
        return engine_name(name) if wanted(name) else None

    own = (
        (given, full_tensor(parameter, dtype))
        for name, parameter in module.named_parameters()
        if (given := name_of(name)) is not None
    )
    yield from of_all_stages(module, own, name_of)


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
    config[_NAME].save_pretrained(str(folder))


def adapted_layers(module: nn.Module) -> dict[str, nn.Module]:
    """Return the layers with adapters, by name."""
    return {
        name: layer
        for name, layer in module.named_modules()
        if hasattr(layer, "lora_A") and hasattr(layer, "base_layer")
    }
