"""Pipeline parallelism: each rank of a group has some adjacent decoder layers of a model.

A stage passes the hidden states of a micro-batch on to the next one (GPipe, arXiv 1811.06965). Its
modules and parameters keep the names and numbers of the whole model; layers of other stages are
replaced by ones that return their input. The first stage also has the embedding, the last one the
final norm and the heads. Tied weights are on both ends, which sum their gradients.

Axes: T packed tokens, L tokens of the longest micro-batch, H hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedConfig, PreTrainedModel

from rlctl.errors import ConfigError, Problem, raise_problems
from rlctl.runtime.model.causal_lm import PackedModel, run_backbone
from rlctl.runtime.model.mapped import RankStorage
from rlctl.runtime.model.sequences import Sequences
from rlctl.runtime.model.stage import ATTRIBUTE, saved_buffers

Schedule = Literal["1f1b", "gpipe"]

_EMBEDDING = "embed_tokens"
_LAYERS = "layers"
_NORM = "norm"
_PARTS = (_EMBEDDING, _LAYERS, _NORM)  # of a decoder


@dataclass(frozen=True)
class Whole:
    """Parameter of the whole model."""

    shape: torch.Size
    dtype: torch.dtype
    trained: bool
    stage: int  # the first that has it


@dataclass(eq=False)
class Stage:
    """This rank's place among the stages of a pipeline."""

    group: dist.ProcessGroup  # a rank of each stage, in order
    index: int
    size: int
    schedule: Schedule
    dtype: torch.dtype  # of hidden states
    parameters: dict[str, Whole] = field(default_factory=dict)  # of all stages, in order
    buffers: dict[str, Tensor] = field(default_factory=dict)  # of all stages: `saved_buffers`
    tied: str | None = None  # parameter of the first and the last stage
    length: int = 0  # L
    received: Tensor | None = None  # (1, L, H): output of the previous stage

    @property
    def is_first(self) -> bool:
        """True for the stage with the embedding."""
        return self.index == 0

    @property
    def is_last(self) -> bool:
        """True for the stage that computes the loss."""
        return self.index == self.size - 1

    def repeats(self, name: str) -> bool:
        """Return True if the first stage has this parameter of this stage, too."""
        return name == self.tied and not self.is_first

    def norm(self, local: Tensor) -> Tensor:
        """Return the 2-norm of all stages from that of each, scalars. Collective."""
        squares = local.double().square()
        dist.all_reduce(squares, group=self.group)
        return squares.sqrt().to(local.dtype)

    def sum_tied_gradients(self, module: nn.Module) -> None:
        """Add up the gradients of tied weights on both ends, in place. Collective."""
        if self.tied is None or not (self.is_first or self.is_last):
            return
        gradient = module.get_parameter(self.tied).grad
        if gradient is None:  # frozen
            return
        local = gradient.to_local() if isinstance(gradient, DTensor) else gradient
        other = torch.empty_like(local)
        peer = dist.get_global_rank(self.group, self.size - 1 - self.index)
        transfers = [
            dist.P2POp(dist.isend, local, peer, self.group),
            dist.P2POp(dist.irecv, other, peer, self.group),
        ]
        for transfer in dist.batch_isend_irecv(transfers):
            transfer.wait()
        local += other

    def from_last(self, value: Any) -> Any:
        """Return the last stage's `value` on all stages. Collective."""
        box = [value]
        source = dist.get_global_rank(self.group, self.size - 1)
        dist.broadcast_object_list(box, source, self.group)
        return box[0]

    def feed(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Give the decoder the received hidden states in place of embedded tokens (1, T)."""
        del module
        ids = kwargs.pop("input_ids")
        if self.received is not None:
            kwargs["inputs_embeds"] = self.received[:, : ids.shape[1]]
        return args, kwargs

    def hidden_states(self, model: PackedModel, sequences: Sequences, **_: Any) -> Tensor:
        """Return what the next stage receives: (1, L, H)."""
        if model.sequence_group is not None:
            sequences = model.sequence_group.slice(sequences).sequences
        hidden = run_backbone(model.hf.get_decoder(), sequences).last_hidden_state
        assert hidden is not None, "every model without head returns them"
        return F.pad(hidden, (0, 0, 0, self.length - hidden.shape[1]))


class _Elsewhere(nn.Module):
    """Module of another stage: returns its input."""

    def forward(self, hidden: Tensor, *_args: Any, **_kwargs: Any) -> Tensor:
        """Return hidden states (1, T, H) as they are."""
        return hidden


def unsplittable(config: PreTrainedConfig, size: int) -> list[Problem]:
    """Return why a model with this config cannot be split into `size` stages."""
    text = config.get_text_config()
    plan = tuple(getattr(text, "base_model_pp_plan", None) or {})
    if plan != _PARTS or getattr(text, "num_kv_shared_layers", 0):
        return [
            Problem(
                f"a model of type {config.model_type} is not supported with "
                f"pipeline_model_parallel_size={size}: its decoder is no chain of "
                + ", ".join(_PARTS),
                hint="use tensor_model_parallel_size, or a model such as Llama or Qwen",
            )
        ]
    if text.num_hidden_layers < size:
        return [
            Problem(
                f"pipeline_model_parallel_size={size} is more than the model's "
                f"{text.num_hidden_layers} layers",
                hint=f"use at most {text.num_hidden_layers}",
            )
        ]
    return []


def split_layers(model: PackedModel, stage: Stage, storage: RankStorage) -> None:
    """Drop the layers of other stages from `model`, whose weights move into `storage`, in place.

    Raises ConfigError for a model that cannot be split.
    """
    hf = model.hf
    raise_problems(unsplittable(hf.config, stage.size))
    parts = list(_parts(model, stage.size))
    owners: dict[nn.Parameter, int] = {}
    for holder, name, stages in parts:
        for parameter in holder.get_submodule(name).parameters():
            owners.setdefault(parameter, stages[0])
    names = {parameter: name for name, parameter in hf.named_parameters()}
    stage.buffers = saved_buffers(hf)
    if any(parameter not in owners for parameter in names):
        raise ConfigError(
            f"{type(hf).__name__} has parameters beside those of its layers, so "
            "pipeline_model_parallel_size is not supported",
            hint="use fsdp_size or tensor_model_parallel_size",
        )
    stage.parameters = {
        name: Whole(
            parameter.shape, storage.dtype_of(parameter), parameter.requires_grad, owners[parameter]
        )
        for parameter, name in names.items()
    }
    if _is_tied(hf):
        embedding = hf.get_input_embeddings()
        stage.tied = next(
            name for parameter, name in names.items() if parameter is embedding.weight
        )
    for holder, name, stages in parts:
        if stage.index not in stages:
            setattr(holder, name, _Elsewhere())
    if not stage.is_first:
        hf.get_decoder().register_forward_pre_hook(stage.feed, with_kwargs=True)
    if not stage.is_last:
        model.forward = partial(stage.hidden_states, model)
    for module in (model, hf):
        setattr(module, ATTRIBUTE, stage)


def _parts(model: PackedModel, size: int) -> Iterator[tuple[nn.Module, str, list[int]]]:
    """Yield the modules that some stages have: the module with each, its name, and the stages."""
    hf = model.hf
    last = size - 1
    decoder = hf.get_decoder()
    with_embedding = [0]
    if _is_tied(hf):
        with_embedding.append(last)
    yield decoder, _EMBEDDING, with_embedding
    layers = decoder.get_submodule(_LAYERS)
    numbers = torch.arange(len(list(layers.children())))
    for stage, part in enumerate(numbers.tensor_split(size)):
        yield from ((layers, str(number), [stage]) for number in part.tolist())
    yield decoder, _NORM, [last]
    for holder in (model, hf):
        for name, head in holder.named_children():
            if holder is not decoder and decoder not in head.modules():
                yield holder, name, [last]


def _is_tied(hf: PreTrainedModel) -> bool:
    embedding = hf.get_input_embeddings()
    head = hf.get_output_embeddings()
    return head is not None and head.weight is embedding.weight


def all_stages(
    module: nn.Module,
    stage: Stage,
    parameters: Iterator[tuple[str, Tensor]],
    name_of: Callable[[str], str | None],
) -> Iterator[tuple[str, Tensor]]:
    """Yield the parameters (N, ...) of `of_all_stages`. Collective."""
    device = next(module.parameters()).device
    for name, whole in stage.parameters.items():
        if (given := name_of(name)) is None:
            continue
        if whole.stage == stage.index or (stage.is_last and stage.repeats(name)):
            found, value = next(parameters)
            assert found == given, f"{found} in place of {given}"
        else:
            value = torch.empty(whole.shape, dtype=whole.dtype, device=device)
        value = value.contiguous()
        dist.broadcast(value, dist.get_global_rank(stage.group, whole.stage), stage.group)
        yield given, value
