"""Names of other models in a model's config.json, which transformers and timm would look up."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rlctl.errors import ConfigError

# A backbone of transformers or timm, and timm's architecture (`hf-hub:owner/name`, `local-dir:…`).
KEYS = ("backbone", "architecture")


def refuse_other_models(file: Path) -> None:
    """Raise ConfigError if a part of `file`, a config.json, is described elsewhere."""
    try:
        found = _named(json.loads(file.read_bytes()))
    except (OSError, ValueError, RecursionError):
        return  # transformers reports it
    if found is not None:
        raise ConfigError(
            f"config.json names another model, which would be looked up: {found!r}",
            where=str(file),
            hint="replace it by a name of timm without ':' and '/', or by `backbone_config`",
        )


def _named(value: Any) -> str | None:
    """Return the first name of a backbone that is an address, a path or a name on the hub."""
    parts: Iterable[Any] = ()
    if isinstance(value, list):
        parts = value
    if isinstance(value, dict):
        parts = value.values()
        for key in KEYS:
            name = value.get(key)
            if isinstance(name, str) and ("/" in name or ":" in name):
                return name
    return next((found for part in parts if (found := _named(part)) is not None), None)
