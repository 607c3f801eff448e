"""Check that decoding with a cache gives what a pass of complete rows gives.

The cache of the engine `hf` relies on properties that no config declares: each layer attends once
per pass, and its states are those of transformers' common cache.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from rlctl.errors import ConfigError
from rlctl.runtime.base.budget import is_oom
from rlctl.runtime.base.ops import log_probs_from_logits
from rlctl.runtime.model.attention import Packing
from rlctl.runtime.model.causal_lm import PolicyModel
from rlctl.runtime.model.kernels import Reach
from rlctl.runtime.model.load import load_model
from rlctl.runtime.model.padded_rows import has_padded_rows
from rlctl.runtime.model.probe import arbitrary_tokens, check_model
from rlctl.runtime.rollout.decoding import Decode, Prefill
from rlctl.runtime.rollout.engine import EngineSpec
from rlctl.runtime.rollout.fused import Passes
from rlctl.runtime.rollout.kv_cache import KVCache

if TYPE_CHECKING:
    from rlctl.runtime.model.mixers import Mixer

_CHECKED = "_rlctl_decodes"  # attribute of a model
_PROMPTS = (3, 5, 3)
_STEPS = 4
# Largest difference of a log-prob that is certainly rounding (two passes that round alike measure
# none).
_TOLERANCE = 1e-3
_NOISE_FACTOR = 10  # of the measured rounding
_ROUNDINGS = 4  # of the dtype's precision


@torch.no_grad()
def check_decoding(passes: Passes) -> None:
    """Decode a few tokens of three rows, once per model.

    Raises ConfigError if their log-probs are wrong.
    """
    if hasattr(passes.model, _CHECKED):
        return
    config = passes.model.config.get_text_config(decoder=True)
    sizes = [length + _STEPS for length in _PROMPTS]
    rows = list(arbitrary_tokens(passes.model, sum(sizes)).split(sizes))
    padding = getattr(config, "pad_token_id", None)
    if padding is not None:  # a token as any other, once it is sampled
        rows[0][-3] = padding
    name = f"models of type {passes.model.config.model_type}"
    expected = _complete(passes, rows)
    alone = torch.cat([_complete(passes, [row]) for row in rows])
    try:
        found = _decoded(passes, rows)
    except Exception as error:
        if isinstance(error, RuntimeError) and is_oom(error):
            raise
        raise ConfigError(f"the engine hf cannot decode {name}: {error}", hint=_HINT) from error
    noise = float((expected - alone).abs().max())
    worst = float((found - expected).abs().max())
    rounding = torch.finfo(passes.model.dtype).eps * float(expected.abs().max())
    tolerance = max(_TOLERANCE, _NOISE_FACTOR * noise, _ROUNDINGS * rounding)
    if expected.isfinite().all() and not worst <= tolerance:
        raise ConfigError(
            f"the engine hf decodes {name} wrongly: a log-prob differs by {worst:.2g} from that "
            "of the complete row",
            hint=_HINT,
        )
    setattr(passes.model, _CHECKED, True)


def load_copy(spec: EngineSpec) -> PreTrainedModel:
    """Load a model for a separate engine, which finds as the trainer whether rows are padded."""
    settings = spec.model.model_copy(update={"load_in_4bit": False})
    model = load_model(settings, "policy", spec.dtype, spec.seed)
    nn.Module.to(model, spec.rank_info.device).requires_grad_(False)
    if not has_padded_rows(model):
        check_model(PolicyModel(model, 1.0), None)
    return model


_HINT = "actor_rollout_ref.rollout.name=vllm"


@dataclass(frozen=True)
class _CompleteRows:
    """Implements `TokenAttention`: packed rows, with the plain layers that the engine runs."""

    packing: Packing

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, reach: Reach) -> Tensor:
        return self.packing.attend(layer, query, key, value, reach)

    def mix(self, hidden: Tensor, mixer: Mixer) -> Tensor:
        return self.packing.mix(hidden, mixer)


def _complete(passes: Passes, rows: list[Tensor]) -> Tensor:
    """Return the log-probs of the last tokens of rows (N,) in one pass: (R, steps)."""
    packing = Packing.from_lengths(torch.tensor([len(row) for row in rows]), rows[0].device)
    logits = passes.logits(torch.cat(rows), packing.position_ids, _CompleteRows(packing))
    parts = logits.split([len(row) for row in rows])
    return torch.stack(
        [
            log_probs_from_logits(part[-_STEPS - 1 : -1], row[-_STEPS:], 1.0).float()
            for part, row in zip(parts, rows, strict=True)
        ]
    )


def _decoded(passes: Passes, rows: list[Tensor]) -> Tensor:
    """Return the same log-probs from a prefill and steps, of which one leaves out a row.

    The first prompt has two responses, the same; the second one ends before the last step.
    """
    cache = KVCache()
    device = rows[0].device
    lengths = torch.tensor(_PROMPTS)
    whose = torch.tensor([0, 0, 1, 2])
    cache.join(lengths, whose.bincount(), _STEPS)
    packing = Packing.from_lengths(lengths, device)
    prompts = torch.cat([row[:-_STEPS] for row in rows])
    keep = (lengths.cumsum(0) - 1).to(device)
    logits = passes.logits(prompts, packing.position_ids, Prefill(cache, packing, 0), keep)
    last = torch.stack([row[-_STEPS:] for row in rows])  # (prompts, steps)
    logits = logits[whose]
    found = torch.empty_like(last, dtype=torch.float32)
    for step in range(_STEPS):
        found[whose, step] = log_probs_from_logits(logits, last[whose, step], 1.0).float()
        if step == _STEPS - 2:
            whose = whose[cache.compact(torch.tensor([True, False, True, True]))[0]]
        if step < _STEPS - 1:
            positions = (lengths[whose] + step).to(device)
            logits = passes.logits(last[whose, step], positions, Decode(cache, cache))
            cache.advance()
    return found
