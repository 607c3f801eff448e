"""Decoder layers compiled by torch.compile, one layer at a time.

All layers of a model run the same code, so that each kind of pass is compiled once, for any number
of tokens. Attention is called between compiled parts: its rectangles differ in each micro-batch.
Parameters keep their names, and hooks of FSDP and of gradient checkpointing run outside.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from rlctl.errors import ConfigError
from rlctl.recipes import schema
from rlctl.runtime.model.attention import Packing, leave_out_of_graphs
from rlctl.runtime.model.kernels import missing_for_compiler
from rlctl.runtime.model.mixture import num_experts
from rlctl.runtime.model.sharding import decoder_layers
from rlctl.runtime.model.shared_prompts import SharedPrompts
from rlctl.runtime.model.state_layers import contains_mixer

LOG = logging.getLogger(__name__)

KEY = "actor_rollout_ref.actor.use_torch_compile"
# Kinds of passes: with gradients and without, shared prompts or not, with and without adapters, in
# training and evaluation mode. More graphs than these would mean one for each number of tokens.
_MAX_GRAPHS = 16


def enable_compiler() -> None:
    """Let torch.compile compile in this process, and keep what it has compiled for later runs.

    Workers start without a compiler, because on a CPU only `use_torch_compile` needs it.
    On a GPU FlexAttention needs it too, and vLLM, which does not start without.
    """
    import torch._dynamo.config as dynamo

    dynamo.disable = False
    os.environ.pop("TORCHDYNAMO_DISABLE", None)
    # Its default is below TMPDIR, which under Ray is removed at the end of a run.
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rlctl" / "inductor"
    with suppress(OSError):  # the home folder cannot be written, or there is none
        cache.mkdir(parents=True, exist_ok=True)
    if os.access(cache, os.W_OK):
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(cache))


def compiles_by_default(
    hf: PreTrainedModel, model: schema.Model, fsdp: schema.FSDP, device: str
) -> bool:
    """Return what null as `use_torch_compile` means: True where a few graphs suffice."""
    split = fsdp.tensor_model_parallel_size * fsdp.pipeline_model_parallel_size > 1
    mixture = num_experts(hf.config.get_text_config()) > 0
    if device != "cuda" or split or mixture or model.lora_rank > 0 or model.load_in_4bit:
        return False
    missing = missing_for_compiler(device)
    if missing is not None:
        LOG.warning(f"layers are not compiled, which is slower: torch.compile needs {missing}")
    return missing is None


def compile_configured(
    hf: PreTrainedModel, compiled: bool | None, model: schema.Model, fsdp: schema.FSDP, device: str
) -> None:
    """Compile the layers of `hf` in place if `compiled`; if it is None, where few graphs suffice.

    Raises ConfigError if this machine lacks what was asked for.
    """
    if compiled:
        check_compiler(device)
    if compiled or compiles_by_default(hf, model, fsdp, device):
        compile_layers(hf)


def compile_layers(hf: PreTrainedModel) -> None:
    """Compile the decoder layers of `hf` in place, for passes of packed rows.

    The engine `hf` decodes with the same modules; it keeps the uncompiled ones. Kernels are built
    in the first pass of each kind.
    """
    import torch._dynamo.config as dynamo

    enable_compiler()
    dynamo.recompile_limit = max(dynamo.recompile_limit, _MAX_GRAPHS)
    leave_out_of_graphs()
    for layer in decoder_layers(hf):
        if contains_mixer(layer):  # its sequences have other shapes in each pass
            continue
        plain: Callable[..., Any] = layer.forward
        layer.forward = _for_packed_rows(plain, torch.compile(plain, dynamic=True))


def _for_packed_rows(plain: Callable[..., Any], compiled: Callable[..., Any]) -> Callable[..., Any]:
    """Return a `forward` that runs `compiled` in training and scoring, and else `plain`."""

    def forward(*args: Any, **kwargs: Any) -> Any:
        if isinstance(kwargs.get("packing"), Packing | SharedPrompts):
            return compiled(*args, **kwargs)
        return plain(*args, **kwargs)

    return forward


def check_compiler(device: str) -> None:
    """Raise ConfigError unless this machine has what `torch.compile` needs for `device`."""
    missing = missing_for_compiler(device)
    if missing is not None:
        raise ConfigError(
            f"torch.compile needs {missing}",
            where=KEY,
            hint=f"install it (g++ and python3-dev on Debian; CC or CXX names a compiler), or set "
            f"{KEY}=false",
        )
