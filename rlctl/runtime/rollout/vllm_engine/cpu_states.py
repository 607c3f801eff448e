"""Gated delta nets in vLLM 0.31 and 0.32 on a CPU, of any dtype and with heads of any size.

Axes: T tokens of a pass, B sequences, L tokens of each, C channels, H heads, K and V their sizes.
"""

# pyright: reportMissingImports=false, reportMissingModuleSource=false
# (an extra: types are checked where it is installed)
from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def compute_delta_nets() -> None:
    """Patch gated delta nets to compute with torch.

    vLLM's kernels for CPUs take bfloat16 and heads of some sizes only.
    """
    from vllm.forward_context import get_forward_context
    from vllm.model_executor.layers.mamba.ops.cpu import gdn_attention
    from vllm.utils.torch_utils import LayerNameType, _resolve_layer_name

    def compute(
        mixed_qkv: Tensor, b: Tensor, a: Tensor, core_attn_out: Tensor, layer_name: Any
    ) -> None:
        """Write the output (T, H, V) of a layer for its inputs (T, C), (T, H), (T, H)."""
        context: Any = get_forward_context()
        layer = context.no_compile_layers[_resolve_layer_name(layer_name)]
        if context.attn_metadata is None:  # a pass that only measures memory
            return
        metadata = context.attn_metadata[layer.prefix]
        for tokens, slots, is_first in _sequences(metadata):
            found = _mix(layer, (mixed_qkv[tokens], b[tokens], a[tokens]), slots, is_first)
            core_attn_out[tokens] = found.to(core_attn_out.dtype)

    compute.__annotations__["layer_name"] = LayerNameType  # torch infers a schema
    # It is registered as an operator of torch by this name when the first layer is built.
    gdn_attention.cpu_gdn_attention_core = compute


def _sequences(metadata: Any) -> Iterator[tuple[slice, Tensor, bool]]:
    """Yield tokens of equally long sequences, the slots of their states, and if they start there.

    Rows that decode one token come together, and before the prompts.
    """
    ends = metadata.non_spec_query_start_loc.tolist()
    slots = metadata.non_spec_state_indices_tensor
    decodes = metadata.num_decodes
    if decodes:
        yield slice(0, ends[decodes]), slots[:decodes].long(), False
    for row in range(decodes, decodes + metadata.num_prefills):
        is_first = not metadata.has_initial_state[row]
        yield slice(ends[row], ends[row + 1]), slots[row : row + 1].long(), is_first


def _mix(layer: Any, inputs: tuple[Tensor, ...], slots: Tensor, is_first: bool) -> Tensor:
    """Mix B sequences: (B·L, C), (B·L, H), (B·L, H) -> (B·L, H, V). Updates the states."""
    from transformers.models.qwen3_5 import modeling_qwen3_5 as qwen
    from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first

    qkv, b, a = (value.unflatten(0, (len(slots), -1)).float() for value in inputs)
    channels = layer.kv_cache[0]
    memory = layer.kv_cache[1]
    if not is_conv_state_dim_first():
        channels = channels.transpose(1, 2)  # (slots, C, width - 1)
    before, known = channels[slots].float(), memory[slots].float()  # (B, H, V, K)
    if is_first:
        before, known = torch.zeros_like(before), torch.zeros_like(known)
    row = torch.cat([before, qkv.transpose(1, 2)], -1)
    channels[slots] = row[..., -before.shape[-1] :].to(channels.dtype)
    weight = layer.conv1d.weight.float().view(row.shape[1], 1, -1)
    mixed = F.silu(F.conv1d(row, weight, groups=len(weight))).transpose(1, 2)
    sizes = [layer.key_dim // layer.tp_size] * 2 + [layer.value_dim // layer.tp_size]
    widths = (layer.head_k_dim, layer.head_k_dim, layer.head_v_dim)
    parts = zip(mixed.split(sizes, -1), widths, strict=True)
    query, key, value = (part.unflatten(-1, (-1, width)) for part, width in parts)
    groups = value.shape[2] // key.shape[2]
    rule = qwen.torch_chunk_gated_delta_rule
    output, last = rule(
        query.repeat_interleave(groups, 2),
        key.repeat_interleave(groups, 2),
        value,
        g=-layer.A_log.float().exp() * F.softplus(a + layer.dt_bias.float()),
        beta=b.sigmoid(),
        initial_state=known.transpose(2, 3),
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
        chunk_size=min(64, qkv.shape[1]),
    )
    memory[slots] = last.transpose(2, 3).to(memory.dtype)
    return output.flatten(0, 1)
