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
from rlctl.recipes import schema
from rlctl.runtime.model.load import empty_model
from rlctl.runtime.model.lora import engine_name, is_adapter
from rlctl.runtime.model.pipeline_parallel import saved_buffers
from rlctl.runtime.rollout.vllm_engine.versions import HF_HINT

if TYPE_CHECKING:
    from vllm import LLM


def model_runner(llm: LLM) -> Any:
    """Return vLLM's model runner of this rank."""
    return llm.llm_engine.model_executor.driver_worker.model_runner


def converted_model(model: schema.Model) -> PreTrainedModel | None:
    """Return the model without data if its parameters differ from the tensors of its files.

    transformers renames some and merges the experts of a mixture. None if they do not differ.
    """
    built: Any = empty_model(model)
    conversions = get_model_conversion_mapping(built, add_legacy=False)
    if not conversions:
        return None
    built._weight_conversions = conversions
    return built


def as_in_files(
    model: PreTrainedModel | None, weights: Iterable[tuple[str, Tensor]]
) -> Iterator[tuple[str, Tensor]]:
    """Yield `weights` by names and shapes (N, ...) of the model's files, which vLLM's loaders know.

    `model` is that of `converted_model`.
    """
    for name, value in weights:
        if model is None:
            yield name, value
        else:
            yield from revert_weight_conversion(model, {name: value}).items()


def reload(llm: LLM, weights: Iterable[tuple[str, Tensor]]) -> None:
    """Replace weights (N, ...), by names of files. Raises ConfigError if vLLM does not know one."""
    try:
        llm.collective_rpc("reload_weights", kwargs={"weights_iterator": weights})
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
        first, target = 0, targets.get(name)
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
    vLLM's own loader fills the views, because it reorders the weights of some models, as BLOOM's.
    """
    views, parameters = parameter_views(model, policy), _base_parameters(policy)
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
    """Return parameters and buffers (N, ...) by name without adapters, whose own are left out."""
    weights = {**dict(policy.named_parameters()), **saved_buffers(policy)}
    return {engine_name(name): value for name, value in weights.items() if not is_adapter(name)}
