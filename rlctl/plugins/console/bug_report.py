"""Archive for a bug report: versions, environment, checks and a run's records, without secrets.

Prompts, responses, data and weights are never included.
"""

from __future__ import annotations

import json
import os
import platform
import sys
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import yaml

from rlctl.errors import ConflictError
from rlctl.files import replacing
from rlctl.redaction import is_secret_name, redact, redact_value, register
from rlctl.runs.provenance import installed_versions
from rlctl.runs.run import Run
from rlctl.tracking.jsonl import METRICS_FILE

MAX_BYTES = 2**20  # of one file; the end of a longer one is kept
MAX_FILES = 64  # of logs
NUM_ROWS = 50  # of metrics
# Variables that change what rlctl and its libraries do.
_PREFIXES = (
    *("RLCTL_", "RAY_", "CUDA_", "NVIDIA_", "NCCL_", "TORCH", "PYTORCH_", "OMP_", "GOMP_", "MKL_"),
    *("HF_", "TRANSFORMERS_", "VLLM_", "SGLANG_", "WANDB_", "SWANLAB_", "MLFLOW_", "SLURM_"),
    *("PYTHON", "LC_", "LANG", "TMPDIR", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "VIRTUAL_ENV"),
)
_RECORDS = ("run.json", "config.yaml", "origins.json", "labels.json", "events.jsonl")


@dataclass(frozen=True)
class Item:
    """File of the archive: its size in bytes, and a remark such as `last 50 rows`."""

    name: str
    bytes: int
    remark: str = ""


def default_name() -> str:
    """Return a name for the archive in the current folder."""
    return f"rlctl-bug-report-{datetime.now():%y%m%d-%H%M%S}.zip"


def write_bug_report(
    target: Path, checks: Sequence[Mapping[str, Any]], run: Run | None = None
) -> list[Item]:
    """Write the zip archive `target` and return its contents.

    `checks` are the results of `rlctl doctor`. Values of secret environment variables are replaced
    wherever they appear. Raises ConflictError if `target` exists, and the error of
    `cannot_write`.
    """
    for name, value in os.environ.items():
        if is_secret_name(name):
            register(value, name)
    parts = list(_about_the_machine(checks))
    if run is not None:
        parts += _about(run)
    items = [Item(name, len(text.encode()), remark) for name, text, remark in parts]
    parts.insert(0, ("README.txt", _readme(items, run), ""))
    if target.exists():
        raise ConflictError(
            f"{target} already exists", hint="write to another file, or delete this one"
        )
    try:
        with replacing(target) as aside, zipfile.ZipFile(aside, "x", zipfile.ZIP_DEFLATED) as file:
            aside.chmod(0o600)
            for name, text, _ in parts:
                file.writestr(f"{target.stem}/{name}", text)
    except OSError as error:
        from rlctl.write_errors import cannot_write

        hint = "rlctl doctor --bug-report /tmp/report.zip"
        raise cannot_write("the archive", target, error, hint) from error
    return items


def _about_the_machine(checks: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, str, str]]:
    """Yield name, text and remark of the files that describe installation and machine."""
    packages = sorted(
        {f"{package.name}=={package.version}" for package in distributions()}, key=str.lower
    )
    yield "versions.json", _json({**installed_versions(), "packages": packages}), ""
    variables = {
        name: redact_value(value, name)
        for name, value in sorted(os.environ.items())
        if name.upper().startswith(_PREFIXES)
    }
    facts = {
        "platform": platform.platform(),
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        "python": sys.version,
        "executable": sys.executable,
        "container": Path("/.dockerenv").exists() or "container" in os.environ,
        "variables": variables,
    }
    yield "environment.json", _json(facts), "variables of rlctl and its libraries only"
    yield "doctor.json", _json([dict(check) for check in checks]), ""


def _about(run: Run) -> Iterator[tuple[str, str, str]]:
    """Yield name, text and remark of the files that describe a run."""
    for name in _RECORDS:
        if (path := _own(run, run.path / name)) is not None:
            text, remark = _tail(path)
            yield f"run/{name}", _clean(path, text), remark
    if (path := _own(run, run.path / METRICS_FILE)) is not None:
        text, _ = _tail(path)
        rows = text.splitlines()[-NUM_ROWS:]
        yield f"run/{path.name}", _clean(path, "\n".join(rows)), f"last {len(rows)} rows"
    folder = run.path / "attempts" / "latest"
    logs = sorted(path for pattern in ("*.log", "*.txt") for path in folder.glob(pattern))
    for log in logs[:MAX_FILES]:
        if (path := _own(run, log)) is not None:
            text, remark = _tail(path)
            yield f"run/logs/{path.name}", redact(text), remark
    if len(logs) > MAX_FILES:
        rest = "\n".join(path.name for path in logs[MAX_FILES:])
        yield "run/logs/left_out.txt", rest, f"{len(logs) - MAX_FILES} more logs"


def _own(run: Run, path: Path) -> Path | None:
    """Return the real path of a file of the run; None without one, or for a link out of the run."""
    found = path.resolve()
    return found if found.is_file() and found.is_relative_to(run.path.resolve()) else None


def _tail(path: Path) -> tuple[str, str]:
    """Return the text of a file, or the end of a long one, and a remark about it."""
    size = path.stat().st_size
    with path.open("rb") as file:
        file.seek(max(0, size - MAX_BYTES))
        text = file.read().decode(errors="replace")
    if size <= MAX_BYTES:
        return text, ""
    return text.partition("\n")[2], f"end of {size:,} bytes"


def _clean(path: Path, text: str) -> str:
    """Return a record without secrets: by key if it can be parsed, else by their shape."""
    try:
        match path.suffix:
            case ".json":
                return _json(redact_value(json.loads(text)))
            case ".yaml":
                return yaml.safe_dump(redact_value(yaml.safe_load(text)), sort_keys=False)
            case _:
                rows = [json.loads(line) for line in text.splitlines() if line.strip()]
                return "".join(json.dumps(redact_value(row)) + "\n" for row in rows)
    except (ValueError, yaml.YAMLError):
        return redact(text)


def _json(value: Any) -> str:
    return redact(json.dumps(value, indent=1, default=str, ensure_ascii=False)) + "\n"


def _readme(items: Sequence[Item], run: Run | None) -> str:
    about = f" and the run {run.key}" if run is not None else ""
    listing = ""
    for item in items:
        remark = f" ({item.remark})" if item.remark else ""
        listing += f"{item.bytes:>10,}  {item.name}{remark}\n"
    return (
        f"Report of `rlctl doctor --bug-report` about this installation{about}.\n"
        "Secrets are replaced by <secret>. Prompts, responses, data and weights are not included.\n"
        f"Look through the files before you send them.\n\n{listing}"
    )
