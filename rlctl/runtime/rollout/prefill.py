"""Attention of prompt tokens on their way into the KV cache of the engine `hf`.

Axes: T packed tokens, H query heads, K key-value heads, D head size.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from rlctl.errors import InternalError
from rlctl.runtime.model.attention import Packing
from rlctl.runtime.model.kernels import Reach, attend_dense, causal_mask
from rlctl.runtime.model.mixers import Mixer
from rlctl.runtime.ops import to_device
from rlctl.runtime.rollout.kv_cache import KVCache


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
        starts, parts, tokens = lengths.cumsum(0) - lengths, list[Tensor](), list[Tensor]()
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
