"""Start of a Ray worker, in place of Ray's script of this name, which first imports Ray (0.5 s).

Ray's daemon runs it with the worker's script and arguments, and with the runtime environment.
"""

import json
import os
import re
import shlex
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NoReturn

_CONTEXT = "--serialized-runtime-env-context="
_PYTHON = "--language=PYTHON"
# What Ray's script does beyond these is left to it.
_KNOWN = {"env_vars", "py_executable"}


def start(words: list[str]) -> NoReturn:
    """Become the worker with the arguments `words`, in its runtime environment."""
    given = [word.removeprefix(_CONTEXT) for word in words if word.startswith(_CONTEXT)]
    context: dict[str, Any] = json.loads("".join(given) or "{}")
    if context.get("py_executable") in (None, sys.executable):  # Ray does not quote a space
        context["py_executable"] = shlex.quote(sys.executable)
    rest = [word for word in words if not word.startswith(_CONTEXT)]
    if _PYTHON not in words or any(context[name] for name in context.keys() - _KNOWN):
        ray = find_spec("ray")
        folder = Path(ray.origin).parent if ray and ray.origin else None
        assert folder is not None, "Ray runs this"
        script = folder / "_private" / "workers" / "setup_worker.py"
        os.execv(sys.executable, [sys.executable, script, *rest, _CONTEXT + json.dumps(context)])
    for name, value in (context.get("env_vars") or {}).items():
        # Variables that do not exist are empty.
        os.environ[name] = re.sub(r"\$\{[A-Z0-9_]+\}", "", os.path.expandvars(value))
    python = shlex.split(context["py_executable"])
    os.execv(python[0], [*python, *(word for word in rest if word != _PYTHON)])


if __name__ == "__main__":
    start(sys.argv[1:])
