"""Address of the Ray cluster of a run."""

from __future__ import annotations

import os

from rlctl.recipes import schema


def address_of(init: schema.RayInit) -> str | None:
    """Return the address of the cluster to connect to; None if one starts on this machine."""
    return init.address or os.environ.get("RAY_ADDRESS")
