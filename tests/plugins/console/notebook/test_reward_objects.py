"""Reward functions given as Python objects: the module that reward processes import."""

from __future__ import annotations

import importlib.util
import linecache
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from rlctl.errors import UsageError
from rlctl.plugins.console.notebook.reward_objects import reward_overrides
from rlctl.recipes.compose import compose

CELL = '''
import math
import os.path as paths
import re
from collections import Counter as Tally
from typing import Any

ANSWER = re.compile(r"#### (\\d+)", re.MULTILINE)
WEIGHTS = {"right": 1.0, "format": (0.1, None)}
unused = open

def last(text: str) -> str | None:
    found = ANSWER.findall(text)
    return found[-1] if found else None

def even(n: int) -> bool:
    return n == 0 or odd(n - 1)

def odd(n: int) -> bool:
    return n != 0 and even(n - 1)

def clipped(function):
    return lambda *args, **kwargs: min(1.0, function(*args, **kwargs))

def score(data_source: Any, solution_str: str, ground_truth: str, extra_info: Frame = None):
    """Give a point for the last number."""
    paths_of = [paths.basename(part) for part in solution_str.split()]  # a local name
    tally = Tally(paths_of)
    right = last(solution_str) == ground_truth and even(2 * len(tally))
    return math.floor(WEIGHTS["right"]) if right else WEIGHTS["format"][0]
'''


def notebook(source: str, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Run a cell in a module that is `__main__`, as a kernel does, and return its names."""
    source = f"from __future__ import annotations\n{source}"  # Frame is not defined
    main, name = ModuleType("__main__"), f"<cell {hash(source)}>"
    monkeypatch.setitem(sys.modules, "__main__", main)
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    exec(compile(source, name, "exec"), main.__dict__)
    return main.__dict__


def written(overrides: list[str]) -> tuple[Path, Any]:
    """Return the file that overrides name, and its function, imported as a new module."""
    function = compose("ppo", overrides).config.reward.custom_reward_function
    assert function.path is not None
    spec = importlib.util.spec_from_file_location("written", function.path)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return Path(function.path), getattr(module, function.name)


def test_a_function_of_a_cell_is_written_with_what_it_uses(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = notebook(CELL, monkeypatch)
    overrides = reward_overrides(names["score"], [])
    path, score = written(overrides)
    assert path.parent == here / "runs" / ".functions"
    assert score("x", "a\n#### 7", "7") == 1
    assert score("x", "a\n#### 7", "8") == 0.1
    text = path.read_text()
    assert "unused" not in text
    assert "clipped" not in text
    assert reward_overrides(names["score"], []) == overrides, "an equal function has the same file"
    names["WEIGHTS"]["right"] = 2.0
    assert reward_overrides(names["score"], []) != overrides, "another constant is another function"


def test_the_file_is_in_the_folder_of_the_runs(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = notebook(
        "def f(data_source, solution_str, ground_truth):\n    return 1.0\n", monkeypatch
    )
    path, _ = written(reward_overrides(names["f"], ['trainer.run_dir="some where"']))
    assert path.parent == here / "some where" / ".functions"


def test_a_decorator_comes_before_the_function(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    decorated = """
import functools

def halved(function):
    @functools.wraps(function)
    def call(*args, **kwargs):
        return function(*args, **kwargs) / 2
    return call

@functools.lru_cache
def one():
    return 1.0

other_name = one

@halved
def f(data_source, solution_str, ground_truth):
    return other_name()
"""
    names = notebook(decorated, monkeypatch)
    _, f = written(reward_overrides(names["f"], []))
    assert f("x", "1", "1") == 0.5


@pytest.mark.parametrize(
    ("cell", "message"),
    [
        ("f = lambda a, b, c: 1.0", "not a lambda"),
        ("class F:\n    def __call__(self): ...\nf = F()", "not a F"),
        (
            "import io\nfile = io.StringIO()\ndef f(a):\n    return file.read()\n",
            "uses file, a Str",
        ),
        (
            "def g():\n    x = 1\n    return lambda: x\nf = g()\nf.__name__ = 'f'",
            "f, which uses x of",
        ),
        (
            "def g():\n    x = 1\n    def h():\n        return x\n    return h\n"
            "h = g()\ndef f(a):\n    return h()\n",
            "h, which uses x of",
        ),
    ],
)
def test_what_has_no_source_is_refused(
    cell: str, message: str, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = notebook(cell, monkeypatch)
    with pytest.raises(UsageError, match=message):
        reward_overrides(names["f"], [])
    assert not list(here.iterdir())


def test_an_imported_function_is_named(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(here)
    (here / "alone.py").write_text("def f(a):\n    return 1.0\n")
    (here / "package").mkdir()
    (here / "package" / "__init__.py").write_text("")
    (here / "package" / "inner.py").write_text("from package import __name__ as n\ndef f(a): ...\n")
    from alone import f  # pyright: ignore[reportMissingImports]
    from package.inner import f as inner  # pyright: ignore[reportMissingImports]

    path, _ = written(reward_overrides(f, []))
    assert path == here / "alone.py"
    assert reward_overrides(inner, []) == ['reward.functions=["package.inner:f"]']
    for name in ("alone", "package", "package.inner"):
        monkeypatch.delitem(sys.modules, name)
