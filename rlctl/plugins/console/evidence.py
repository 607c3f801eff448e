"""Copies of the user's code in the folder of a run, without secrets and bounded in size.

evidence/changes.patch   uncommitted changes of tracked files
evidence/files/          files of code that the configuration names, and modules they import
evidence/index.json      where the files are and their SHA-256, and what was left out
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from modulefinder import ModuleFinder
from pathlib import Path
from typing import Any

from rlctl.code_places import is_users_file, plugin_packages
from rlctl.files import open_record, write_text
from rlctl.plugins.user_code import module_file
from rlctl.recipes.layers import leaves
from rlctl.redaction import redact
from rlctl.runs.provenance import uncommitted_changes

LOG = logging.getLogger(__name__)

FOLDER = "evidence"
PATCH = "changes.patch"
FILES = "files"
INDEX = "index.json"
MAX_FILE = 2**20  # bytes
MAX_TOTAL = 16 * 2**20  # bytes
_SUFFIXES = (".py", ".yaml", ".yml", ".json", ".toml", ".jinja")
_DATA = ("data.*_files*", "trainer.*", "*.model.path")
_CLASS = re.compile(r"^[\s-]*class_name:\s*[\"']?([\w.]+)\.\w+", re.MULTILINE)  # in verl's YAML


@dataclass
class _Copies:
    """Texts to write by name, and the reason of each that is left out."""

    texts: dict[str, str] = field(default_factory=dict[str, str])
    left_out: dict[str, str] = field(default_factory=dict[str, str])
    size: int = 0

    def add(self, name: str, text: str, source: str) -> bool:
        """Add a text, without secrets; return False if it is too large."""
        if len(text) > MAX_FILE or self.size + len(text) > MAX_TOTAL:
            self.left_out[source] = f"more than {MAX_FILE >> 20} MiB, or {MAX_TOTAL >> 20} in total"
            return False
        self.size += len(text)
        self.texts[name] = self.texts.get(name, "") + redact(text)
        return True


def keep(run: Path, recorded: Mapping[str, Any]) -> None:
    """Copy what the run with the configuration `recorded` uses; a failure is a warning."""
    copies = _Copies()
    try:
        for part in patch_parts(Path.cwd()):
            copies.add(PATCH, part, part.partition("\n")[0])
        files: dict[str, dict[str, str]] = {}
        for path in dict.fromkeys(user_files(recorded)):
            name = copy_name(path)
            if (content := read_bounded(path)) is None:
                copies.left_out[str(path)] = "too large, or not a file"
                continue
            if copies.add(f"{FILES}/{name}", content.decode("utf-8", "replace"), str(path)):
                digest = hashlib.sha256(content).hexdigest()
                files[name] = {"path": str(path), "sha256": digest}
        index = {"files": files, "left_out": copies.left_out}
        copies.texts[INDEX] = redact(json.dumps(index, indent=1)) + "\n"
        for name, text in copies.texts.items():
            (run / FOLDER / name).parent.mkdir(parents=True, exist_ok=True)
            write_text(run / FOLDER / name, text)
    except (OSError, ValueError) as error:
        LOG.warning("the run has no copies of your code: %s", error)
    if copies.left_out:
        LOG.warning("not copied into the run: %s", ", ".join(copies.left_out))


def copy_name(path: Path) -> str:
    """Return the name of the copy of a file: its path below the current folder, or below /."""
    if path.is_relative_to(Path.cwd()):
        return str(path.relative_to(Path.cwd()))
    return f"outside/{path.relative_to(path.anchor)}"


def patch_parts(folder: Path) -> list[str]:
    """Return the uncommitted changes around a folder, file by file."""
    changes = uncommitted_changes(folder) or b""
    parts = re.split(r"(?m)^(?=diff --git )", changes.decode("utf-8", "surrogateescape"))
    return [part for part in parts if part]


def read_bounded(path: Path) -> bytes | None:
    """Return the content of a file, None if it is too large, missing, or no regular file."""
    with suppress(OSError):
        if path.is_file():
            with open_record(path.resolve()) as file:
                content = file.read(MAX_FILE + 1)
            if len(content) <= MAX_FILE:
                return content
    return None


def user_files(recorded: Mapping[str, Any]) -> Iterator[Path]:
    """Yield the files of code that a configuration names, and the modules that they import."""
    for key, value in leaves(dict(recorded)).items():
        if any(fnmatchcase(key, pattern) for pattern in _DATA):
            continue
        for text in value if isinstance(value, list | tuple) else [value]:
            for path in _named(str(text)):
                yield path
                yield from _imported(path)


def _named(text: str) -> Iterator[Path]:
    """Yield the user's files that a value names: a path, `module:Name` or `file.py:name`."""
    code = text.rpartition(":")[0] or text
    path = Path(code).expanduser()
    if ":" in text and not code.endswith(".py"):
        path = module_file(code) if re.fullmatch(r"[\w.]+", code) else None
    elif path.suffix not in _SUFFIXES:
        path = None
    if path is None or not path.is_file() or not is_users_file(str(path), plugin_packages):
        return
    yield path.resolve()
    if path.suffix in (".yaml", ".yml"):
        for module in _CLASS.findall((read_bounded(path) or b"").decode("utf-8", "replace")):
            yield from _named(f"{module}:")


def _imported(path: Path) -> Iterator[Path]:
    """Yield the modules that a file imports from its folder or the current one. Runs no code."""
    if path.suffix != ".py":
        return
    finder = ModuleFinder([str(path.parent), str(Path.cwd())], excludes=["rlctl"])
    with suppress(SyntaxError, OSError, ValueError):
        finder.run_script(str(path))
    for module in finder.modules.values():
        file = getattr(module, "__file__", None)
        if file and is_users_file(file, plugin_packages):
            yield Path(file).resolve()
