"""Kernels of an update at the shape of Qwen3-0.6B: attention and the head, forward and backward.

One packed row of 16,384 tokens in bfloat16. `packed` and `chunks` are what rlctl uses; the others
are what could be used, where they are installed. Windows and sinks are those of gpt-oss.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.gpu.machine import peak_memory_gib, reset_peak_memory, seconds
from benchmarks.gpu.recorder import Recorder, Settings
from rlctl.runtime.base.ops import log_probs_from_logits
from rlctl.runtime.model.attention import Packing
from rlctl.runtime.model.kernels import Reach

HEADS, KV_HEADS, SIZE = 16, 8, 128
HIDDEN, VOCABULARY = 1024, 151936
TOKENS, TINY_TOKENS = 16384, 128
WINDOW, TINY_WINDOW = 128, 8
HEAD_CHUNK = 2048
Attention = Callable[[Tensor, Tensor, Tensor], Tensor]
Head = Callable[[Tensor, Tensor, Tensor], Tensor]


def measure(settings: Settings, recorder: Recorder) -> None:
    """Measure attention at three lengths of sequences, with windows and sinks, and the head."""
    tokens = TINY_TOKENS if settings.tiny else TOKENS
    for length in (tokens, tokens // 4, tokens // 16):
        for name, attention in _attentions(tokens, length, settings.device, recorder).items():
            with recorder.attempt(f"{name}, sequences of {length} tokens", name != "packed"):
                _measure_attention(name, attention, tokens, length, settings, recorder)
    length = tokens // 4
    for name, attention, window in _limited_attentions(tokens, length, settings):
        optional = not name.startswith("packed")
        with recorder.attempt(f"{name}, sequences of {length} tokens", optional):
            _measure_attention(name, attention, tokens, length, settings, recorder, window)
    for name, head in _heads(recorder).items():
        with recorder.attempt(f"head: {name}", optional=name != "chunks"):
            _measure_head(name, head, tokens, settings, recorder)


def _attentions(tokens: int, length: int, device: str, recorder: Recorder) -> dict[str, Attention]:
    """Return functions (T, H, D), (T, K, D), (T, K, D) -> (T, H, D) by name."""
    packing = Packing.from_lengths(torch.full((tokens // length,), length), device)
    scale = SIZE**-0.5
    found: dict[str, Attention] = {"packed": partial(_packed, packing, Reach(scale))}
    found["sdpa on rectangles"] = partial(_rectangles, packing, Reach(scale))
    if find_spec("flash_attn") is not None and device == "cuda":
        found["flash-attn"] = partial(_flash_attn, packing, scale)
    elif length == tokens:
        recorder.note("flash-attn", "it is not installed" if device == "cuda" else "no GPU")
    return found


def _limited_attentions(
    tokens: int, length: int, settings: Settings
) -> list[tuple[str, Attention, int]]:
    """Return names and functions of attention with a window, with sinks and without, and it."""
    packing = Packing.from_lengths(torch.full((tokens // length,), length), settings.device)
    window = TINY_WINDOW if settings.tiny else WINDOW
    sinks = torch.zeros(HEADS, device=settings.device)
    found: list[tuple[str, Attention, int]] = []
    scale = SIZE**-0.5
    for what, reach in (
        ("window", Reach(scale, window)),
        ("window and sinks", Reach(scale, window, sinks)),
    ):
        for name, attend in (
            ("packed", _packed),
            ("flex", _flex),
            ("dense on rectangles", _rectangles),
        ):
            found.append((f"{name}, {what}", partial(attend, packing, reach), window))
    return found


def _packed(packing: Packing, reach: Reach, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return packing.attend(0, q, k, v, reach)


def _flex(packing: Packing, reach: Reach, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return packing.token_map.attend(q, k, v, reach)


def _rectangles(packing: Packing, reach: Reach, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return packing.attend_rectangles(q, k, v, reach)


def _flash_attn(packing: Packing, scale: float, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    from flash_attn import flash_attn_varlen_func  # pyright: ignore[reportMissingImports]

    ends, longest = packing.boundaries, packing.longest
    return flash_attn_varlen_func(
        q, k, v, ends, ends, longest, longest, softmax_scale=scale, causal=True
    )


def _measure_attention(
    name: str,
    attention: Attention,
    tokens: int,
    length: int,
    settings: Settings,
    recorder: Recorder,
    window: int | None = None,
) -> None:
    options = {"device": settings.device, "dtype": torch.bfloat16}
    query, key, value = (
        torch.randn(tokens, heads, SIZE, **options).requires_grad_()
        for heads in (HEADS, KV_HEADS, KV_HEADS)
    )
    gradient = torch.randn_like(query)
    reset_peak_memory(settings.device)

    def both() -> None:
        attention(query, key, value).backward(gradient)

    took = seconds(settings.device, both)
    reached = min(length, window or length)
    # Two products forward and four backward, of the tokens that one attends to on average.
    flops = 6 * 2 * HEADS * SIZE * tokens * reached * (1 - reached / (2 * length))
    recorder.row(
        "kernels",
        kernel=name,
        tokens=tokens,
        sequence=length,
        ms=1000 * took,
        tflops=flops / took / 1e12,
        peak_gib=peak_memory_gib(settings.device),
    )


def _heads(recorder: Recorder) -> dict[str, Head]:
    """Return functions hidden (T, H), weight (V, H), targets (T,) -> log-probs (T,) by name."""
    found: dict[str, Head] = {"logits of all tokens": _all_logits, "chunks": _chunked}
    if hasattr(F, "linear_cross_entropy"):
        found |= {"torch": partial(_torch, "none"), "torch, mean": partial(_torch, "mean")}
    else:
        recorder.note("head: torch", "this torch has no linear_cross_entropy")
    if find_spec("liger_kernel") is not None:
        found["liger, mean"] = _liger
    else:
        recorder.note("head: liger", "liger-kernel is not installed")
    return found


def _all_logits(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    return log_probs_from_logits(F.linear(hidden, weight), targets)


def _chunked(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    from torch.utils.checkpoint import checkpoint

    pairs = zip(hidden.split(HEAD_CHUNK), targets.split(HEAD_CHUNK), strict=True)
    parts = [checkpoint(_all_logits, h, weight, t, use_reentrant=False) for h, t in pairs]
    return torch.cat(parts)


def _torch(reduction: str, hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """Return log-probs, or with the reduction `mean` their mean as (1,)."""
    options = torch.nn.LinearCrossEntropyOptions()
    loss = F.linear_cross_entropy(hidden, weight, targets, reduction=reduction, options=options)
    return -loss.reshape(-1)


def _liger(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """Return the mean log-prob as (1,): Liger's kernel computes gradients for equal weights."""
    from liger_kernel.transformers import (  # pyright: ignore[reportMissingImports]
        LigerFusedLinearCrossEntropyLoss,
    )

    return -LigerFusedLinearCrossEntropyLoss()(weight, hidden, targets)[None]


def _measure_head(
    name: str, head: Head, tokens: int, settings: Settings, recorder: Recorder
) -> None:
    vocabulary = 1000 if settings.tiny else VOCABULARY
    options = {"device": settings.device, "dtype": torch.bfloat16}
    hidden = torch.randn(tokens, HIDDEN, **options).requires_grad_()
    weight = (torch.randn(vocabulary, HIDDEN, **options) / math.sqrt(HIDDEN)).requires_grad_()
    targets = torch.randint(0, vocabulary, (tokens,), device=settings.device)
    reset_peak_memory(settings.device)

    def both() -> None:
        head(hidden, weight, targets).mean().backward()

    took = seconds(settings.device, both)
    recorder.row(
        "kernels",
        kernel=f"head, {name}",
        tokens=tokens,
        sequence=None,
        ms=1000 * took,
        tflops=6 * tokens * HIDDEN * vocabulary / took / 1e12,
        peak_gib=peak_memory_gib(settings.device),
    )
