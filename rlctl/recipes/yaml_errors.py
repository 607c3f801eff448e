"""Errors of YAML files, and the size of those whose aliases repeat parts.

Nine lines can stand for a billion values.
"""

from __future__ import annotations

import yaml

from rlctl.errors import ConfigError

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
            inner = []
            if isinstance(node, yaml.MappingNode):
                inner = [part for pair in node.value for part in pair]
            elif isinstance(node, yaml.CollectionNode):
                inner = node.value
            sizes[id(node)] = known = 1 + sum(map(size, inner))
        return known

    if root is not None and size(root) > _MOST:
        raise yaml.YAMLError(f"its aliases (`*name`) stand for more than {_MOST:,} values")


def unreadable(error: Exception, text: str, where: str) -> ConfigError:
    """Return the error of the file `where` with `text` that PyYAML cannot read."""
    if isinstance(error, yaml.MarkedYAMLError):
        hint = "check indentation, colons and quotes there"
        if mark := error.problem_mark:
            where = f"{where}:{mark.line + 1}:{mark.column + 1}"
            if any("${" in line for line in text.splitlines()[mark.line :][:1]):
                hint = 'quote a reference inside braces: {key: "${other.key}"}'
        return ConfigError(f"invalid YAML: {error.problem}", where=where, hint=hint)
    if isinstance(error, RecursionError):
        return ConfigError(
            "invalid YAML: a value contains itself or is nested too deeply",
            where=where,
            hint="an alias (`*name`) must not be inside its anchor (`&name`)",
        )
    return ConfigError(f"cannot read this file: {error}", where=where)
