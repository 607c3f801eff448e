"""Kernels of attention for GPUs: flash attention and FlexAttention.

Axes: T packed tokens, H query heads, K key-value heads, D head size.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.attention
import torch.nn.functional as F
from torch import Tensor

from rlctl.runtime.model.kernels import Reach

LOG = logging.getLogger(__name__)

_FLASH_3 = "flash_attn_interface"  # module of its wheel


def use_flash_attention_3() -> bool:
    """Use FlashAttention 3 (arXiv 2407.08608) on Hopper if it is installed; return True if so."""
    if find_spec(_FLASH_3) is None or torch.cuda.get_device_capability()[0] != 9:
        return False
    try:
        torch.nn.attention.activate_flash_attention_impl("FA3")
    except (AttributeError, ImportError, RuntimeError) as error:  # another torch or CUDA
        LOG.warning(f"FlashAttention 2 is used, because {_FLASH_3} does not load: {error}")
        return False
    return True


def attend_varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    reach: Reach,
    ends: tuple[Tensor, Tensor],
    longest: tuple[int, int],
) -> Tensor:
    """Run flash attention: (T, H, D), (N, K, D), (N, K, V) -> (T, H, V), half precision, V ≤ D.

    `ends` are the boundaries (B + 1,) int32 of queries and of keys, `longest` the longest sequence
    of each. The last query of a sequence attends to all its keys that the window permits; sinks
    and soft caps are not supported. The kernel takes values as large as keys, so others are padded.
    """
    from torch.nn.attention.varlen import varlen_attn

    # Before torch 2.13 the same kernel takes fewer heads of keys without being asked to.
    options: dict[str, Any] = {}
    if "enable_gqa" in inspect.signature(varlen_attn).parameters:
        options["enable_gqa"] = query.shape[1] != key.shape[1]
    size = value.shape[-1]
    missing = key.shape[-1] - size
    if missing:
        value = F.pad(value, (0, missing))
    before = -1  # without limit
    if reach.window is not None:
        before = reach.window - 1  # without the token itself
    out = varlen_attn(
        *(query, key, value),
        *(*ends, *longest),
        scale=reach.scale,
        window_size=(before, 0),
        **options,
    )
    assert isinstance(out, Tensor)  # a pair only if auxiliary outputs are requested
    return out[..., :size]


@dataclass(frozen=True, eq=False)
class TokenMap:
    """Sequences of the T tokens of a packed row, for FlexAttention.

    A token attends to earlier ones of its prompt, and of its response if it is in one.
    """

    prompt: Tensor  # (T,) int64: number of the prompt, or of the sequence
    response: Tensor  # (T,) int64: number of the response, -1 for a token of a prompt
    position: Tensor  # (T,) int64: position in the sequence
    _masks: dict[int | None, Any] = field(default_factory=dict)  # BlockMask by window

    def attend(self, query: Tensor, key: Tensor, value: Tensor, reach: Reach) -> Tensor:
        """Run FlexAttention: (T, H, D), (T, K, D), (T, K, D) -> (T, H, D)."""
        from torch.nn.attention.flex_attention import AuxRequest, flex_attention

        if reach.window not in self._masks:
            self._masks[reach.window] = self._block_mask(reach.window)
        device = query.device.type
        out, aux = _compiled(flex_attention, device)(
            *(x.transpose(0, 1)[None] for x in (query, key, value)),
            block_mask=self._masks[reach.window],
            scale=reach.scale,
            score_mod=None if reach.softcap is None else _capped(reach.softcap),
            enable_gqa=query.shape[1] != key.shape[1],
            return_aux=AuxRequest(lse=True),
        )
        if reach.sinks is not None:
            # Σ exp(s) of Σ exp(s) + exp(sink), for log-sum-exps (1, H, T)
            share = torch.sigmoid(aux.lse - reach.sinks.float()[:, None])
            out = out * share[..., None].to(out.dtype)
        return out[0].transpose(0, 1)

    def _block_mask(self, window: int | None) -> Any:
        """Return the mask of a window as blocks of which the empty ones are skipped."""
        from torch.nn.attention.flex_attention import create_block_mask

        prompt = self.prompt
        response = self.response
        position = self.position
        # A tensor: a number would compile the kernel again for each window.
        limit = torch.full_like(position[:1], 2**31 if window is None else window)

        def visible(batch: Tensor, head: Tensor, q: Tensor, k: Tensor) -> Tensor:
            del batch, head
            same = (prompt[q] == prompt[k]) & ((response[k] < 0) | (response[k] == response[q]))
            return same & (position[q] >= position[k]) & (position[q] - position[k] < limit[0])

        length = len(position)
        device = position.device
        build = _compiled(create_block_mask, device.type)
        return build(visible, None, None, length, length, device=device)


@cache
def _capped(softcap: float) -> Callable[..., Tensor]:
    """Return the change of a score () by a soft cap, as FlexAttention calls it."""

    def cap(score: Tensor, *_: Tensor) -> Tensor:
        return softcap * torch.tanh(score / softcap)

    return cap


@cache
def _compiled(function: Callable[..., Any], device: str) -> Callable[..., Any]:
    """Return `function` compiled for a GPU, where FlexAttention is slow without."""
    return torch.compile(function) if device == "cuda" else function
