"""Error of a data file that does not exist, with the files that are near it."""

from __future__ import annotations

from pathlib import Path

from rlctl.errors import ConfigError, Problem
from rlctl.suggest import closest

_SUFFIXES = (".parquet", ".jsonl", ".json")


def missing_file(given: str, path: Path) -> ConfigError:
    """Return the error of `path`, which the user wrote as `given` and which is no file."""
    if path.is_dir():
        message = "the data file is a folder"
        near = sorted(str(file) for file in path.glob("*") if file.suffix.lower() in _SUFFIXES)
        return ConfigError(message, where=str(path), hint=_hint(path, near, given))
    files = path.parent.glob("*")
    near = sorted(file.name for file in files if file.suffix.lower() in _SUFFIXES)
    hint = _hint(path.parent, near, given)
    # Without the suffix, which would make any two names alike.
    stems = {Path(name).stem.replace(".", "_"): name for name in near}
    similar = closest(path.stem.replace(".", "_"), stems)
    fix = None
    if similar is not None:
        fix = (given, str(Path(given).with_name(stems[similar])))
    return ConfigError(Problem("the data file does not exist", str(path), hint, fix))


def _hint(folder: Path, near: list[str], given: str) -> str:
    if near:
        return f"data files in {folder}: {', '.join(near)}"
    hint = "create one with `rlctl new`, `rlctl prep gsm8k` or `rlctl prep arithmetic`"
    if not Path(given).is_absolute():
        hint += "; paths are relative to the current folder"
    return hint
