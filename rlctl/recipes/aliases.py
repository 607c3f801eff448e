"""Size of YAML whose aliases repeat parts: nine lines can stand for a billion values."""

from __future__ import annotations

import yaml

_MOST = 100_000  # values and keys, with each alias counted as what it repeats


def check_size(root: yaml.Node | None) -> None:
    """Raise YAMLError for a text with too many values, RecursionError for one that has itself."""
    sizes: dict[int, int] = {}

    def size(node: yaml.Node) -> int:
        known = sizes.get(id(node))
        if known == 0:
            raise RecursionError
        if known is None:
            sizes[id(node)] = 0
            parts = node.value if isinstance(node, yaml.CollectionNode) else []
            pairs = isinstance(node, yaml.MappingNode)
            inner = [part for pair in parts for part in pair] if pairs else parts
            sizes[id(node)] = known = 1 + sum(map(size, inner))
        return known

    if root is not None and size(root) > _MOST:
        raise yaml.YAMLError(f"its aliases (`*name`) stand for more than {_MOST:,} values")
