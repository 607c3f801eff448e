"""Meshes that `rlctl fit` searches, and its results."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Mesh:
    """Nodes, devices of each, and ranks that share one copy of the parameters (-1: all)."""

    nodes: int
    per_node: int
    fsdp_size: int = -1

    @property
    def devices(self) -> int:
        """Number of devices."""
        return self.nodes * self.per_node


@dataclass(frozen=True)
class Fit:
    """Settings for one mesh; `rows` of the longest length are in a micro-batch, 0: none fit."""

    mesh: Mesh
    savings: str
    rows: int
    tokens: int
    peak: int  # bytes on the fullest device
    overrides: list[str] = field(default_factory=list)
    reason: str = ""  # why nothing fits
    settings: Mapping[str, Any] = field(default_factory=dict)
    cached: int = 0  # rows of the longest length in the cache of vLLM


def meshes(per_node: int, nodes: int) -> list[Mesh]:
    """Return the meshes of at most `nodes` nodes with `per_node` devices, the smallest first."""
    counts = sorted({per_node, *(2**k for k in range(per_node.bit_length()) if 2**k <= per_node)})
    whole = sorted({nodes, *(2**k for k in range(nodes.bit_length()) if 2**k <= nodes)})
    return [
        *(Mesh(1, count) for count in counts),
        *(Mesh(count, per_node) for count in whole if count > 1),
    ]


def replaced(config: Any, change: tuple[str, Any]) -> Any:
    """Return a section of the configuration with another value at a dotted key."""
    key, value = change
    name, _, rest = key.partition(".")
    inner = value if not rest else replaced(getattr(config, name), (rest, value))
    return config.model_copy(update={name: inner})


def written(value: Any) -> str:
    """Return a value as an override has it."""
    return str(value).lower() if isinstance(value, bool) else str(value)
