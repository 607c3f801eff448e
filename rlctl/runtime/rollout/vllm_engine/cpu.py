"""Patches of vLLM 0.31 and 0.32 for CPUs: changing weights, heads of any size."""

# pyright: reportMissingImports=false, reportMissingModuleSource=false
# (an extra: types are checked where it is installed)
from __future__ import annotations

from collections.abc import Callable
from inspect import signature
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rlctl.errors import ConfigError, ResourceError

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheGroupSpec

# Head sizes for which vLLM has CPU attention kernels.
HEAD_SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)


def padded_head_size(size: int) -> int:
    """Return the smallest supported head size ≥ `size`. Raises ConfigError if there is none."""
    supported = [head_size for head_size in HEAD_SIZES if head_size >= size]
    if not supported:
        raise ConfigError(
            f"the model's attention heads have size {size}; vLLM on a CPU supports at most "
            f"{HEAD_SIZES[-1]}",
            where="actor_rollout_ref.model.path",
            hint="set actor_rollout_ref.rollout.name=hf",
        )
    return supported[0]


def keep_weights_unpacked() -> None:
    """Patch linear layers to keep their weight unpacked, so that it can be shared with the trainer.

    vLLM would pack a copy, which does not follow changes of the weight, and drop the original or
    keep both (for a tied head).
    """
    import vllm.model_executor.layers.utils as layers

    def keep(layer: torch.nn.Module, remove_weight: bool) -> None:
        del remove_weight
        layer.cpu_linear = torch.nn.functional.linear  # pyright: ignore[reportArgumentType]

    layers.dispatch_cpu_unquantized_gemm = keep


def pack_loaded_experts() -> None:
    """Patch mixtures of experts to set up their kernel at every load, not only at the first.

    It needs packed weights, into whose place a later load copies unpacked ones, and it keeps the
    biases of the first load.
    """
    from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import (
        UnquantizedFusedMoEMethod,
    )

    set_up = UnquantizedFusedMoEMethod._setup_kernel

    def set_up_again(self: Any, layer: Any, w13: Tensor, w2: Tensor) -> None:
        self.moe_kernel = None
        set_up(self, layer, w13, w2)

    UnquantizedFusedMoEMethod._setup_kernel = set_up_again


def pad_attention_heads() -> None:
    """Patch attention to zero-pad head sizes that have no CPU kernel.

    Padding is exact because models pass their softmax scale.
    """
    from vllm.model_executor.layers.attention import Attention

    build, attend = Attention.__init__, Attention.forward
    if getattr(attend, "pads", False):
        return

    def build_padded(
        self: Attention, num_heads: int, head_size: int, *args: object, **kwargs: object
    ) -> None:
        build(self, num_heads, padded_head_size(head_size), *args, **kwargs)  # pyright: ignore[reportArgumentType]
        self.own_head_size = head_size  # pyright: ignore[reportArgumentType, reportAttributeAccessIssue]

    def attend_padded(
        self: Attention, query: Tensor, key: Tensor, value: Tensor, *args: object, **kwargs: object
    ) -> Tensor:
        size: int = self.own_head_size  # pyright: ignore[reportAssignmentType, reportAttributeAccessIssue]
        missing = self.head_size - size
        if not missing:
            return attend(self, query, key, value, *args, **kwargs)  # pyright: ignore[reportArgumentType]
        query, key, value = (
            torch.nn.functional.pad(x.view(len(x), -1, size), (0, missing)).flatten(1)
            for x in (query, key, value)
        )
        return (
            attend(self, query, key, value)
            .view(len(query), -1, self.head_size)[..., :size]
            .flatten(1)
        )

    attend_padded.pads = True  # pyright: ignore[reportFunctionMemberAccess]
    Attention.__init__, Attention.forward = build_padded, attend_padded


def rotate_unaligned_heads() -> None:
    """Patch rotary embeddings of 16-bit heads whose halves are no multiple of 16 bytes.

    vLLM's kernel for CPUs writes halves to aligned addresses, and else ends the process.
    """
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

    rotate = RotaryEmbedding.forward_cpu
    if getattr(rotate, "rotates_all", False):
        return

    def rotate_all(
        self: RotaryEmbedding, positions: Tensor, query: Tensor, key: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        is_aligned = query.element_size() > 2 or self.rotary_dim % 16 == 0
        if is_aligned:
            return rotate(self, positions, query, key)
        return RotaryEmbedding.forward_native(self, positions, query, key)

    rotate_all.rotates_all = True  # pyright: ignore[reportFunctionMemberAccess]
    RotaryEmbedding.forward_cpu = rotate_all


def _block_bytes(config: VllmConfig, groups: list[KVCacheGroupSpec]) -> int:
    from vllm.v1.core import kv_cache_utils

    measure: Callable[..., int] = kv_cache_utils._pool_bytes_per_block
    takes_config = len(signature(measure).parameters) == 2  # since 0.32
    return measure(config, groups) if takes_config else measure(groups)


def size_cache() -> None:
    """Patch the worker to make room for `max_num_seqs` complete rows, or for what is allowed.

    `kv_cache_memory_bytes` is the limit. Raises ResourceError if not even one row fits.
    """
    from vllm.v1.core import kv_cache_utils
    from vllm.v1.worker.cpu_worker import CPUWorker

    def measure(self: CPUWorker) -> int:
        config = self.vllm_config
        groups = kv_cache_utils.get_kv_cache_groups(config, dict(self.get_kv_cache_spec()))
        block = _block_bytes(config, groups)  # vLLM reserves one
        row = kv_cache_utils._max_memory_usage_bytes_from_groups(config, groups)
        allowed = self.cache_config.kv_cache_memory_bytes or 0
        if row + block > allowed:
            raise ResourceError(
                f"one response of {config.model_config.max_model_len} tokens needs "
                f"{(row + block) / 2**20:.0f} MiB of KV cache; {allowed / 2**20:.0f} MiB are "
                "allowed",
                where="actor_rollout_ref.rollout.gpu_memory_utilization",
                hint="set shorter data.max_prompt_length and data.max_response_length, or raise it",
            )
        return min(config.scheduler_config.max_num_seqs * row + block, allowed)

    CPUWorker.determine_available_memory = measure
