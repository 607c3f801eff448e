"""Commands that install packages into this environment, in place of the `pip install` of hints.

Hints are written for pip. `adapted` translates them where they are shown: a `pip` of the shell may
belong to another Python, and environments of uv have none.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import sys
from functools import cache
from importlib.metadata import PackageNotFoundError, distribution
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import unquote, urlsplit

_PIP = re.compile(r"\bpip (?P<verb>install|uninstall)(?P<yes> -y)?\b")
# Extras of rlctl alone, as a hint writes them.
_OWN_EXTRAS = re.compile(r"\bpip install 'rlctl\[(?P<extras>[\w,-]+)\]'(?! ['\w])")


def adapted(text: str) -> str:
    """Return `text` with its commands of pip for the installer of this environment."""
    if "pip " not in text:
        return text
    if (checkout := _checkout()) is not None:
        text = _OWN_EXTRAS.sub(lambda found: f"{checkout} EXTRAS={found['extras']}", text)
    return _PIP.sub(_replaced, text)


def runnable(command: str, module: str) -> str:
    """Return `command`, which needs `module`: run by uvx if that is missing, else empty."""
    if _has(module):
        return command
    if shutil.which("uvx") is None:
        return ""
    return f"uvx {command}"


def _replaced(found: re.Match[str]) -> str:
    installer = _installer()
    command = f"{installer} {found['verb']}"
    if not installer.startswith("uv "):
        return f"{command}{found['yes'] or ''}"
    if _is_active():
        return command
    return f"{command} --python {shlex.quote(sys.executable)}"


@cache
def _installer() -> str:
    """Return the command of this environment's pip, `uv pip`, or one that installs pip first."""
    python = shlex.quote(sys.executable)
    if _has("pip") and _same_folder(shutil.which("pip")):
        return "pip"
    if _has("pip"):
        return f"{python} -m pip"
    if shutil.which("uv") is not None or _made_by_uv():
        return "uv pip"
    if (Path(sys.prefix) / "conda-meta").is_dir():
        return f"conda install -y -p {shlex.quote(sys.prefix)} pip && {python} -m pip"
    if _has("ensurepip"):
        return f"{python} -m ensurepip && {python} -m pip"
    return f"{python} -m pip"


@cache
def _checkout() -> str | None:
    """Return the `make setup` of the checkout whose `.venv` this environment is, None elsewhere."""
    try:
        origin = json.loads(distribution("rlctl").read_text("direct_url.json") or "{}")
    except (PackageNotFoundError, ValueError):
        return None
    if not origin.get("dir_info", {}).get("editable"):
        return None
    folder = Path(unquote(urlsplit(str(origin.get("url"))).path))
    if not (folder / "Makefile").is_file() or Path(sys.prefix) != folder / ".venv":
        return None
    if _current() == folder:
        return "make setup"
    return f"make -C {shlex.quote(str(folder))} setup"


def _current() -> Path | None:
    try:
        return Path.cwd()
    except OSError:  # the folder no longer exists
        return None


def _is_active() -> bool:
    """Return True if uv finds this environment by itself."""
    active = os.environ.get("VIRTUAL_ENV") or os.environ.get("CONDA_PREFIX")
    return active is not None and Path(active).resolve() == Path(sys.prefix).resolve()


def _made_by_uv() -> bool:
    try:
        text = (Path(sys.prefix) / "pyvenv.cfg").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False
    return re.search(r"^uv\s*=", text, re.MULTILINE) is not None


def _same_folder(command: str | None) -> bool:
    return command is not None and Path(command).parent == Path(sys.executable).parent


def _has(module: str) -> bool:
    return find_spec(module) is not None
