"""Stand-ins for packages that users' files import only for base classes and types."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Mapping
from types import ModuleType
from typing import Any


def provide(contents: Mapping[str, Mapping[str, Any]]) -> None:
    """Offer modules with the given names and contents, unless their package is installed.

    The first module is the package. They exist in this process only.
    """
    package = next(iter(contents))
    if package in sys.modules or importlib.util.find_spec(package) is not None:
        return
    for name, attributes in contents.items():
        module = ModuleType(name, f"Stand-in of rlctl: {package} is not installed.")
        module.__dict__.update(attributes)
        module.__path__ = []  # a package, whose missing modules are ordinary import errors
        sys.modules[name] = module
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], child, module)
