"""Parameters of the policy in vLLM's model: shared in one process, or by the names of files."""

# pyright: reportMissingImports=false, reportMissingModuleSource=false
# (an extra: types are checked where it is installed)
from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import revert_weight_conversion

from rlctl.errors import ConfigError
from rlctl.runtime.model.adapter_names import engine_name, is_adapter
from rlctl.runtime.model.stage import saved_buffers
from rlctl.runtime.rollout.vllm_engine.versions import HF_HINT

if TYPE_CHECKING:
    from vllm import LLM

# Operations by which transformers stacks the experts of files: gate above up, and down.
_STACKED = {
    "gate_up_proj": [("MergeModulelist", 0), ("Concatenate", 1)],
    "down_proj": [("MergeModulelist", 0)],
}


def worker_of(llm: LLM) -> Any:
    """Return vLLM's worker of this rank."""
    return llm.llm_engine.model_executor.driver_worker


def model_runner(llm: LLM) -> Any:
    """Return vLLM's model runner of this rank."""
    return worker_of(llm).model_runner


def converted_model(empty: Any) -> PreTrainedModel | None:
    """Return the `empty` model if its parameters differ from the tensors of its files.

    transformers renames some and merges the experts of a mixture. None if they do not differ.
    """
    conversions = get_model_conversion_mapping(empty, add_legacy=False)
    if not conversions:
        return None
    empty._weight_conversions = conversions
    return empty


def as_in_files(
    model: PreTrainedModel | None, stacks: ExpertStacks, weights: Iterable[tuple[str, Tensor]]
) -> Iterator[tuple[str, Tensor]]:
    """Yield `weights` by names and shapes (N, ...) of the model's files, which vLLM's loaders know.

    `model` is that of `converted_model`. What `stacks` can load is loaded at once.
    """
    for name, value in weights:
        if model is None:
            yield name, value
        elif not stacks.load(name, value):
            yield from revert_weight_conversion(model, {name: value}).items()


class ExpertStacks:
    """Layers of vLLM that load all their experts in three calls.

    By names of files, vLLM's loaders take one matrix of one expert at a time: 18,432 for 48 layers
    of 128 experts. Quantized experts, and those of which this process has a part, are left to them.
    """

    def __init__(self, engine: Any, model: PreTrainedModel | None) -> None:
        """Find the layers of vLLM's model, and the parameters of `model` that are stacks."""
        from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
        from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import (
            UnquantizedFusedMoEMethod,
        )

        conversions = getattr(model, "_weight_conversions", ())
        self.names = {
            target
            for conversion in conversions
            for target in conversion.target_patterns
            if _operations(conversion) == _STACKED.get(target.rpartition(".")[2])
        }
        self.layers: dict[str, Any] = {
            _layer_number(module.layer_name): module
            for module in engine.modules()
            if isinstance(module, RoutedExperts)
            and isinstance(module.quant_method, UnquantizedFusedMoEMethod)
            and module.moe_config.is_act_and_mul
        }

    def load(self, name: str, value: Tensor) -> bool:
        """Load the experts (E, N, K) of a layer within a reload; return False for other weights."""
        experts = self.layers.get(_layer_number(name))
        if experts is None or not name.endswith(tuple(self.names)):
            return False
        gate_up = name.endswith("gate_up_proj")
        kind = "w13_weight" if gate_up else "w2_weight"
        parameter = getattr(experts, kind)
        if len(parameter) != len(value):
            return False
        parts = [("w2", value)]
        if gate_up:
            parts = list(zip(("w1", "w3"), value.chunk(2, dim=1), strict=True))
        for shard, part in parts:
            parameter.weight_loader(parameter, part, kind, shard_id=shard, expert_id=0)
        return True


def _layer_number(name: str) -> str:
    return name.rpartition("layers.")[2].partition(".")[0]


def _operations(conversion: Any) -> list[tuple[str, int]]:
    operations = getattr(conversion, "operations", ())
    return [(type(operation).__name__, getattr(operation, "dim", -1)) for operation in operations]


def reload(worker: Any, weights: Iterable[tuple[str, Tensor]]) -> None:
    """Replace weights (N, ...), by names of files. Raises ConfigError if vLLM does not know one."""
    try:
        worker.reload_weights(weights_iterator=weights)
    except (AssertionError, AttributeError, LookupError, ValueError) as error:
        raise ConfigError(
            f"vLLM cannot load the weights of this model: {error}",
            where="actor_rollout_ref.rollout.name",
            hint=HF_HINT,
        ) from error


def parameter_views(model: nn.Module, policy: nn.Module) -> dict[str, Tensor] | None:
    """Map the name of each parameter (N, ...) of `policy` to a view in vLLM's `model`.

    vLLM stacks query, key and value, and gate and up, into one matrix each
    (`packed_modules_mapping`), and pads the vocabulary. Returns None if a parameter has no
    counterpart, because the layout differs or vLLM holds only a part of the model.
    """
    targets = {engine_name(name): value for name, value in model.named_parameters()}
    targets |= dict(model.named_buffers())
    sources = _base_parameters(policy)
    packed = {
        part: (name, parts)
        for name, parts in getattr(model, "packed_modules_mapping", {}).items()
        for part in parts
    }
    views: dict[str, Tensor] = {}
    for name, value in sources.items():
        part = next((word for word in name.split(".") if word in packed), None)
        first = 0
        target = targets.get(name)
        if part is not None:
            stacked, parts = packed[part]
            target = targets.get(name.replace(f".{part}.", f".{stacked}."))
            preceding = [
                sources.get(name.replace(f".{part}.", f".{other}."))
                for other in parts[: parts.index(part)]
            ]
            first = sum(len(tensor) for tensor in preceding if tensor is not None)
        if (
            target is None
            or not value.ndim
            or target.shape[1:] != value.shape[1:]
            or first + len(value) > len(target)
        ):
            return None
        views[name] = target.data[first : first + len(value)]
    return views


def share_parameters(model: nn.Module, policy: nn.Module) -> dict[str, Tensor] | None:
    """Replace the parameters of `policy` by views of vLLM's, so that no weight sync is needed.

    Returns views (N, ...) by name, or None if the layouts or dtypes differ: see `parameter_views`.
    vLLM's loader fills the views, because it reorders the weights of some models, as BLOOM's.
    """
    views = parameter_views(model, policy)
    parameters = _base_parameters(policy)
    if views is None or any(
        views[name].dtype != parameter.dtype for name, parameter in parameters.items()
    ):
        return None
    cast(Any, model).load_weights(iter(parameters.items()))
    if any(not torch.equal(views[name], parameter) for name, parameter in parameters.items()):
        return None
    for name, parameter in parameters.items():
        parameter.data = views[name]
    return views


def _base_parameters(policy: nn.Module) -> dict[str, Tensor]:
    """Return parameters and buffers (N, ...) by name without those of adapters."""
    weights = {**dict(policy.named_parameters()), **saved_buffers(policy)}
    return {engine_name(name): value for name, value in weights.items() if not is_adapter(name)}
