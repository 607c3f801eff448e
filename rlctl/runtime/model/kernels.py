"""Kernels of attention among packed tokens, and the choice between them.

| kernel | chosen for | by |
|---|---|---|
| `varlen` | a GPU of Ampere or later in half precision, without sinks | torch's flash attention |
| `flex` | a GPU, for windows and sinks that `varlen` does not compute | torch's FlexAttention |
| `dense` | everything else | torch's SDPA; with sinks, the softmax itself |

`gpu_kernels` has the first two.
Axes: T packed tokens, H query heads, K key-value heads, D head size.
"""

from __future__ import annotations

import os
import shutil
import sysconfig
from importlib.util import find_spec
from pathlib import Path
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

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

    Triton needs the same for its kernels.
    """
    name = "C++"
    variable = "CXX"
    compilers = ["g++"]
    if device == "cuda":
        name = "C"
        variable = "CC"
        compilers = ["gcc", "clang", "cc"]
    if given := os.environ.get(variable):
        compilers = [given]
    if not any(shutil.which(compiler) for compiler in compilers):
        return f"a {name} compiler, and there is no {' or '.join(compilers)}"
    if not (Path(sysconfig.get_path("include")) / "Python.h").exists():
        return f"Python.h, which {sysconfig.get_path('include')} does not have"
    if device == "cuda" and find_spec("triton") is None:
        return "triton, which is not installed"
    return None


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
    length = query.shape[2]
    num_keys = key.shape[2]
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
