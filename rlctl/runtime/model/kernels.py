"""Kernels of attention among packed tokens, and the choice between them.

| kernel | chosen for | by |
|---|---|---|
| `varlen` | a GPU of Ampere or later in half precision, without sinks | torch's flash attention |
| `flex` | a GPU, for windows and sinks that `varlen` does not compute | torch's FlexAttention |
| `dense` | everything else | torch's SDPA; with sinks, the softmax itself |

Axes: T packed tokens, H query heads, K key-value heads, D head size.
"""

from __future__ import annotations

import inspect
import logging
import os
import shutil
import sysconfig
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.attention
import torch.nn.functional as F
from torch import Tensor

LOG = logging.getLogger(__name__)

_FLASH_3 = "flash_attn_interface"  # module of its wheel
Kernel = Literal["varlen", "flex", "dense"]


class Reach(NamedTuple):
    """Scale and limits of a layer's attention beside causality.

    Scores are multiplied by `scale`. A token attends to itself and to the `window` - 1 tokens
    before it. A sink is a logit that takes part in the softmax of its head and has no value
    (Agarwal et al., gpt-oss, 2025). With a soft cap c, a score s is c · tanh(s / c) (Gemma 2,
    arXiv 2408.00118, section 2).
    """

    scale: float
    window: int | None = None  # None: the entire context
    sinks: Tensor | None = None  # (H,)
    softcap: float | None = None

    @property
    def is_plain(self) -> bool:
        """True if kernels for plain attention compute it."""
        return self.sinks is None and self.softcap is None

    def cap(self, scores: Tensor) -> Tensor:
        """Return scaled scores (N, S) within the soft cap."""
        return scores if self.softcap is None else self.softcap * torch.tanh(scores / self.softcap)


def choose_kernel(query: Tensor, reach: Reach) -> Kernel:
    """Return the kernel for `query` (T, H, D)."""
    if reach.is_plain and has_varlen_kernel(query):
        return "varlen"
    limited = reach.window is not None or not reach.is_plain
    return "flex" if query.is_cuda and limited else "dense"


def has_varlen_kernel(query: Tensor) -> bool:
    """Return True if flash attention supports `query` (T, H, D): see torch.nn.attention.varlen.

    It requires bfloat16 or float16, D ≤ 256, and an Ampere or later GPU.
    """
    if (
        not query.is_cuda
        or query.dtype not in (torch.bfloat16, torch.float16)
        or query.shape[-1] > 256
    ):
        return False
    return torch.cuda.get_device_capability(query.device) >= (8, 0)


def missing_for_compiler(device: str) -> str | None:
    """Return what `torch.compile` needs for `device` and this machine lacks, if anything.

    Triton needs the same for its own kernels.
    """
    name, variable = ("C", "CC") if device == "cuda" else ("C++", "CXX")
    names = ("gcc", "clang", "cc") if device == "cuda" else ("g++",)
    given = os.environ.get(variable)
    if not any(shutil.which(each) for each in ([given] if given else names)):
        return f"a {name} compiler, and there is no {given or ' or '.join(names)}"
    if not (Path(sysconfig.get_path("include")) / "Python.h").exists():
        return f"Python.h, which {sysconfig.get_path('include')} does not have"
    if device == "cuda" and find_spec("triton") is None:
        return "triton, which is not installed"
    return None


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
    takes_it = "enable_gqa" in inspect.signature(varlen_attn).parameters
    options: dict[str, Any] = {"enable_gqa": query.shape[1] != key.shape[1]} if takes_it else {}
    size, missing = value.shape[-1], key.shape[-1] - value.shape[-1]
    out = varlen_attn(
        *(query, key, F.pad(value, (0, missing)) if missing else value),
        *(*ends, *longest),
        scale=reach.scale,
        window_size=(
            -1 if reach.window is None else reach.window - 1,
            0,
        ),  # without the token itself
        **options,
    )
    assert isinstance(out, Tensor)  # a pair only if auxiliary outputs are requested
    return out[..., :size]


def attend_dense(
    query: Tensor, key: Tensor, value: Tensor, reach: Reach, visible: Tensor | None
) -> Tensor:
    """Attend in B rows of equal length: (B, H, L, D), (B, K, S, D), (B, K, S, D) -> (B, H, L, D).

    `visible` is a mask (B or 1, 1, L, S) bool, which has the window of `reach`; None is causal
    attention with L = S and without a window.
    """
    if reach.is_plain:
        if query.is_cuda and query.dtype == torch.float32:
            # Its kernels for float32 that need no (L, S) scores want equal numbers of heads.
            key, value = (
                states.repeat_interleave(query.shape[1] // states.shape[1], dim=1)
                for states in (key, value)
            )
        return F.scaled_dot_product_attention(
            *(query, key, value),
            attn_mask=visible,
            is_causal=visible is None,
            scale=reach.scale,
            enable_gqa=query.shape[1] != key.shape[1],
        )
    length, num_keys = query.shape[2], key.shape[2]
    if visible is None:
        visible = causal_mask(length, num_keys, None, query.device)
    grouped = query.unflatten(1, (key.shape[1], -1))  # (B, K, H / K, L, D)
    scores = torch.matmul(grouped * reach.scale, key[:, :, None].transpose(-1, -2)).flatten(1, 2)
    scores = reach.cap(scores).masked_fill(~visible, -torch.inf)
    weights = weights_of(scores, reach.sinks[:, None] if reach.sinks is not None else None)
    weights = weights.to(query.dtype)
    out = torch.matmul(weights.unflatten(1, (key.shape[1], -1)), value[:, :, None])
    return out.flatten(1, 2)


def weights_of(scores: Tensor, sinks: Tensor | None) -> Tensor:
    """Return the weights of scores (N, S) in float32; a sink is a further logit of its row.

    There may be more axes before S; `sinks` (N,) are broadcast to them.
    """
    if sinks is None:
        return torch.softmax(scores, -1, dtype=torch.float32)
    column = sinks.to(scores.dtype).expand(scores.shape[:-1])[..., None]
    return torch.softmax(torch.cat([scores, column], -1), -1, dtype=torch.float32)[..., :-1]


def causal_mask(
    length: int, num_keys: int, window: int | None, device: torch.device | str
) -> Tensor:
    """Return a mask (L, S) bool for `length` L and `num_keys` S; the last query is the last key."""
    before = num_keys - length
    mask = torch.ones(length, num_keys, dtype=torch.bool, device=device).tril(before)
    return mask if window is None else mask.triu(before - window + 1)


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

        prompt, response, position = self.prompt, self.response, self.position
        # A tensor: a number would compile the kernel again for each window.
        limit = torch.full_like(position[:1], 2**31 if window is None else window)

        def visible(batch: Tensor, head: Tensor, q: Tensor, k: Tensor) -> Tensor:
            del batch, head
            same = (prompt[q] == prompt[k]) & ((response[k] < 0) | (response[k] == response[q]))
            return same & (position[q] >= position[k]) & (position[q] - position[k] < limit[0])

        length, device = len(position), position.device
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
