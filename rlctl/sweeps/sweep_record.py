"""Folder of a sweep and its record `sweep.json`, next to the folders of its runs."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from rlctl.errors import ConfigError, NotFoundError, UsageError
from rlctl.files import read_record, write_text
from rlctl.process import Access, DriverProcess
from rlctl.runs.record import now

if TYPE_CHECKING:
    from rlctl.runs.ownership import Place

RECORD_FILE = "sweep.json"
TABLE_FILE = "trials.json"
State = Literal["running", "finished", "failed", "stopped"]
_STARTS = ("project", "verb", "recipe", "base", "fixed", "axes", "cwd")  # what starts its runs


@dataclass(frozen=True)
class Trial:
    """Number of a trial and the overrides that set its values."""

    number: int
    overrides: Sequence[str]


@dataclass(frozen=True)
class Outcome:
    """State of a trial: waiting, running, finished, pruned, failed or stopped.

    `value` is its objective, `values` the reported values by step, `reason` why it has no result.
    """

    trial: Trial
    state: str
    value: float | None
    values: Mapping[int, float]
    reason: str = ""


@dataclass(frozen=True)
class TrialTable:
    """Contents of `trials.json`: the state of the study, readable without Optuna.

    `importances` are those of `Study.importances`.
    """

    outcomes: Sequence[Outcome]
    importances: Mapping[str, float]


@dataclass(frozen=True)
class SweepRecord:
    """Contents of `sweep.json`. Times are UTC in ISO 8601.

    `fixed` are the overrides that all trials share and `axes` those with several values, both as on
    a command line. `settings` is the composed section `sweep`, `base` the level-1 recipe below
    `recipe`, and `config_sha256` the digest that detects a changed recipe. `retried` counts the
    restarts of each run after a crash. `first_data_seed` is that of the first seed of each trial;
    None: all seeds share the order of the data.
    """

    name: str
    project: str
    verb: str
    recipe: str
    base: str
    fixed: Sequence[str]
    axes: Sequence[str]
    settings: Mapping[str, Any]
    config_sha256: str
    total_steps: int
    first_seed: int
    command: Sequence[str]
    cwd: str
    created: str
    process: DriverProcess
    state: State = "running"
    exit_code: int | None = None
    ended: str | None = None
    retried: Mapping[str, int] = field(default_factory=dict)
    first_data_seed: int | None = None

    @classmethod
    def read(cls, folder: Path) -> SweepRecord:
        """Read the record in `folder`; raise ConfigError if there is none or it is damaged."""
        from rlctl.sweeps.received import checked_record

        path = folder / RECORD_FILE
        try:
            raw: dict[str, Any] = json.loads(read_record(path))
            return checked_record(raw)
        except (OSError, ValueError, RecursionError) as error:
            raise ConfigError(
                f"cannot read the record of a sweep: {error}", where=str(path)
            ) from error


class SweepDir:
    """Folder `runs/<project>/<sweep>/`: `sweep.json`, the study, its table and logs of all runs."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.record = SweepRecord.read(path)

    @classmethod
    def create(cls, root: Path, record: SweepRecord, access: Access = "owner") -> SweepDir:
        """Create the folder of a new sweep; `access` says who can read it, as for a run."""
        from rlctl.sweeps.new_folder import create

        return create(root, record, access)

    @property
    def place(self) -> Place:
        """Place of the sweep, which a copy of its folder does not have."""
        return self.place_at(self.path)

    def place_at(self, home: Path) -> Place:
        """Return the place of the sweep whose folder is or will be called `home`."""
        from rlctl.runs.ownership import Place

        identity = f"{self.record.name}:{self.record.created}".encode()
        return Place.of(hashlib.sha256(identity).hexdigest()[:16], self.path, home)

    @property
    def digest(self) -> str:
        """SHA-256 of what the record says about the runs to start."""
        fields = dataclasses.asdict(self.record)
        given = [fields[name] for name in (*_STARTS, "settings", "config_sha256")]
        return hashlib.sha256(json.dumps(given, sort_keys=True, default=str).encode()).hexdigest()

    def update(self, **changes: Any) -> None:
        """Change fields of `sweep.json` atomically."""
        self.record = dataclasses.replace(self.record, **changes)
        _write(self.path / RECORD_FILE, self.record)

    def read_table(self) -> TrialTable | None:
        """Return the state of the study; None before it is written, or if it is damaged.

        Trials that had not ended when the sweep did are `stopped`.
        """
        from rlctl.sweeps.received import checked_table

        is_running = self.state == "running"
        try:
            table = checked_table(json.loads(read_record(self.path / TABLE_FILE)))
        except (OSError, ValueError, RecursionError):
            return None
        outcomes = list(table.outcomes)
        for index, outcome in enumerate(outcomes):
            if not is_running and outcome.state in ("waiting", "running"):
                outcomes[index] = dataclasses.replace(outcome, state="stopped")
        return TrialTable(outcomes, table.importances)

    def write_table(self, table: TrialTable) -> None:
        """Replace `trials.json`."""
        _write(self.path / TABLE_FILE, table)

    def finish(self, state: State, exit_code: int) -> None:
        """Record the final state and exit code."""
        self.update(state=state, exit_code=exit_code, ended=now())

    @property
    def storage(self) -> Path:
        """Database of Optuna's study."""
        return self.path / "study.db"

    def log(self, run: str) -> Path:
        """Return the file with the output of a run's process."""
        return self.path / "logs" / f"{run}.log"

    def run_folder(self, run: str) -> Path:
        """Return the folder of a run."""
        return self.path.parent / run

    @property
    def state(self) -> str:
        """Recorded state, or `lost` if the sweep should be running but its process is gone."""
        if self.record.state == "running" and self.record.process.alive(self.path) is False:
            return "lost"
        return self.record.state

    def run_name(self, trial: int, seed: int) -> str:
        """Return the name of a trial's run; a function of the numbers only, so it is stable."""
        name = f"{self.record.name}-{trial:03d}"
        if self.record.settings["seeds"] > 1:
            name += f"-seed{seed}"
        return name


