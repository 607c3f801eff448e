"""Models of the embedded quickstart, made by `make quickstart-model`, and paths of models."""

from __future__ import annotations

from pathlib import Path

NAME = "quickstart"  # solves small word problems
AGENT = "quickstart-agent"  # calls a calculator and walks on a grid
VISION = "quickstart-vision"  # names coloured shapes in pictures
MODELS = (NAME, AGENT, VISION)


def real_path(model: str) -> str:
    """Return the folder of a shipped model or of a GGUF file's model; any other path unchanged."""
    if model.lower().endswith(".gguf"):
        from rlctl.gguf_model import folder_of

        return folder_of(model)
    return str(Path(__file__).parent / "models" / model) if model in MODELS else model
