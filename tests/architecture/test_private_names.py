"""Private names of other libraries that rlctl uses, and the release in which each was seen.

They are the first to look at when a library is updated. Attributes of objects are not found here.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]

SEEN = {
    ("hydra-core", "1.3.8"): """
        hydra._internal.config_repository.ConfigRepository
        hydra._internal.defaults_list.DefaultsList
        hydra._internal.defaults_list.create_defaults_list
        hydra.plugins.config_source.ConfigSource._get_header_dict
    """,
    ("ray", "2.60.0"): """
        ray._private.parameter
        ray._private.ray_constants
        ray._private.services
        ray._private.utils
    """,
    ("torch", "2.13.0"): """
        torch._C
        torch._C._accelerator_setAllocatorSettings
        torch._dynamo
        torch._dynamo.config
        torch._dynamo.config.disable
        torch._foreach_mul_
        torch.distributed.checkpoint.filesystem._StorageInfo
        torch.distributed.checkpoint.metadata._MEM_FORMAT_ENCODING
        torch.distributed.distributed_c10d._pickler
        torch.distributed.distributed_c10d._unpickler
        torch.ops.mkldnn._linear_pointwise
        torch.ops.mkldnn._linear_pointwise.binary
        torch.ops.mkldnn._reorder_linear_weight
        torch.serialization._get_layout
        torch.utils._python_dispatch.is_traceable_wrapper_subclass
    """,
    ("transformers", "5.19.0"): """
        transformers.AutoModelForSequenceClassification._model_mapping
    """,
    ("typer", "0.29.2"): """
        typer._completion_shared
        typer._completion_shared.get_completion_script
    """,
    ("vllm", "0.32.0"): """
        vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method.UnquantizedFusedMoEMethod._setup_kernel
        vllm.model_executor.models.registry._run_in_subprocess
        vllm.transformers_utils.config._register_config_class
        vllm.utils.torch_utils._resolve_layer_name
        vllm.v1.core.kv_cache_utils._max_memory_usage_bytes_from_groups
        vllm.v1.core.kv_cache_utils._pool_bytes_per_block
    """,
}
OWN = {"rlctl", *sys.stdlib_module_names}


def is_private(name: str) -> bool:
    return any(part.startswith("_") and not part.startswith("__") for part in name.split("."))


def imports_of(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """Yield the local and the full name of what a module imports from other libraries."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            pairs = [
                (name.asname or name.name, f"{node.module}.{name.name}") for name in node.names
            ]
        elif isinstance(node, ast.Import):
            pairs = [(name.asname or name.name.partition(".")[0], name.name) for name in node.names]
        else:
            continue
        yield from (pair for pair in pairs if pair[1].partition(".")[0] not in OWN)


def used(tree: ast.AST) -> Iterator[str]:
    """Yield the private names of other libraries in a module."""
    names = dict(imports_of(tree))
    yield from filter(is_private, names.values())
    for node in ast.walk(tree):
        parts: list[str] = []
        inner: ast.AST = node
        while isinstance(inner, ast.Attribute):
            parts.insert(0, inner.attr)
            inner = inner.value
        if parts and isinstance(inner, ast.Name) and inner.id in names:
            base = names[inner.id]
            if inner.id == base.partition(".")[0]:
                base = inner.id  # `import a.b` binds `a`
            name = ".".join([base, *parts])
            if is_private(name) and not is_private(base):
                yield name


def test_the_list_is_complete() -> None:
    files = sorted((ROOT / "rlctl").rglob("*.py"))
    found = {name for file in files for name in used(ast.parse(file.read_text()))}
    assert found == {name for names in SEEN.values() for name in names.split()}


def resolve(name: str) -> Any:
    """Return what a dotted name refers to. Raises ImportError or AttributeError."""
    parts = name.split(".")
    found: Any = import_module(parts[0])
    for count, part in enumerate(parts[1:], 2):
        if not hasattr(found, part):
            import_module(".".join(parts[:count]))
        found = getattr(found, part)
    return found


@pytest.mark.parametrize(
    ("package", "seen"),
    [
        pytest.param(*key, marks=pytest.mark.extra("vllm") if key[0] == "vllm" else (), id=key[0])
        for key in SEEN
    ],
)
def test_the_installed_release_has_them(package: str, seen: str) -> None:
    lacking: list[str] = []
    for name in SEEN[package, seen].split():
        try:
            resolve(name)
        except (ImportError, AttributeError) as error:
            lacking.append(f"{name}: {error}")
    assert not lacking, f"seen in {package} {seen}"
