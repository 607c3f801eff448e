"""Check before training that packed rows give what transformers computes for each row alone.

Packing relies on properties that no config declares: attention through transformers' interface and
no other state shared by tokens. A model without them would train on wrong log-probs.
"""

from __future__ import annotations

import copy
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from rlctl.errors import ConfigError
from rlctl.runtime.batch import Ragged
from rlctl.runtime.budget import is_oom
from rlctl.runtime.model.attention import use_rlctl_attention
from rlctl.runtime.model.causal_lm import PolicyModel, ValueModel, predicting, run_backbone
from rlctl.runtime.model.mapped import RankStorage
from rlctl.runtime.model.padded_rows import (
    has_padded_rows,
    use_own_attention,
    use_padded_rows,
    warn_of_padding,
)
from rlctl.runtime.model.reward_model import RewardModel
from rlctl.runtime.model.sequences import Sequences
from rlctl.runtime.model.sharding import decoder_layers
from rlctl.runtime.ops import log_probs_from_logits

M = TypeVar("M", PolicyModel, ValueModel, RewardModel)

_LENGTHS = (7, 36, 4)
_TOLERANCE, _TOLERANCE_HALF = 1e-4, 1e-2  # float32; bfloat16 and float16
# Rounding errors grow with the size of the model. Two of transformers' own attention kernels show
# them; a difference of more than this multiple is no rounding.
_NOISE_FACTOR = 10


def first_layers(model: M, storage: RankStorage) -> M:
    """Return a copy of a complete model with its first decoder layers, as passes compute them.

    It has two layers or more, so that there is one of each kind. Weights that need no conversion
    are shared. A model without a list of layers is returned whole.
    """
    layers = decoder_layers(model.hf)
    lists = (
        (name, module)
        for name, module in model.hf.named_modules()
        if layers[:1] == list(module.children())[:1]
    )
    path, whole = next(lists, ("", None))
    holder, _, name = path.rpartition(".")
    parent = model.hf.get_submodule(holder)
    if isinstance(whole, nn.ModuleList):
        setattr(parent, name, whole[: _number_of_kinds(model.hf, whole)])
    try:
        memo: dict[int, Any] = {
            id(each): nn.Parameter(each.detach().to(storage.device, storage.compute), False)
            for each in model.parameters()
        }
        return copy.deepcopy(
            model, memo | {id(each): each.to(storage.device) for each in model.buffers()}
        )
    finally:
        if isinstance(whole, nn.ModuleList):
            setattr(parent, name, whole)


def _number_of_kinds(hf: PreTrainedModel, layers: nn.ModuleList) -> int:
    """Return how many of the first layers have one of each kind: two or more."""
    config = hf.config.get_text_config(decoder=True)
    types = getattr(config, "layer_types", None) or [""] * len(layers)
    kinds = [
        (kind, *(type(module).__name__ for module in layer.modules()))
        for kind, layer in zip(types, layers, strict=False)
    ]
    return max([2, *(kinds.index(kind) + 1 for kind in kinds)])


def check_model(model: M, storage: RankStorage | None) -> None:
    """Run `check_packing` on the first layers of `model`; on all, where they are, with None.

    A model that packed rows change computes padded rows from then on, if these are right.
    """
    try:
        check_packing(model if storage is None else first_layers(model, storage))
    except ConfigError as error:
        if has_padded_rows(model.hf):
            raise
        use_padded_rows(model.hf)
        check_packing(model if storage is None else first_layers(model, storage))
        warn_of_padding(model.hf, f"packed rows change it ({error.problems[0].message})")


