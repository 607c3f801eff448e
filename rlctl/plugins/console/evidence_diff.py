"""Differences between the evidence of two runs, or of a run and the present: `show --diff`."""

from __future__ import annotations

import difflib
import hashlib
import json
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlctl.errors import RlctlError
from rlctl.files import read_record
from rlctl.plugins.console.evidence import (
    FILES,
    FOLDER,
    INDEX,
    PATCH,
    copy_name,
    patch_parts,
    read_bounded,
    user_files,
)
from rlctl.recipes.layers import Origin, nested
from rlctl.recipes.role_table import needed_roles
from rlctl.recipes.unused_keys import unused_keys
from rlctl.recipes.validate import load_config
from rlctl.redaction import redact
from rlctl.runs.provenance import git_state
from rlctl.runs.run import Run
from rlctl.runs.settings import read_settings
from rlctl.runs.trust import check, is_own, is_trusted
from rlctl.runtime.training.run_folder import installed_packages

_NAMES = ("trainer.experiment_name",)


@dataclass(frozen=True)
class Evidence:
    """Sources of a run: settings, commit, patch, texts of files, versions of packages."""

    name: str
    settings: Mapping[str, Any]
    environment: Mapping[str, Any]
    patch: str
    files: Mapping[str, str]

    @classmethod
    def of(cls, run: Run) -> Evidence:
        """Read the sources of a run; those that it does not have are empty."""
        folder = run.path / FOLDER
        files = {
            str(path.relative_to(folder / FILES)): _text(path)
            for path in sorted((folder / FILES).rglob("*"))
            if path.is_file()
        }
        packages: Mapping[str, Any] = _packages(_text(run.path / "env.txt"))
        commit = None
        if run.record is not None:
            packages = packages or run.record.versions
            commit = (run.record.git or {}).get("commit")
        settings = {key: v for key, v in read_settings(run.path).items() if key not in _NAMES}
        environment = {"commit": commit, **packages}
        return cls(run.name, settings, environment, _text(folder / PATCH), files)

    @classmethod
    def present(cls, run: Run) -> Evidence:
        """Return the present sources: the settings of the run, and files, changes and packages."""
        before = cls.of(run)
        now = {name: redact(text.decode("utf-8", "replace")) for name, text in _now(run).items()}
        folder = _folder(run)
        environment = {
            "commit": (git_state(folder) or {}).get("commit"),
            **_packages(installed_packages()),
        }
        patch = "".join(map(redact, patch_parts(folder)))
        return cls("now", before.settings, environment, patch, {**before.files, **now})

    def compared(self, other: Evidence) -> dict[str, Any]:
        """Return the values that differ as pairs, and the texts that differ as unified diffs."""
        names = sorted({*self.files, *other.files})
        texts = {name: (self.files.get(name, ""), other.files.get(name, "")) for name in names}
        return {
            "runs": [self.name, other.name],
            "settings": _pairs(self.settings, other.settings),
            "environment": _pairs(self.environment, other.environment),
            "patch": _unified(self, other, PATCH, self.patch, other.patch),
            "files": {
                name: _unified(self, other, name, *pair)
                for name, pair in texts.items()
                if pair[0] != pair[1]
            },
        }


def changed_files(run: Run, recorded: Mapping[str, Any]) -> list[str]:
    """Return the files of code of the configuration `recorded` that differ from those of a run."""
    with suppress(OSError, ValueError, KeyError, TypeError):
        known = json.loads(read_record(run.path / FOLDER / INDEX))["files"]
        named = {path: known.get(copy_name(path)) for path in user_files(recorded)}
        return [
            str(path)
            for path, file in named.items()
            if file is not None
            and hashlib.sha256(read_bounded(path) or b"").hexdigest() != file["sha256"]
        ]
    return []


def may_read(run: Run) -> bool:
    """Return True if files that a run names may be read: another's run could name any file."""
    return is_own(run.path) or is_trusted(run.path)


def _now(run: Run) -> dict[str, bytes]:
    """Return the present content of the files of code, by the name of their copies."""
    if not may_read(run):
        return {}
    known: dict[str, Path] = {}
    with suppress(OSError, ValueError, KeyError, TypeError):
        files = json.loads(read_record(run.path / FOLDER / INDEX))["files"]
        known = {name: Path(file["path"]) for name, file in files.items()}
    named = (path for path in user_files(read_settings(run.path)) if path not in known.values())
    files = {**known, **{copy_name(path): path for path in named}}
    return {name: read_bounded(path) or b"" for name, path in files.items()}


def _folder(run: Run) -> Path:
    """Return the folder in which one's own run was started, or the current one if it is gone."""
    record = run.record
    started = Path(record.cwd) if record is not None and may_read(run) else Path.cwd()
    return started if started.is_dir() else Path.cwd()


def without_effect(one: Run, other: Run | None, keys: Collection[str]) -> list[str]:
    """Return those of `keys` that no part of the runs reads, or of one run if `other` is None."""
    runs = [one] if other is None else [one, other]
    if not keys:
        return []
    unread = [_without_effect(run, keys) for run in runs]
    return sorted(set.intersection(*unread))


def _without_effect(run: Run, keys: Collection[str]) -> set[str]:
    """Return those of `keys` that a run does not read.

    None if it is another's that names code, if its file is damaged, or if its code fails.
    """
    from rlctl.plugins.user_code import report_errors
    from rlctl.runtime.build import load_algorithm  # takes seconds

    settings = read_settings(run.path)
    given = {key: [Origin(settings[key], "", 3)] for key in keys if key in settings}
    with suppress(RlctlError), report_errors("the settings cannot be read"):
        check(run.path)
        config = load_config(nested(settings))
        needs = load_algorithm(config, 1).needs
        roles = {role.name for role in needed_roles(config, needs)}
        found = {unused.key for unused in unused_keys(nested(settings), given, roles)}
        return found | (set(keys) - given.keys())
    return set()


def _text(path: Path) -> str:
    with suppress(OSError):
        return read_record(path).decode("utf-8", "replace")
    return ""


def _packages(text: str) -> dict[str, str]:
    pairs = (line.removeprefix("# ").replace("==", " ").split() for line in text.splitlines())
    return {pair[0]: pair[1] for pair in pairs if len(pair) == 2}


def _pairs(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, list[Any]]:
    keys = dict.fromkeys([*one, *other])
    rows = {key: [one.get(key), other.get(key)] for key in keys}
    return {key: row for key, row in rows.items() if row[0] != row[1]}


def _unified(one: Evidence, other: Evidence, name: str, before: str, after: str) -> str:
    texts = (before.splitlines(), after.splitlines())
    names = (f"{one.name}/{name}", f"{other.name}/{name}")
    return "\n".join(difflib.unified_diff(*texts, *names, lineterm=""))
