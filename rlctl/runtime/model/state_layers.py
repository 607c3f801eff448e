"""Facts of layers that mix tokens by a running state: see `rlctl.runtime.model.mixers`."""

from __future__ import annotations

import inspect
from functools import cache
from importlib.util import find_spec

from torch import nn
from transformers import DynamicCache, PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import LinearAttentionCacheLayerMixin

SLOT = "_rlctl_mixer"  # attribute of a mixer
SLOTS = "_rlctl_mixers"  # attribute of a model
# Names of the argument for the states in the classes of transformers.
_STATES = ("cache_params", "past_key_values")
# Mixers without an argument `cache_params`.
_OTHERS = ("Lfm2ShortConv", "Lfm2MoeShortConv", "MiniMaxLightningAttention")


def argument_for_states(module: nn.Module) -> str | None:
    """Return the name of a mixer's argument for its states; None for other modules."""
    if type(module).__name__ in _OTHERS:
        return _STATES[1]
    if not hasattr(module, "layer_idx") or not _takes_states(type(module)):
        return None
    # A decoder layer with a mixer may have the same arguments.
    children = (child for child in module.modules() if child is not module)
    if any(_takes_states(type(child)) for child in children):
        return None
    return _STATES[0]


@cache
def _takes_states(kind: type[nn.Module]) -> bool:
    """Return True if modules of a class take hidden states and an argument `cache_params`."""
    return {_STATES[0], "hidden_states"} <= inspect.signature(kind.forward).parameters.keys()


def has_mixers(model: PreTrainedModel) -> bool:
    """Return True if `model` has installed mixers."""
    return bool(getattr(model, SLOTS, ()))


def contains_mixer(layer: nn.Module) -> bool:
    """Return True if a decoder layer has an installed mixer."""
    return any(hasattr(module, SLOT) for module in layer.modules())


def has_states(config: PreTrainedConfig) -> bool:
    """Return True if a model of `config` has mixers, without building it."""
    layers = DynamicCache(config=config).layers
    return any(isinstance(layer, LinearAttentionCacheLayerMixin) for layer in layers)


def may_have_kernels() -> bool:
    """Return True if a package with kernels is installed that transformers uses for mixers."""
    return any(find_spec(name) for name in ("fla", "causal_conv1d", "mamba_ssm"))