@torch.no_grad()
def check_packing(model: PolicyModel | ValueModel | RewardModel) -> None:
    """Compare a complete, unsharded model on three packed rows with plain passes of each row.

    Compares log-probs, or hidden states for a value or reward model. Deterministic, draws no random
    numbers, and leaves the model in evaluation mode.

    Raises:
        ConfigError: the results differ by more than 1e-4 (1e-2 in half precision) and more than
            rounding explains, or the model cannot run on packed rows.
    """
    model.eval()
    rows = _rows(model.hf)
    name = f"{model.hf.config.model_type} ({model.hf.name_or_path})"
    try:
        packed = _packed(model, rows)
        plain = _row_by_row(model, rows, "eager")
        same = _row_by_row(model, rows, "sdpa" if model.hf._supports_sdpa else None)
    except ConfigError:
        raise
    except Exception as error:
        if isinstance(error, RuntimeError) and is_oom(error):
            raise
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ConfigError(
            f"models of type {name} cannot run on packed rows: {reason}", hint=_HINT
        ) from error
    scale = 1.0 if isinstance(model, PolicyModel) else plain.abs().max().clamp_min(1.0)
    difference = (packed - plain).abs() / scale
    noise = float(((same - plain).abs() / scale).max())
    exact = model.hf.dtype in (torch.float32, torch.float64)
    tolerance = max(_TOLERANCE if exact else _TOLERANCE_HALF, _NOISE_FACTOR * noise)
    # Weights that are not finite have their own error, in the first step.
    if plain.isfinite().all() and not float(difference.max()) <= tolerance:
        worst = int(difference.argmax())
        found, expected = float(packed.flatten()[worst]), float(plain.flatten()[worst])
        what = "log-prob" if isinstance(model, PolicyModel) else "hidden state"
        raise ConfigError(
            f"models of type {name} are computed wrongly on packed rows: a {what} is {found:.6g} "
            f"instead of {expected:.6g} (difference {float(difference.max()):.2g}, "
            f"limit {tolerance:.2g})",
            hint=_HINT,
        )


_HINT = (
    "use a model whose tokens depend on the preceding ones only, such as Llama, Qwen3.5 or Gemma"
)


def _rows(hf: PreTrainedModel) -> list[Tensor]:
    """Return three rows (N,) of arbitrary tokens, which fit into the context of the model."""
    config = hf.config.get_text_config(decoder=True)
    context = getattr(config, "max_position_embeddings", None) or 0  # -1: any length
    lengths = [max(2, min(length, context)) if context > 0 else length for length in _LENGTHS]
    ids = (torch.arange(sum(lengths), device=hf.device) * 7919 + 11) % config.vocab_size
    return list(ids.split(lengths))


def _packed(model: PolicyModel | ValueModel | RewardModel, rows: list[Tensor]) -> Tensor:
    """Return what rlctl computes: log-probs (T,), or hidden states (T, H), float32.

    T counts all tokens that predict a next one.
    """
    prompts = Ragged.from_rows([row[:1] for row in rows])
    sequences = Sequences.from_ragged(prompts, Ragged.from_rows([row[1:] for row in rows]))
    if isinstance(model, PolicyModel):
        return model(sequences, with_entropy=False).log_probs.float()
    return predicting(run_backbone(model.hf.base_model, sequences), sequences).float()


def _row_by_row(
    model: PolicyModel | ValueModel | RewardModel, rows: list[Tensor], attention: str | None
) -> Tensor:
    """Return what transformers computes for each row alone, with its `attention`: see `_packed`."""
    use_own_attention(model.hf, attention)
    try:
        part = model.hf if isinstance(model, PolicyModel) else model.hf.base_model
        # Copies of a row are rounded otherwise, also where the attention cannot be chosen.
        copies = 1 if attention == "eager" else 2
        outputs = [part(input_ids=row.expand(copies, -1), use_cache=False) for row in rows]
    finally:
        use_rlctl_attention(model.hf)
    if not isinstance(model, PolicyModel):
        return torch.cat([output.last_hidden_state[0, :-1].float() for output in outputs])
    parts = [
        log_probs_from_logits(output.logits[0, :-1], row[1:], model.temperature).float()
        for output, row in zip(outputs, rows, strict=True)
    ]
    return torch.cat(parts)
