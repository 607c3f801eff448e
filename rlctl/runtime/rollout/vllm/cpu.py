"""What rlctl changes in vLLM 0.32.0 on CPUs: weights stay where they are, and attention takes heads of any size."""

# pyright: reportMissingImports=false, reportMissingModuleSource=false
# (an extra: types are checked where it is installed)
from __future__ import annotations

import torch
from torch import Tensor

from rlctl.errors import ConfigError

HEAD_SIZES = (
    32,
    64,
    80,
    96,
    112,
    128,
    160,
    192,
    224,
    256,
    512,
)  # that its attention has kernels for


def padded_head_size(size: int) -> int:
    """The least size that there is a kernel for and that holds `size`. Raises ConfigError beyond the largest."""
    fitting = [each for each in HEAD_SIZES if each >= size]
    if not fitting:
        raise ConfigError(
            f"the model's attention heads have {size} numbers; vLLM on a CPU takes at most {HEAD_SIZES[-1]}",
            where="actor_rollout_ref.model.path",
            hint="actor_rollout_ref.rollout.name=hf",
        )
    return fitting[0]


def keep_weights_plain() -> None:
    """Linear layers keep their weight as it is. vLLM would pack a copy and throw the weight away, or keep both (a tied head), and what is
    packed does not follow when the weight changes. Without packing the engine's parameters can be the trainer's own."""
    import vllm.model_executor.layers.utils as layers

    def keep(layer: torch.nn.Module, remove_weight: bool) -> None:
        del remove_weight
        layer.cpu_linear = torch.nn.functional.linear  # pyright: ignore[reportArgumentType]

    layers.dispatch_cpu_unquantized_gemm = keep


def pad_heads() -> None:
    """Heads of a size without a kernel are filled up with zeros, which change no score and no sum: the models give the scale themselves."""
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
