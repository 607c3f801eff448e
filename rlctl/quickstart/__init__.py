"""Models of the embedded quickstart, made by `make quickstart-model`.

`quickstart` solves small word problems; `quickstart-agent` calls a calculator and walks on a grid;
`quickstart-vision` names coloured shapes in pictures.
"""

from __future__ import annotations

from pathlib import Path

NAME = "quickstart"
AGENT = "quickstart-agent"
VISION = "quickstart-vision"
FOLDERS = {NAME: "model", AGENT: "agent_model", VISION: "vision_model"}


def real_path(model: str) -> str:
    """Return the folder of a shipped model; any other path unchanged."""
    return str(Path(__file__).parent / FOLDERS[model]) if model in FOLDERS else model
