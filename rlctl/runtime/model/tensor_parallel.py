"""Tensor parallelism: each rank of a group has some heads, channels and tokens of the vocabulary.

Linear layers are split as the model's class in transformers says (`base_model_tp_plan`), by torch's
`parallelize_module`, and their adapters with them. Each rank has some whole experts of a mixture:
see `expert_parallel`. All other parameters are whole on each rank, and get the same gradient there.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Iterator
from typing import Any, cast

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)
from transformers import PreTrainedConfig

from rlctl.errors import ConfigError, Problem, raise_problems
from rlctl.runtime.base.ops import divisors
from rlctl.runtime.model.causal_lm import PackedModel, PolicyModel
from rlctl.runtime.model.vocabulary import Vocabulary

# Styles of linear layers in transformers' plan: the layout of outputs, or of inputs.
_COLWISE = {"colwise": Shard(-1), "colwise_gather_output": Replicate()}
_ROWWISE = {"rowwise": Shard(-1), "rowwise_split_input": Replicate()}
_PER_HEAD = "replicated_with_grad_allreduce"
_EXPERTS = "moe_tp_experts"
_STYLES = {*_COLWISE, *_ROWWISE, _PER_HEAD, _EXPERTS, "embedding_rowwise"}
# Sizes that the group divides, by the name in config.json.
_SIZES = {
    "num_attention_heads": "attention heads",
    "num_key_value_heads": "KV heads",
    "intermediate_size": "channels of the feed-forward layers",
    "num_experts": "experts",
    "vocab_size": "tokens of the vocabulary",
}
# A layer with adapters, by peft's names: the layer, and which of its parts.
_ADAPTED = re.compile(r"(.+)\.(base_layer|lora_A|lora_B)(?:\.\w+)?")


class _Replicated(ParallelStyle):
    """Style of a module whose parameters are whole on each rank.

    With `per_head`, the ranks have different heads of its input, which it processes alike.
    """

    def __init__(self, per_head: bool = False) -> None:
        super().__init__()
        self.placement = Shard(0) if per_head else Replicate()

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def distributed(_: nn.Module, inputs: tuple[Tensor, ...], mesh: DeviceMesh) -> Any:
            first, *rest = inputs
            return DTensor.from_local(first, mesh, [self.placement], run_check=False), *rest

        def local(_: nn.Module, output: Any, mesh: DeviceMesh) -> Any:
            del mesh
            if isinstance(output, DTensor):
                return output.to_local()
            return tuple(part.to_local() for part in output)  # of a router

        return distribute_module(
            module, device_mesh, input_fn=cast(Any, distributed), output_fn=cast(Any, local)
        )


def split_model(model: PackedModel, mesh: DeviceMesh) -> None:
    """Split the parameters of `model` over the ranks of a mesh of one dimension, in place.

    Those of experts are left to `shard_experts`. Raises ConfigError for a model that cannot be
    split. Collective.
    """
    hf = model.hf
    is_policy = isinstance(model, PolicyModel)
    raise_problems(unsplittable(hf.config, mesh.size(), is_policy))
    embedding = hf.get_input_embeddings()
    head = hf.get_output_embeddings()
    tied = head is not None and head.weight is embedding.weight
    # It warns of sums over two dimensions of a mesh, one after the other: the gradient norm.
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    parallelize_module(model, mesh, dict(_styles(model, mesh.size())))
    if isinstance(model, PolicyModel):
        if tied and head is not None:
            head.weight = embedding.weight
        model.vocabulary = Vocabulary(mesh.get_group())


def unsplittable(config: PreTrainedConfig, size: int, has_logits: bool) -> list[Problem]:
    """Return why `size` ranks cannot share the layers of a model with this config.

    With `has_logits` they share the vocabulary, too.
    """
    text = config.get_text_config()
    plan = _plan(text)
    unknown = sorted(set(plan.values()) - _STYLES)
    if not plan or unknown:
        why = "does not say how to split layers"
        if plan:
            why = f"splits layers by {', '.join(unknown)}"
        return [
            Problem(
                f"a model of type {config.model_type} {why}: "
                f"tensor_model_parallel_size={size} is not supported",
                hint="use ulysses_sequence_parallel_size, or a dense model such as Llama or Qwen",
            )
        ]
    sizes = {name: what for name, what in _SIZES.items() if has_logits or name != "vocab_size"}
    found = {what: getattr(text, name, None) for name, what in sizes.items()}
    return [
        Problem(
            f"tensor_model_parallel_size={size} does not divide the model's {number} {what}",
            hint=f"sizes that do: {', '.join(map(str, divisors(number, below=size)))}",
        )
        for what, number in found.items()
        if number and number % size
    ]


def unsplittable_adapters(config: PreTrainedConfig, targets: Iterable[str]) -> list[str]:
    """Return the `targets` of adapters whose layers are not split as the plan says."""
    split = {name.rpartition(".")[2] for name in _plan(config.get_text_config())}
    return [target for target in targets if target != "all-linear" and target not in split]


def _plan(config: PreTrainedConfig) -> dict[str, str]:
    """Return the styles of layers, by patterns of their names in the decoder.

    Experts are divided, not split: the styles of their weights are left out.
    """
    plan: dict[str, str] = dict(getattr(config, "base_model_tp_plan", None) or {})
    experts = tuple(f"{name}." for name, style in plan.items() if style == _EXPERTS)
    return {name: style for name, style in plan.items() if not name.startswith(experts)}


def _styles(model: PackedModel, size: int) -> Iterator[tuple[str, ParallelStyle]]:
    """Yield the name and style of each module of `model` that has parameters itself."""
    hf = model.hf
    plan = {
        re.compile(re.escape(name).replace(r"\*", r"\d+")): style
        for name, style in _plan(hf.config.get_text_config()).items()
    }
    prefix = next(name for name, module in model.named_modules() if module is hf.get_decoder())
    embedding = hf.get_input_embeddings()
    head = hf.get_output_embeddings()
    for name, module in model.named_modules():
        adapted = _ADAPTED.fullmatch(name)
        layer, part = adapted.groups() if adapted else (name, "base_layer")
        inner = layer.removeprefix(f"{prefix}.")
        style = next((style for pattern, style in plan.items() if pattern.fullmatch(inner)), "")
        if not list(module.parameters(recurse=False)) or style == _EXPERTS:
            continue
        divisible = isinstance(module, nn.Embedding) and module.num_embeddings % size == 0
        if module is embedding and divisible:
            yield name, RowwiseParallel(input_layouts=Replicate(), output_layouts=Replicate())
        elif module is head and isinstance(model, PolicyModel):
            yield name, ColwiseParallel(output_layouts=Shard(-1))
        elif style in _COLWISE and part != "lora_A":
            yield name, ColwiseParallel(output_layouts=_COLWISE[style])
        elif style in _ROWWISE and part != "lora_B":
            yield name, RowwiseParallel(input_layouts=_ROWWISE[style])
        elif list(module.children()):
            raise ConfigError(
                f"{type(module).__name__} has parameters beside those of its layers, so "
                "tensor_model_parallel_size is not supported",
                hint="use ulysses_sequence_parallel_size",
            )
        else:
            yield name, _Replicated(per_head=style == _PER_HEAD)
