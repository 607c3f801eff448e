"""The embedded quickstart's model (`model/`), how it was made (`python -m rlctl.quickstart.make_model`), and the name it goes by."""

from __future__ import annotations

from pathlib import Path

NAME = "quickstart"


def real_path(model: str) -> str:
    """The folder of a model path: the shipped model's for `quickstart`, any other as it is."""
    return str(Path(__file__).parent / "model") if model == NAME else model
