"""Arrows: pairs of packages with an import between them, whose number may only fall."""

import re
from collections import defaultdict
from pathlib import Path

import pytest

from tests.architecture.source import FILES, ROOT
from tests.plugin_folders import FOLDERS

# Arrows between packages of the core, `rlctl.plugins` itself included, and from folders of plug-ins
# to the core. The modules directly in `rlctl` are one package.
MOST_ARROWS = {"core": 143, "plug-ins": 56}

Arrow = tuple[str, str]
IMPORT = re.compile(
    r"^\s*(?:from (rlctl[\w.]*) import (\([^)]*\)|.+)|import (rlctl[\w.]*))", re.MULTILINE
)


def package_of(path: Path) -> str:
    """Return `x`, `runtime/x` or `plugins/x` of a file; subfolders belong to their package."""
    folders = path.relative_to(ROOT / "rlctl").parts[:-1]
    depth = 2 if folders[:1] in (("runtime",), ("plugins",)) else 1
    return "/".join(folders[:depth]) or "rlctl"


def module_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts).removesuffix(".__init__")


def imported_modules(text: str, modules: dict[str, str]) -> set[str]:
    """Return the modules of rlctl that a file imports, in functions and for type checkers, too."""
    found = set[str]()
    for base, names, module in IMPORT.findall(text):
        found.add(module)
        for name in re.findall(r"(\w+)(?: as \w+)?", names):
            full = f"{base}.{name}"
            found.add(full if full in modules else base)
    return found & modules.keys()


def arrows() -> dict[Arrow, list[str]]:
    """Return the imports, as `module > module`, of each arrow."""
    packages = {module_of(path): package_of(path) for path in FILES}
    found = defaultdict[Arrow, list[str]](list)
    for path in FILES:
        source = module_of(path)
        for target in sorted(imported_modules(path.read_text(), packages)):
            if packages[source] != packages[target]:
                arrow = (packages[source], packages[target])
                found[arrow].append(f"{source} > {target}")
    return found


def is_plugin(package: str) -> bool:
    return package.startswith("plugins/")


@pytest.mark.parametrize(
    "part", ["core", pytest.param("plug-ins", marks=pytest.mark.plugin(*FOLDERS))]
)
def test_there_are_no_more_arrows_than_before(part: str):
    found = arrows()
    count = sum(is_plugin(source) == (part == "plug-ins") for source, _ in found)
    single = "\n".join(
        f"{source} -> {target}: {imports[0]}"
        for (source, target), imports in sorted(found.items())
        if len(imports) == 1
    )
    assert count == MOST_ARROWS[part], (
        f"lower MOST_ARROWS if there are fewer; a new arrow is often one import:\n{single}"
    )


def test_imports_are_found_wherever_they_are():
    modules = {"rlctl.a": "rlctl", "rlctl.b": "rlctl", "rlctl.c.d": "c", "rlctl.c": "c"}
    text = """
import rlctl.a
from rlctl.b import name
if TYPE_CHECKING:
    from rlctl.c import d
def f():
    from rlctl.c import (
        other as another,
    )
from other import name
"""
    found = imported_modules(text, modules)
    assert found == {"rlctl.a", "rlctl.b", "rlctl.c", "rlctl.c.d"}