def sweeps(root: Path) -> list[SweepDir]:
    """Return all sweeps under `root` with a readable record, newest first."""
    found: list[SweepDir] = []
    for path in root.glob(f"[!.]*/[!.]*/{RECORD_FILE}"):
        try:
            found.append(SweepDir(path.parent))
        except ConfigError:
            continue
    return sorted(found, key=lambda sweep: sweep.record.created, reverse=True)


def find_sweep(root: Path, selector: str) -> SweepDir:
    """Return the sweep that `selector` names: `@last`, a folder, a name, or a unique name prefix.

    Raises NotFoundError without a match, UsageError for several matches.
    """
    if not selector.strip():
        raise UsageError(
            "the name of the sweep is empty", hint="`rlctl sweeps` lists the names; or use @last"
        )
    if os.path.isfile(Path(selector) / RECORD_FILE):  # False for a name that is too long
        return SweepDir(Path(selector))
    known = sweeps(root)
    if selector == "@last" and known:
        return known[0]
    return matching_sweep(known, selector, root)


def matching_sweep(known: Sequence[SweepDir], selector: str, root: Path) -> SweepDir:
    """Return the one of the `known` sweeps with this name or beginning of a name.

    Raises NotFoundError without a match, UsageError for several matches.
    """
    matches = [sweep for sweep in known if sweep.record.name == selector] or [
        sweep for sweep in known if sweep.record.name.startswith(selector)
    ]
    if len(matches) > 1:
        raise UsageError(
            f"{selector!r} matches {len(matches)} sweeps",
            hint=f"one of: {', '.join(sweep.record.name for sweep in matches[:8])}",
        )
    if not matches:
        listing = ", ".join(sweep.record.name for sweep in known[:8]) or "none"
        raise NotFoundError(
            f"no sweep is named {selector!r}",
            where=str(root.resolve()),
            hint=f"sweeps in this folder: {listing}",
        )
    return matches[0]


def names_sweep(root: Path, selector: str) -> bool:
    """Return True if `selector` is a sweep's folder, name or name prefix, and not a run.

    The name of a sweep's run is the sweep's name plus a number, so it matches no sweep.
    """
    if os.path.isfile(Path(selector) / RECORD_FILE):  # False for a name that is too long
        return True
    return bool(selector) and any(
        path.parent.name.startswith(selector) for path in root.glob(f"[!.]*/[!.]*/{RECORD_FILE}")
    )


def _write(path: Path, content: SweepRecord | TrialTable) -> None:
    write_text(path, json.dumps(dataclasses.asdict(content), indent=2, ensure_ascii=False) + "\n")
