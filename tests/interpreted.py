"""Triton's interpreter for tests, in processes that have set it up before they import Triton."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.gpu.entry_points import ROOT

_CODE = """\
import pickle, sys
from pathlib import Path
function, args = pickle.loads(Path(sys.argv[1]).read_bytes())
Path(sys.argv[1]).write_bytes(pickle.dumps(function(*args)))
"""


def interpreted(function: Callable[..., Any], *args: Any) -> Any:
    """Return `function(*args)` of a process whose Triton interprets kernels.

    Raises subprocess.CalledProcessError if it fails or dies.
    """
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "call"
        file.write_bytes(pickle.dumps((function, args)))
        command = [sys.executable, "-c", _CODE, str(file)]
        environment = os.environ | {"TRITON_INTERPRET": "1"}
        subprocess.run(command, check=True, env=environment, cwd=ROOT, timeout=600)
        return pickle.loads(file.read_bytes())
