"""Model of the embedded quickstart: `model/`, made by `python -m rlctl.quickstart.make_model`."""

from __future__ import annotations

from pathlib import Path

NAME = "quickstart"


def real_path(model: str) -> str:
    """Return the folder of the shipped model for `quickstart`; any other path unchanged."""
    return str(Path(__file__).parent / "model") if model == NAME else model
