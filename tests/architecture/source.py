"""Access to the source files that the architecture tests check."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "rlctl").rglob("*.py"))
TEST_FILES = sorted((ROOT / "tests").rglob("*.py"))
BENCHMARKS = sorted(
    path for name in ("benchmarks", "tools") for path in (ROOT / name).rglob("*.py")
)

# Packages that commands load only when they use them.
HEAVY = {
    "torch",
    "ray",
    "vllm",
    "transformers",
    "pandas",
    "pyarrow",
    "wandb",
    "swanlab",
    "hydra",
    "omegaconf",
    "numpy",
    "safetensors",
    "plotly",
}

Function = ast.FunctionDef | ast.AsyncFunctionDef


def name_of(path: Path) -> str:
    """Return the path relative to the repository."""
    return str(path.relative_to(ROOT))


_parse = cache(ast.parse)


def parsed(path: Path) -> ast.Module:
    """Return the syntax tree of a file, which is parsed once."""
    return _parse(path.read_text(encoding="utf-8"))


@cache
def nodes(tree: ast.AST) -> list[tuple[str, ast.AST]]:
    """Return every node below `tree` with the qualified name of its innermost function or class."""
    found: list[tuple[str, ast.AST]] = [("", tree)]
    for inside, parent in found:  # grows
        for node in ast.iter_child_nodes(parent):
            is_definition = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
            name = f"{inside}.{node.name}".lstrip(".") if is_definition else inside
            found.append((name, node))
    return found[1:]


def functions(path: Path) -> Iterator[tuple[str, Function]]:
    """Yield every function of a file with its qualified name."""
    for name, node in nodes(parsed(path)):
        if isinstance(node, Function):
            yield name, node
