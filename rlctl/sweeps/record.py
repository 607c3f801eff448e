"""`sweep.json`: what a sweep is and how it stands, in the sweep's own folder beside the folders of its runs."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from rlctl.errors import ConfigError, NotFoundError, UsageError
from rlctl.files import write_text
from rlctl.runs.process import DriverProcess
from rlctl.runs.record import now

RECORD_FILE = "sweep.json"
State = Literal["running", "finished", "failed", "stopped"]


@dataclass(frozen=True)
class SweepRecord:
    """What is known of a sweep. Times are UTC in ISO 8601.

    `fixed` are the overrides that all trials share and `axes` those that name several values, as a command line writes them; `settings`
    is the section `sweep` as composed; `base` names the level-1 recipe under `recipe`; `config_sha256` tells whether the recipe still
    says what it said when the sweep began.
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
    retried: Mapping[str, int] = field(
        default_factory=dict
    )  # run -> how often it was started again after a crash

    @classmethod
    def read(cls, folder: Path) -> SweepRecord:
        """Raises ConfigError when the folder holds no readable record."""
        path = folder / RECORD_FILE
        try:
            raw: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
            known = {each.name for each in dataclasses.fields(cls)}
            fields: dict[str, Any] = {name: value for name, value in raw.items() if name in known}
            fields["process"] = DriverProcess(**raw["process"])
            return cls(**fields)
        except (OSError, ValueError, TypeError, LookupError) as error:
            raise ConfigError(f"no readable record of a sweep: {error}", where=str(path)) from error


class SweepDir:
    """The folder `runs/<project>/<sweep>/`: `sweep.json`, the study of Optuna, and what each trial's process printed."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.record = SweepRecord.read(path)

    @classmethod
    def create(cls, root: Path, record: SweepRecord) -> SweepDir:
        path = root / record.project / record.name
        (path / "logs").mkdir(parents=True)
        _write(path, record)
        return cls(path)

    def update(self, **changes: Any) -> None:
        """Change fields of `sweep.json`, all at once or not at all."""
        self.record = dataclasses.replace(self.record, **changes)
        _write(self.path, self.record)

    def finish(self, state: State, exit_code: int) -> None:
        """The last word of a sweep, until it is resumed."""
        self.update(state=state, exit_code=exit_code, ended=now())

    @property
    def storage(self) -> Path:
        return self.path / "study.db"

    def log(self, run: str) -> Path:
        """What the process of a run printed."""
        return self.path / "logs" / f"{run}.log"

    def run_folder(self, run: str) -> Path:
        return self.path.parent / run

    @property
    def state(self) -> str:
        """As recorded, but `lost` when it should be running and its process is gone."""
        return (
            "lost"
            if self.record.state == "running" and self.record.process.alive() is False
            else self.record.state
        )

    def run_name(self, trial: int, seed: int) -> str:
        """The name of one run of a trial: made of the numbers, so that no run is ever started under two names."""
        return f"{self.record.name}-{trial:03d}" + (
            f"-seed{seed}" if self.record.settings["seeds"] > 1 else ""
        )


def sweeps(root: Path) -> list[SweepDir]:
    """All sweeps under `root` whose record can be read, newest first."""
    found: list[SweepDir] = []
    for path in root.glob(f"[!.]*/[!.]*/{RECORD_FILE}"):
        try:
            found.append(SweepDir(path.parent))
        except ConfigError:
            continue
    return sorted(found, key=lambda sweep: sweep.record.created, reverse=True)


def find_sweep(root: Path, selector: str) -> SweepDir:
    """The sweep that `selector` names: `@last`, its folder, its name, or a beginning of the name that no other sweep shares.

    Raises NotFoundError when there is none, UsageError when there are several.
    """
    if (Path(selector) / RECORD_FILE).is_file():
        return SweepDir(Path(selector))
    there = sweeps(root)
    if selector == "@last" and there:
        return there[0]
    matches = [each for each in there if each.record.name == selector] or [
        each for each in there if each.record.name.startswith(selector)
    ]
    if len(matches) > 1:
        raise UsageError(
            f"{selector!r} names {len(matches)} sweeps",
            hint=f"one of: {', '.join(each.record.name for each in matches[:8])}",
        )
    if not matches:
        listing = ", ".join(each.record.name for each in there[:8]) or "none"
        raise NotFoundError(
            f"no sweep is named {selector!r}",
            where=str(root.resolve()),
            hint=f"sweeps there: {listing}",
        )
    return matches[0]


def names_sweep(root: Path, selector: str) -> bool:
    """Whether `selector` names a sweep, for the commands that take a run as well: its folder, or its name from the beginning on.

    A run of a sweep is named after it with a number behind, so what is longer than every sweep's name names a run.
    """
    if (Path(selector) / RECORD_FILE).is_file():
        return True
    return bool(selector) and any(
        each.parent.name.startswith(selector) for each in root.glob(f"[!.]*/[!.]*/{RECORD_FILE}")
    )


def _write(path: Path, record: SweepRecord) -> None:
    write_text(
        path / RECORD_FILE,
        json.dumps(dataclasses.asdict(record), indent=2, ensure_ascii=False) + "\n",
    )
