"""rlctl trains language models with reinforcement learning and records every experiment.

`import rlctl` offers the Python API (`rlctl.api`) and the errors. Nothing heavy is imported until
a function is called.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rlctl.api import (
        compare,
        compose,
        evaluate,
        generate,
        list_runs,
        open_run,
        resume,
        sweep,
        train,
    )
    from rlctl.errors import (
        ConfigError,
        ConflictError,
        DeviceMemoryError,
        InternalError,
        MissingExtraError,
        NotFoundError,
        ResourceError,
        RlctlError,
        UsageError,
    )

__version__ = "0.1.0"

__all__ = [
    "ConfigError",
    "ConflictError",
    "DeviceMemoryError",
    "InternalError",
    "MissingExtraError",
    "NotFoundError",
    "ResourceError",
    "RlctlError",
    "UsageError",
    "compare",
    "compose",
    "evaluate",
    "generate",
    "list_runs",
    "open_run",
    "resume",
    "sweep",
    "train",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'rlctl' has no attribute {name!r}")
    return getattr(import_module("rlctl.errors" if name.endswith("Error") else "rlctl.api"), name)


def __dir__() -> list[str]:
    return [*globals(), *__all__]
