"""Extension of vLLM's workers in a server on CPUs, so that it can load the trainer's weights.

Workers of a server with `--worker-extension-cls` import this module before they build the model.
"""

from __future__ import annotations

from rlctl.runtime.rollout.vllm_engine.cpu import (
    keep_weights_unpacked,
    pack_loaded_experts,
    pad_attention_heads,
)

keep_weights_unpacked()
pack_loaded_experts()
pad_attention_heads()


class UnpackedWeights:
    """Mixin without methods: vLLM's own `reload_weights` suffices for unpacked weights."""
