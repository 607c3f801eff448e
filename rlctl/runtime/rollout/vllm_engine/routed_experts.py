"""Experts that vLLM chooses for each token, for router replay.

On GPUs vLLM returns them (`enable_return_routed_experts`). Its runner for CPUs does not: there the
routers report their choices, which are kept by slot of the KV cache, so that a cached prefix has
those with which it was computed.

Axes: N tokens, L layers with a mixture, K experts of a token.
"""

# pyright: reportMissingImports=false, reportMissingModuleSource=false
# (an extra: types are checked where it is installed)
from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rlctl.errors import ConfigError
from rlctl.runtime.model.routing import RoutingShape
from rlctl.runtime.rollout.requests import Completion, Request

if TYPE_CHECKING:
    from vllm import RequestOutput


class RoutedExperts:
    """Record of the experts of open requests."""

    def __init__(self, runner: Any, shape: RoutingShape, on_cpu: bool) -> None:
        """Let the routers of `runner`'s model report their choices, on a CPU.

        Raises ConfigError if the cache has several groups of layers, of which none may have a slot
        for each token.
        """
        if on_cpu and len(runner.kv_cache_config.kv_cache_groups) > 1:
            raise ConfigError(
                "vLLM on a CPU cannot return the experts of models with windows or states",
                where="actor_rollout_ref.actor.router_replay.mode",
                hint="R2, or actor_rollout_ref.rollout.name=hf",
            )
        self.runner = runner
        self.shape = shape
        self.layers = sorted(mixture.layer_id for mixture in _mixtures(runner))
        self._by_slot: Tensor | None = None  # (slots, L, K)
        self._names: dict[str, str] = {}  # of open requests: with vLLM's suffix, by those without
        self._kept: dict[str, Tensor] = {}  # (N, L, K), by name: of tokens of earlier weights
        if on_cpu:
            blocks = runner.kv_cache_config.num_blocks
            size = runner.cache_config.block_size
            self._by_slot = shape.none(blocks * size)
            for mixture in _mixtures(runner):
                mixture.router.set_capture_fn(
                    partial(self._note, self.layers.index(mixture.layer_id))
                )

    def begin(self, names: Iterable[str]) -> None:
        """Note the names of new requests, which end with a random suffix."""
        if self._by_slot is not None:
            self._names |= {name.partition("-")[0]: name for name in names}

    def keep(
        self, rows: Mapping[str, tuple[Request, int]], progress: Mapping[tuple[int, int], int]
    ) -> None:
        """Keep the records of open responses, whose tokens are computed again with new weights.

        `rows` are the responses by name, `progress` their tokens by key and index.
        """
        for name, (request, index) in rows.items():
            num_tokens = len(request.context_ids) + progress[request.key, index] - 1
            if self._by_slot is not None and self._names[name] in self.runner.requests:
                self._kept[name] = self._record(name, num_tokens)

    def end(self, names: Iterable[str]) -> None:
        """Forget requests by their names without suffix."""
        for name in names:
            self._names.pop(name, None)
            self._kept.pop(name, None)

    def attach(self, completion: Completion, request: Request, output: RequestOutput) -> Completion:
        """Return a finished response with its record; the last token is not computed."""
        num_tokens = len(request.context_ids) + len(completion.response_ids)
        if self._by_slot is None:
            experts = torch.as_tensor(output.outputs[0].routed_experts)
            found = experts[:, self.layers].to(self.shape.dtype)
        else:
            found = self._record(output.request_id, num_tokens - 1)
        self.end([output.request_id])
        rest = self.shape.none(num_tokens - len(found))
        return replace(completion, routing=torch.cat([found, rest]))

    def _record(self, name: str, num_tokens: int) -> Tensor:
        """Return the experts of the first tokens of a request: (N, L, K)."""
        assert self._by_slot is not None
        blocks = torch.tensor(self.runner.requests[self._names[name]].block_ids[0])
        size = self.runner.cache_config.block_size
        slots = (blocks[:, None] * size + torch.arange(size)).flatten()[:num_tokens]
        found = self._by_slot[slots]
        kept = self._kept.get(name)
        if kept is not None:
            found[: len(kept)] = kept
        return found

    def _note(self, layer: int, experts: Tensor) -> None:
        """Keep the experts (N, K) of the tokens of a pass."""
        assert self._by_slot is not None
        slots = self.runner.input_batch.block_table[0].slot_mapping.gpu[: len(experts)]
        self._by_slot[slots, layer] = experts.to(self._by_slot.dtype)


def _mixtures(runner: Any) -> list[Any]:
    """Return vLLM's modules with a router."""
    from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner

    return [module for module in runner.get_model().modules() if isinstance(module, MoERunner)]
