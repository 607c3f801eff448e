"""Mixtures of experts: what tells whether a model is one, and whether its choices are recorded."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedModel

# Config attributes with the number of experts.
_MIXTURE_SIZES = ("num_experts", "num_local_experts", "n_routed_experts")
ROUTERS = "rlctl_routers"  # attribute of a model: see `routing`


def num_experts(config: Any) -> int:
    """Return the number of experts of a decoder's config; 0 without a mixture."""
    return next((n for name in _MIXTURE_SIZES if (n := getattr(config, name, None))), 0)


def has_routers(model: PreTrainedModel) -> bool:
    """Return True if the routers of `model` can take part in passes with `routing.Routing`."""
    return hasattr(model, ROUTERS)
