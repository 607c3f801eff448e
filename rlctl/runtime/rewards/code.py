"""Hashes of reward code, which detect a change between the attempts of a run."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path

from rlctl.recipes import schema
from rlctl.runtime.rewards.functions import is_user_code


def code_hashes(reward: schema.Reward) -> dict[str, str]:
    """Return the SHA-256 of the file of each reward function that is the user's code.

    The keys are paths and modules as given. Leaves out functions that are not in a file: loading
    reports them.
    """
    custom = reward.custom_reward_function
    functions = [f"{custom.path}:"] if custom.path is not None else reward.functions or ()
    hashes: dict[str, str] = {}
    for code in (function.rpartition(":")[0] for function in functions if is_user_code(function)):
        path = Path(code).expanduser() if code.endswith(".py") else _module_file(code)
        if path is not None and path.is_file():
            hashes[code] = hashlib.sha256(path.read_bytes()).hexdigest()
    return hashes


def _module_file(module: str) -> Path | None:
    """Return the source file of a module, or None if it has none. Imports nothing."""
    spec: ModuleSpec | None = None
    folders: Sequence[str] | None = None
    parts = module.split(".")
    for end in range(1, len(parts) + 1):
        name = ".".join(parts[:end])
        specs = (finder.find_spec(name, folders, None) for finder in sys.meta_path)
        spec = next((spec for spec in specs if spec is not None), None)
        if spec is None:
            return None
        folders = spec.submodule_search_locations or ()
    return Path(spec.origin) if spec and spec.has_location and spec.origin else None
