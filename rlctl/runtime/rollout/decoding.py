"""Passes of the engine `hf`: attention of prompts on their way into the KV cache, and over it.

A decoding step has a new token per row.

Axes: T packed tokens, G prompts (groups), R rows (responses), H query heads, K key-value heads,
D head size, P tokens of the longest prompt, t response tokens of a row, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor
from transformers import PreTrainedModel

from rlctl.errors import InternalError
from rlctl.runtime.base.ops import to_device
from rlctl.runtime.model.attention import Packing, TokenAttention
from rlctl.runtime.model.causal_lm import logits_of, run_padded
from rlctl.runtime.model.kernels import Reach, attend_dense, causal_mask, weights_of
from rlctl.runtime.model.padded_rows import decoder_of, has_padded_rows
from rlctl.runtime.rollout.kv_cache import KVCache
from rlctl.runtime.rollout.kv_slots import Grid, OwnSlots

if TYPE_CHECKING:
    from rlctl.runtime.model.mixers import Mixer
    from rlctl.runtime.model.vision import Vision


class Slots(Protocol):
    """Slots of the cache that the rows of a step read and write."""

    def grid(self, heads: tuple[int, int], like: Tensor) -> Grid:
        """Return the grid for (K, H / K) `heads`, with the device and dtype of `like` (R, H, D)."""
        ...

    def own_slots(self, like: Tensor) -> OwnSlots:
        """Return the slots of response tokens for the new keys `like` (R, K, D)."""
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

        Scores over prompt and response share one softmax, so this is plain attention over both.
        """
        num_rows, num_heads, size = query.shape
        num_kv = key.shape[1]
        rep = num_heads // num_kv
        held = self.cache.layers[layer]
        grid = self.slots.grid((num_kv, rep), query)
        slots = self.slots.own_slots(key)
        num_prompt = grid.bias.shape[2]
        num_groups = len(grid.bias) // num_kv
        slots.write(held.keys, key)
        slots.write(held.values, value)
        own_keys = held.keys[:num_rows, :, : slots.width].flatten(0, 1)  # (R·K, t, D), a view
        own_values = held.values[:num_rows, :, : slots.width].flatten(0, 1)
        prompt_keys = held.prompt_keys[:num_groups, :, :num_prompt].flatten(0, 1)  # (G·K, P, D)
        prompt_values = held.prompt_values[:num_groups, :, :num_prompt].flatten(0, 1)

        query = (query * reach.scale).reshape(num_rows * num_heads, size)
        in_grid = query.index_select(0, grid.to_grid).view(num_groups * num_kv, -1, size)
        prompt_scores = _scores(reach, in_grid, prompt_keys, grid.bias)
        prompt_scores = prompt_scores.view(-1, num_prompt).index_select(0, grid.to_rows)
        per_kv = query.view(num_rows * num_kv, rep, size)
        own_scores = _scores(reach, per_kv, own_keys, slots.bias)
        scores = torch.cat([prompt_scores, own_scores.view(num_rows * num_heads, -1)], 1)
        if reach.window is not None:
            hidden = self.slots.outside(reach.window, num_prompt, slots.width, query)
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
    vision: Vision | None = None,
) -> Tensor:
    """Return the logits (N, V) of the tokens (T,) at indices `keep` (N,); 0 keeps all T.

    `vision` has the images among them and the positions, in place of `positions` (T,).
    """
    if has_padded_rows(model) and vision is None:
        outputs = run_padded(decoder_of(model), tokens, attention)
        assert outputs.last_hidden_state is not None
        hidden = outputs.last_hidden_state[0]
        if isinstance(keep, Tensor):
            hidden, tokens = hidden[keep], tokens[keep]
        return logits_of(model, outputs, hidden, tokens)
    images: Mapping[str, Any] = {}
    position_ids = positions[None]
    if vision is not None:
        from rlctl.runtime.model.image_attention import with_images_ahead

        attention = with_images_ahead(model.config, attention, tokens, positions)
        images = vision.inputs
        position_ids = vision.positions
    output = model(
        input_ids=tokens[None],
        position_ids=position_ids,
        packing=attention,
        use_cache=False,
        logits_to_keep=keep,
        **images,
    )
    return output.logits[0]


@dataclass(eq=False)
class Prefill:
    """Attention within complete prompts, which also stores their keys and values in a cache.

    The packed prompts are the groups `first`, `first` + 1, … of `cache`.
    """

    cache: KVCache
    packing: Packing
    first: int

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, reach: Reach) -> Tensor:
        """Attend T packed prompt tokens: (T, H, D), (T, K, D), (T, K, D) -> (T, H, D)."""
        self.cache.store_prompts(layer, self._group, self.packing.position_ids, key, value)
        return self.packing.attend(layer, query, key, value, reach)

    def mix(self, hidden: Tensor, mixer: Mixer) -> Tensor:
        """Mix T packed prompt tokens and store the states after them: (T, C) -> (T, C).

        Prompts of one length are mixed together: padding would change their states.
        """
        lengths = self.packing.lengths
        starts = lengths.cumsum(0) - lengths
        parts: list[Tensor] = []
        tokens: list[Tensor] = []
        for length in lengths.unique():
            prompts = (lengths == length).nonzero().squeeze(1)
            token = (starts[prompts, None] + torch.arange(length)).to(hidden.device)
            states = mixer.new_states()
            parts.append(mixer(hidden[token], states).flatten(0, 1))
            tokens.append(token.flatten())
            groups = self.first + prompts
            self.cache.states.store(mixer, states, groups, self.cache.group_of_row)
        mixed = torch.cat(parts)
        return torch.empty_like(mixed).index_copy_(0, torch.cat(tokens), mixed)

    @cached_property
    def _group(self) -> Tensor:
        """Group of each token: (T,) int64, on the device of the packing."""
        lengths = self.packing.lengths
        group = self.first + torch.arange(len(lengths)).repeat_interleave(lengths)
        return to_device(group, self.packing.position_ids.device)


@dataclass(eq=False)
class Extension:
    """Attention of further prompt tokens to prompts that the cache already holds in part.

    Group `first` + i holds `held` tokens and gets the i-th of the packed chunks.
    """

    cache: KVCache
    first: int
    held: list[int]
    chunks: list[int]  # tokens of each chunk

    def mix(self, hidden: Tensor, mixer: Mixer) -> Tensor:
        """Refuse (T, C): caches of models with mixers are not kept."""
        del hidden, mixer
        raise InternalError("a prompt with states was extended")

    def positions(self) -> Tensor:
        """Return the position of each packed token in its prompt: (T,) int64."""
        pairs = zip(self.held, self.chunks, strict=True)
        return torch.cat([torch.arange(held, held + size) for held, size in pairs])

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, reach: Reach) -> Tensor:
        """Attend T packed tokens: (T, H, D), (T, K, D), (T, K, D) -> (T, H, D)."""
        sizes = torch.tensor(self.chunks)
        group = self.first + torch.arange(len(sizes)).repeat_interleave(sizes)
        positions = self.positions().to(key.device)
        self.cache.store_prompts(layer, group.to(key.device), positions, key, value)
        parts = []
        for number, (part, held) in enumerate(
            zip(query.split(self.chunks), self.held, strict=True)
        ):
            length = held + len(part)
            keys, values = self.cache.prompt(layer, self.first + number, length)
            mask = causal_mask(len(part), length, reach.window, key.device)[None, None]
            q = part.transpose(0, 1)[None]  # (1, H, T, D)
            out = attend_dense(q, keys[None], values[None], reach, mask)
            parts.append(out[0].transpose(0, 1))
        return torch.cat(parts)
