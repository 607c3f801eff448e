"""Registry of runs: their folders."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from rlctl.errors import NotFoundError
from rlctl.log import warn_once
from rlctl.quickstart import MODELS
from rlctl.runs.labels import LABELS_FILE, Labels
from rlctl.runs.naming import DEFAULT_ROOT
from rlctl.runs.run import ACTIVE, Run, Stamp, build_run, is_run, stamp
from rlctl.runs.run_dir import RECORD_FILE
from rlctl.storage import is_url


class RunStore:
    """All runs under `root`, by default `runs`, in folders `<project>/<run>/`."""

    def __init__(self, root: Path | None) -> None:
        self.root = root or DEFAULT_ROOT
        self._known: dict[str, tuple[tuple[Stamp | None, ...], Run]] = {}  # by folder

    def runs(self) -> list[Run]:
        """Return active runs, then the others; both newest first."""
        folders = [run.path for project in _subfolders(self.root) for run in _subfolders(project)]
        with _no_collection():
            found = [run for folder in folders if (run := self._read(folder)) is not None]
        # The process of a lost run may have finished it between the two checks.
        again = [self._read(str(run.path)) if run.state == "lost" else run for run in found]
        found = [run for run in again if run is not None]
        return sorted(found, key=lambda run: (run.state in ACTIVE, run.created), reverse=True)

    def _read(self, folder: str) -> Run | None:
        """Return the run in a folder, if there is one; read its files only if they have changed."""
        now = stamp(f"{folder}/{RECORD_FILE}"), stamp(f"{folder}/{LABELS_FILE}")
        if now[0] is None and not is_run(Path(folder)):
            return None
        before, run = self._known.get(folder, (None, None))
        if run is not None and before == now:
            return replace(run)
        labels = None
        if now[1] is None:
            labels = Labels()
        self._known[folder] = now, build_run(Path(folder), labels)
        return self._known[folder][1]

    def find(self, selector: str) -> Run:
        """Return the run that `selector` names.

        A selector is `@last`, `@failed` (the newest failed or lost run), `@best:METRIC`,
        `@tag:TAG` (the newest), the path of a folder, or a name, `project/name` or id, of which an
        unambiguous prefix is enough. Raises UsageError when several runs match, NotFoundError when
        none does, ConflictError for another's run with a folder that is a link.
        """
        from rlctl.runs.selectors import find

        return find(self, selector)


@contextmanager
def _no_collection() -> Iterator[None]:
    """Do not collect garbage in the block, which makes many objects and no cycles."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _subfolders(folder: Path | os.DirEntry[str]) -> Iterator[os.DirEntry[str]]:
    """Yield the subfolders that are not hidden (the trash is) and whose names are UTF-8."""
    try:
        entries = os.scandir(folder)
    except OSError:
        return
    with entries:
        for entry in entries:
            if entry.name.startswith(".") or not entry.is_dir():
                continue
            if entry.name.encode(errors="ignore").decode() != entry.name:
                warn_once(f"skipped a folder whose name is no UTF-8: {entry.path!a}; rename it")
                continue
            yield entry


def find_run_or_model(target: str, root: Path | None) -> Run | str:
    """Return `target` if it is a model: a folder, GGUF file, URL or bundled one; else the run.

    Raises NotFoundError if it is neither.
    """
    is_model = target in MODELS or (Path(target).expanduser() / "config.json").is_file()
    if is_model or is_url(target) or target.lower().endswith(".gguf"):
        return target
    try:
        return RunStore(root).find(target)
    except NotFoundError as error:
        no_folder = f"{target} is no model folder with config.json either; `quickstart` is a model"
        raise NotFoundError(
            *(replace(problem, hint=f"{problem.hint}; {no_folder}") for problem in error.problems)
        ) from error
