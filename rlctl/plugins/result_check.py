"""Check of what plug-ins return, at the places that call them."""

from typing import Any

from rlctl.errors import ConfigError


def check_result(plugin: Any, is_right: bool, result: Any, expected: str) -> None:
    """Raise ConfigError, at the line of the function `plugin`, unless its `result` is right."""
    if is_right:
        return
    plugin = getattr(plugin, "func", plugin)  # of a partial
    code = getattr(plugin, "__code__", None)
    shape = getattr(result, "shape", None)
    given = repr(result)[:60] if shape is None else f"a tensor of {tuple(shape)}"
    raise ConfigError(
        f"your function {getattr(plugin, '__name__', '?')} returned {given}, not {expected}",
        where=f"{code.co_filename}:{code.co_firstlineno}" if code else None,
    )
