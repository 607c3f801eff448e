"""`run.json`: what a run is and how it stands, in one small file that is always whole."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from rlctl.errors import ConfigError, RlctlError, as_ours
from rlctl.files import write_text
from rlctl.runs.process import DriverProcess

# `lost` (the process is gone without a word) and `broken` (no readable run.json) are never written: RunStore concludes them.
State = Literal["starting", "running", "finished", "failed", "stopped"]
Last = Literal["finished", "failed", "stopped"]


@dataclass(frozen=True)
class RunRecord:
    """What is known of a run. Times are UTC in ISO 8601.

    `id` names the run to trackers, which keep one history under it over all `attempts`; `data` maps each data file to its SHA-256;
    `trackers` maps a logger to the id that it gave the run; `parent` is the checkpoint whose state the run began with, if it had one;
    `sweep` names the sweep that it belongs to.
    """

    id: str
    name: str
    project: str
    recipe: str
    command: Sequence[str]
    cwd: str
    created: str
    process: DriverProcess
    git: Mapping[str, str | None] | None
    versions: Mapping[str, str | None]
    state: State = "starting"
    exit_code: int | None = None
    ended: str | None = None
    attempts: int = 0
    total_steps: int | None = None
    seeds: Mapping[str, int] = field(default_factory=dict)
    data: Mapping[str, str] = field(default_factory=dict)
    trackers: Mapping[str, str] = field(default_factory=dict)
    parent: Mapping[str, Any] | None = None
    sweep: str | None = None

    def write(self, path: Path) -> None:
        write_text(path, json.dumps(dataclasses.asdict(self), indent=2, ensure_ascii=False) + "\n")

    @classmethod
    def read(cls, path: Path) -> RunRecord:
        """Errors: ConfigError when the file is absent or not a record. Fields of a later rlctl are passed over."""
        try:
            raw: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
            known = {each.name for each in dataclasses.fields(cls)}
            fields = {name: value for name, value in raw.items() if name in known}
            fields["process"] = DriverProcess(**raw["process"])
            return cls(**fields)
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            raise ConfigError(
                f"not a run record: {type(error).__name__}: {error}", where=str(path)
            ) from error


@contextmanager
def ending(tell: Callable[[Last, int], object]) -> Iterator[None]:
    """Whatever ends the block, `tell` hears how: the last state, and the exit code of the process."""
    state, code = "failed", 70
    try:
        yield
        state, code = "finished", 0
    except KeyboardInterrupt:
        state, code = "stopped", 130
        raise
    except SystemExit as asked:  # `Terminated`, `TimeUp`
        state, code = "stopped", int(asked.code or 0)
        raise
    except (RlctlError, OSError) as error:
        ours = as_ours(error)
        code = ours.exit_code if ours else code
        raise
    finally:
        tell(state, code)


def now() -> str:
    """UTC to the millisecond, ISO 8601."""
    return datetime.now(UTC).isoformat(timespec="milliseconds")
