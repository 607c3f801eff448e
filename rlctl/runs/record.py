"""Contents of `run.json`: identity, state and provenance of a run."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

import orjson

from rlctl.causes import as_rlctl_error
from rlctl.errors import ConfigError, InternalError, NotFoundError
from rlctl.files import read_record, write_text
from rlctl.process import DriverProcess
from rlctl.redaction import redact_texts, redact_word

# RunStore derives two more states, which are never written: `lost` (the process disappeared while
# the run was active) and `broken` (no readable run.json).
State = Literal["starting", "running", "finished", "failed", "stopped"]
Last = Literal["finished", "failed", "stopped"]


@dataclass(frozen=True)
class RunRecord:
    """Record of a run. Times are UTC in ISO 8601.

    `seconds` is the duration of all attempts that have ended, `began` the uptime of the host at the
    start of the last one; `config_sha256` is the hash of config.yaml.
    `id` identifies the run to trackers across all `attempts`; `data` maps each data file to its
    SHA-256, `reward_code` each file or module of reward functions, `models` each model or tokenizer
    to a hash of its files, and `environment` each key that was read from the environment to a tag
    of its value; `trackers` maps a logger to the id that it assigned; `parent` is the checkpoint
    that initialised the run, if any; `skipped_rows` counts by reason the training rows that
    `data.skip_invalid` left out; `sweep` is the name of the sweep that started it. `failure` is
    `failure_of` the error that ended the last attempt, None unless `state` is `failed`.
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
    failure: Mapping[str, str | None] | None = None
    ended: str | None = None
    seconds: float | None = None
    began: float | None = None
    attempts: int = 0
    total_steps: int | None = None
    seeds: Mapping[str, int] = field(default_factory=dict)
    config_sha256: str | None = None
    data: Mapping[str, str] = field(default_factory=dict)
    reward_code: Mapping[str, str] = field(default_factory=dict)
    models: Mapping[str, str] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    trackers: Mapping[str, str] = field(default_factory=dict)
    parent: Mapping[str, Any] | None = None
    skipped_rows: Mapping[str, int] = field(default_factory=dict)
    sweep: str | None = None

    def write(self, path: Path) -> None:
        """Write the record atomically."""
        write_text(path, self.text())

    def text(self) -> str:
        """Return the record as JSON, without secrets."""
        fields = redact_texts(dataclasses.asdict(self))
        fields["command"] = [redact_word(word) for word in self.command]
        return json.dumps(fields, indent=2, ensure_ascii=False) + "\n"

    @classmethod
    def read(cls, path: Path | str) -> RunRecord:
        """Read a record; ignore fields written by a later version of rlctl.

        Raises NotFoundError when the file is missing, and ConfigError when it is no record.
        """
        try:
            raw: dict[str, Any] = orjson.loads(read_record(path))
            for name in raw.keys() - cls.__dataclass_fields__.keys():
                del raw[name]
            raw["process"] = DriverProcess.from_dict(raw["process"])
            return cls(**raw)
        except FileNotFoundError as error:
            raise NotFoundError("not a run record: the file is missing", where=str(path)) from error
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            reason = f"{type(error).__name__}: {error}"
            raise ConfigError(f"not a run record: {reason}", where=str(path)) from error


@contextmanager
def recorded_end(report: Callable[[Last, int, Exception | None], object]) -> Iterator[None]:
    """Call `report` with the final state, exit code and error however the block ends."""
    state = "failed"
    code = InternalError.exit_code
    failure: Exception | None = None
    try:
        yield
        state = "finished"
        code = 0
    except KeyboardInterrupt:
        state = "stopped"
        code = 130
        raise
    except (Exception, SystemExit) as error:
        failure = as_rlctl_error(error)
        if failure is not None:
            code = failure.exit_code
        elif isinstance(error, SystemExit):  # `Terminated`, `TimeUp`
            state = "stopped"
            code = int(error.code or 0)
        else:
            failure = error
        raise
    finally:
        report(state, code, failure)


def failure_of(error: Exception) -> dict[str, str | None]:
    """Return `code`, one-line `message` and `hint` of the first problem of an error."""
    from rlctl.error_codes import code_of

    known = as_rlctl_error(error) or InternalError(
        f"internal error: {type(error).__name__}: {error}",
        hint="please report this bug; `rlctl --debug …` prints the traceback",
    )
    first = known.problems[0]
    message = " ".join(first.message.split())
    code = first.code or code_of(first.message, known)
    if code == "E-PLUGIN" and first.where:
        message += f" ({first.where})"
    return {"code": code, "message": message, "hint": first.help}


def message_of(error: Exception | None) -> str | None:
    """Return the one-line message of `failure_of` without secrets, None without an error."""
    return redact_texts(failure_of(error)["message"]) if error is not None else None


def now() -> str:
    """Return the current time: UTC, ISO 8601, milliseconds."""
    return datetime.now(UTC).isoformat(timespec="milliseconds")
