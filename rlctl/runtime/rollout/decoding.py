"""One decoding step of the engine `hf`: attention of a new token per row over the KV cache.

Axes: G prompts (groups), R rows (responses), H query heads, K key-value heads, D head size,
P tokens of the longest prompt, t own tokens of a row, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from transformers import PreTrainedModel

from rlctl.runtime.model.attention import TokenAttention
from rlctl.runtime.model.kernels import Reach, weights_of
from rlctl.runtime.model.mixers import Mixer
from rlctl.runtime.rollout.kv_cache import KVCache
from rlctl.runtime.rollout.kv_slots import Grid, OwnSlots


class Slots(Protocol):
    """Slots of the cache that the rows of a step read and write."""

    def grid(self, heads: tuple[int, int], like: Tensor) -> Grid:
        """Return the grid for (K, H / K) `heads`, with the device and dtype of `like` (R, H, D)."""
        ...

    def own_slots(self, like: Tensor) -> OwnSlots:
        """Return the slots of own tokens for the new keys `like` (R, K, D)."""
        ...

    def outside(self, window: int, num_prompt: int, num_own: int, like: Tensor) -> Tensor:
        """Return the slots that a window hides from each row's token: (R, P + t) bool.

        `like` (R·H, D) are the queries, `num_prompt` is P and `num_own` is t.
        """
        ...


@dataclass(frozen=True, eq=False)
class Decode:
    """Attention of one new token per row; implements `TokenAttention`."""

    cache: KVCache
    slots: Slots

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, reach: Reach) -> Tensor:
        """Attend one new token per row: (R, H, D), (R, K, D), (R, K, D) -> (R, H, D).

        Scores over prompt and own tokens share one softmax, so this is plain attention over both.
        """
        (num_rows, num_heads, size), num_kv = query.shape, key.shape[1]
        rep = num_heads // num_kv
        held = self.cache.layers[layer]
        grid, own = self.slots.grid((num_kv, rep), query), self.slots.own_slots(key)
        num_prompt, num_groups = grid.bias.shape[2], len(grid.bias) // num_kv
        own.write(held.keys, key)
        own.write(held.values, value)
        own_keys = held.keys[:num_rows, :, : own.width].flatten(0, 1)  # (R·K, t, D), a view
        own_values = held.values[:num_rows, :, : own.width].flatten(0, 1)
        prompt_keys = held.prompt_keys[:num_groups, :, :num_prompt].flatten(0, 1)  # (G·K, P, D)
        prompt_values = held.prompt_values[:num_groups, :, :num_prompt].flatten(0, 1)

        query = (query * reach.scale).reshape(num_rows * num_heads, size)
        in_grid = query.index_select(0, grid.to_grid).view(num_groups * num_kv, -1, size)
        prompt_scores = _scores(reach, in_grid, prompt_keys, grid.bias)
        prompt_scores = prompt_scores.view(-1, num_prompt).index_select(0, grid.to_rows)
        per_kv = query.view(num_rows * num_kv, rep, size)
        own_scores = _scores(reach, per_kv, own_keys, own.bias)
        scores = torch.cat([prompt_scores, own_scores.view(num_rows * num_heads, -1)], 1)
        if reach.window is not None:
            hidden = self.slots.outside(reach.window, num_prompt, own.width, query)
            by_row = scores.view(num_rows, num_heads, -1)
            scores = by_row.masked_fill(hidden[:, None], -torch.inf).view(len(query), -1)
        sinks = reach.sinks.repeat(num_rows) if reach.sinks is not None else None
        weights = weights_of(scores, sinks).to(query.dtype)  # (R·H, P + t)
        in_grid = weights.index_select(0, grid.to_grid)
        in_grid = in_grid.view(num_groups * num_kv, -1, weights.shape[1])
        from_prompt = torch.bmm(in_grid[..., :num_prompt], prompt_values)
        from_prompt = from_prompt.view(-1, prompt_values.shape[2])
        own_weights = weights.reshape(num_rows * num_kv, rep, -1)[..., num_prompt:]
        out = from_prompt.index_select(0, grid.to_rows).view(num_rows * num_kv, rep, -1)
        return out.baddbmm_(own_weights, own_values).view(num_rows, num_heads, -1)

    def mix(self, hidden: Tensor, mixer: Mixer) -> Tensor:
        """Mix one new token per row: (R, C) -> (R, C)."""
        return self.cache.states.step(hidden, mixer)


def _scores(reach: Reach, query: Tensor, key: Tensor, bias: Tensor | None) -> Tensor:
    """Return the scores of scaled queries, within the soft cap: (B, L, D), (B, S, D) -> (B, L, S).

    `bias` (B, 1, S) hides keys.
    """
    if reach.softcap is None and bias is not None:
        return torch.baddbmm(bias, query, key.transpose(1, 2))
    scores = reach.cap(torch.bmm(query, key.transpose(1, 2)))
    return scores if bias is None else scores + bias


def next_logits(
    model: PreTrainedModel,
    tokens: Tensor,
    positions: Tensor,
    attention: TokenAttention,
    keep: Tensor | int = 0,
) -> Tensor:
    """Return the logits (N, V) of the tokens (T,) at indices `keep` (N,); 0 keeps all T."""
    output = model(
        input_ids=tokens[None],
        position_ids=positions[None],
        packing=attention,
        use_cache=False,
        logits_to_keep=keep,
    )
    return output.logits[0]
