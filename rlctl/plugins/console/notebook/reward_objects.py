"""Reward functions given as Python objects: a place from which reward processes import them.

A function of an importable file is named. One of a notebook or a script is written, with what it
uses, to a file named after its content, so that runs that resume find it. Nothing is pickled.
"""

from __future__ import annotations

import ast
import builtins
import hashlib
import inspect
import re
import symtable
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

from rlctl.errors import UsageError
from rlctl.files import write_text
from rlctl.runs.naming import DEFAULT_ROOT
from rlctl.suggest import hydra_text

_FOLDER = ".functions"  # in the folder of all runs; listings skip hidden folders
_MAX_LITERAL = 100_000  # characters
_IN_A_FILE = "define it in a file, and import it or set reward.custom_reward_function.path=FILE"


def reward_overrides(function: Callable[..., Any], overrides: Sequence[str]) -> list[str]:
    """Return the overrides that select a function; write its file if it is in no importable one."""
    original = inspect.unwrap(function)
    what = type(original).__name__
    if getattr(original, "__name__", "") == "<lambda>":
        what = "lambda"
    if not isinstance(original, FunctionType) or what == "lambda":
        raise UsageError(f"a reward is a function, not a {what}", hint="def compute_score(…): …")
    module = sys.modules.get(function.__module__)
    name = function.__name__
    file = getattr(module, "__file__", None)
    if function.__module__ != "__main__" and getattr(module, name, None) is function and file:
        if "." in function.__module__:  # of a package, whose modules import one another
            return [f"reward.functions=[{hydra_text('', f'{function.__module__}:{name}')[1:]}]"]
        return _file_overrides(Path(file), name)
    text = source_of(original)
    digest = hashlib.sha256(text.encode()).hexdigest()[:12]
    root = Path(DEFAULT_ROOT)
    for override in overrides:
        if override.startswith("trainer.run_dir="):
            root = Path(override.partition("=")[2].strip("\"'"))
    path = root / _FOLDER / f"{name}-{digest}.py"
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, text)
    return _file_overrides(path, name)


def _file_overrides(path: Path, name: str) -> list[str]:
    key = "reward.custom_reward_function"
    return [hydra_text(f"{key}.path", str(path.resolve())), hydra_text(f"{key}.name", name)]


def source_of(function: FunctionType) -> str:
    """Return a module with the function, and the imports, constants and functions that it uses.

    Raises UsageError for a global that has no source, such as an open file or a data frame.
    """
    parts: dict[str, str] = {}
    _add(function.__name__, function, function.__globals__, parts)
    imports = {text for text in parts.values() if text.startswith(("import ", "from "))}
    others = [text for text in parts.values() if text not in imports]
    about = f'"""Reward {function.__name__}, as it was given to rlctl.train."""\n'
    lines = ["from __future__ import annotations\n", *sorted(imports)]
    return "\n".join([about, *lines, "", *others])


def _add(name: str, value: Any, scope: dict[str, Any], parts: dict[str, str]) -> None:
    """Add the source of `value`, which is called `name` in `scope`, after what it uses."""
    if name in parts:
        return
    home = getattr(value, "__module__", None)
    is_own = home in ("__main__", scope.get("__name__"))
    if isinstance(value, ModuleType):
        parts[name] = f"import {value.__name__} as {name}"
    elif is_own and isinstance(inspect.unwrap(value), FunctionType | type):
        parts[name] = ""  # a function may call itself
        source = _lines_of(name, value)
        for used in _globals_of(source):
            if used in scope:
                _add(used, scope[used], scope, parts)
        alias = "" if value.__name__ == name else f"{name} = {value.__name__}\n"
        parts[name] = parts.pop(name) + source + alias
    elif isinstance(value, re.Pattern):
        parts["re"] = "import re as re"
        parts[name] = f"{name} = re.compile({value.pattern!r}, {value.flags})"
    elif (text := _literal(value)) is not None:
        parts[name] = f"{name} = {text}"
    else:
        there = getattr(value, "__qualname__", getattr(value, "__name__", None)) or name
        if is_own or home is None or getattr(sys.modules.get(home), there, None) is not value:
            what = f"the reward uses {name}, a {type(value).__name__} without source"
            raise UsageError(what, hint=f"import or build it inside the function, or {_IN_A_FILE}")
        parts[name] = f"from {home} import {there} as {name}"


def _lines_of(name: str, value: Any) -> str:
    if getattr(inspect.unwrap(value), "__closure__", None):
        names = ", ".join(inspect.unwrap(value).__code__.co_freevars)
        message = f"the reward uses {name}, which uses {names} of a function around it"
        raise UsageError(message, hint=_IN_A_FILE)
    try:
        return textwrap.dedent(inspect.getsource(value))
    except (OSError, TypeError) as error:
        raise UsageError(f"the source of {name} is not known", hint=_IN_A_FILE) from error


def _globals_of(source: str) -> Iterator[str]:
    """Yield the global names that a definition uses, those of its annotations left out."""
    table = symtable.symtable(f"from __future__ import annotations\n{source}", "<reward>", "exec")
    waiting = [table]
    while waiting:
        scope = waiting.pop()
        waiting += scope.get_children()
        for symbol in scope.get_symbols():
            is_global = symbol.is_global() or (scope is table and not symbol.is_assigned())
            if is_global and symbol.is_referenced() and not hasattr(builtins, symbol.get_name()):
                yield symbol.get_name()


def _literal(value: Any) -> str | None:
    """Return the text of plain data, None for other values."""
    text = repr(value)
    with suppress(ValueError, SyntaxError, MemoryError, RecursionError):
        if len(text) <= _MAX_LITERAL and ast.literal_eval(text) == value:
            return text
    return None
