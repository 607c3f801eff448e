"""Names of the parameters of a model that may have LoRA adapters, and the weights they stand for.

`lora` injects the adapters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from rlctl.recipes import schema
from rlctl.runtime.model.sharding import full_tensor
from rlctl.runtime.model.stage import of_all_stages

NAME = "default"  # peft's name of the only adapter
FIRST_MATRIX = ".lora_A."
_BASE = ".base_layer."
_MAGNITUDE = ".lora_magnitude_vector"
_ADAPTERS = (FIRST_MATRIX, ".lora_B.", _MAGNITUDE)


def adapt(hf: nn.Module, model: schema.Model, seed: int) -> None:
    """Freeze `hf` and inject the configured adapters, if there are any: see `lora.add_adapters`."""
    if model.lora_rank > 0:
        from rlctl.runtime.model.lora import add_adapters

        add_adapters(hf, model, seed)


def adapted_layers(module: nn.Module) -> dict[str, nn.Module]:
    """Return the layers with adapters, by name."""
    return {
        name: layer
        for name, layer in module.named_modules()
        if hasattr(layer, "lora_A") and hasattr(layer, "base_layer")
    }


def has_adapters(module: nn.Module) -> bool:
    """Return True if the module has LoRA adapters."""
    return bool(adapted_layers(module))


@contextmanager
def without_adapters(module: nn.Module) -> Iterator[None]:
    """Disable adapters within the block, leaving the frozen base model.

    The switch of peft would also change `requires_grad`, which the optimizer relies on.
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
            from rlctl.runtime.model.lora import merged

            value = merged(layers[prefix], value)
        yield plain, value


def is_adapter(name: str) -> bool:
    """Return True for the name of a parameter of an adapter, in the model or in a file."""
    return any(suffix in name for suffix in _ADAPTERS)


def engine_name(name: str) -> str:
    """Return the name of a parameter for other programs.

    For an adapter it is peft's name in a file, for others that in the model without adapters.
    """
    if not is_adapter(name):
        return name.replace(_BASE, ".")
    name = name.replace(f".{NAME}.", ".")
    if _MAGNITUDE in name:
        name = name.removesuffix(".weight")
    return f"base_model.model.{name}"


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

    parameters = (
        (given, full_tensor(parameter, dtype))
        for name, parameter in module.named_parameters()
        if (given := name_of(name)) is not None
    )
    yield from of_all_stages(module, parameters, name_of)
