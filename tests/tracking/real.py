"""Attempts of a run with real trackers, and readers of their files, each in its own process."""

from __future__ import annotations

import json
import math
import os
import struct
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rlctl.errors import RlctlError
from rlctl.tracking.delivery import TrackerTimeouts
from rlctl.tracking.fanout import Trackers
from rlctl.tracking.loggers import preflight
from rlctl.tracking.tracker import RunInfo, Sample
from tests.processes import run_python

ROOT = Path(__file__).parents[2]
LOGGERS = ("swanlab", "wandb", "tensorboard", "mlflow", "trackio")
STEP = "training/global_step"  # W&B's axis
Curves = dict[str, dict[int, float]]


def row(step: int) -> dict[str, float]:
    """Return metrics with hard cases: an int, a name with @, tiny and large values, NaN."""
    val = {"val-core/openai/gsm8k/acc/mean@1": step / 7} if step % 2 == 0 else {}
    return {
        "critic/score/mean": math.sin(step),
        "lr": 1e-7 / (step + 1),
        "tokens": 123456 + step,
        "odd": math.nan,
        **val,
    }


def samples(step: int) -> list[Sample]:
    return [
        Sample(
            f"prompt {i}",
            f"# answer {i} of step {step}",
            str(i),
            i / 2,
            {"acc": 0.0},
            4,
            "stop",
            "x",
        )
        for i in range(4)
    ]


def write(
    folder: Path,
    first: int,
    last: int,
    resume_step: int,
    loggers: Sequence[str] = LOGGERS,
    ids: dict[str, str] | None = None,
    params: Mapping[str, Mapping[str, Any]] | None = None,
) -> dict[str, str]:
    """Log the steps from `first` to `last` and return the ids of the trackers' runs."""
    run = folder / "runs" / "house" / "first"
    run.mkdir(parents=True, exist_ok=True)
    (run / "config.yaml").write_text("trainer:\n  seed: 1\n")
    config = {"trainer": {"seed": 1, "note": "x" * 7000}}
    info = RunInfo(
        "abc123",
        "house",
        "first",
        run,
        9,
        config,
        ids or {},
        resume_step,
        {},
        ("blue",),
        "a house",
        num_samples=2,
        sample_seed=3,
    )

    def event(kind: str, /, **fields: Any) -> None:
        with (run / "events.jsonl").open("a") as file:
            file.write(json.dumps({"kind": kind, **fields}) + "\n")

    timeouts = TrackerTimeouts(1000, 300, 300, 300)
    trackers = Trackers.load(loggers, event, timeouts, params=params)
    given = trackers.start(info)
    trackers.begin()
    for step in range(first, last + 1):
        if step % 2 == 0:
            trackers.generations(step, samples(step))
        trackers.log(step, row(step))
    trackers.finish("finished")
    return given


def read(run: Path) -> dict[str, Any]:
    project = run.parent.name
    return {
        "swanlab": [
            swanlab_curves(file)
            for file in sorted(run.glob("swanlog/run-*/*.swanlab"), key=os.path.getmtime)
        ],
        "wandb": [
            wandb_records(path)
            for path in sorted(run.glob("wandb/offline-run-*"), key=os.path.getmtime)
        ],
        "tensorboard": tensorboard_curves(run),
        "mlflow": mlflow_curves(run.parent.parent / "mlflow.db", project),
        "trackio": trackio_curves(project, run.name),
    }


def curves(
    rows: Iterable[Mapping[str, float | None]],
    rename: tuple[str, str] = ("@", "@"),
    single: bool = False,
) -> dict[str, dict[str, float]]:
    """Return finite metrics by name and step (text, as in JSON); `single` rounds to 32 bits."""
    found: dict[str, dict[str, float]] = {}
    for metrics in rows:
        for name, value in metrics.items():
            if name != "step" and value is not None and math.isfinite(value):
                number = struct.unpack("f", struct.pack("f", value))[0] if single else value
                found.setdefault(name.replace(*rename), {})[str(metrics["step"])] = number
    return found


def wandb_curves(lines: Iterable[Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    """Return W&B's history by name and training step; later values replace earlier ones."""
    found: dict[str, dict[str, float]] = {}
    for line in lines:
        for name, value in line.items():
            if not name.startswith(("_", "val/generations", STEP)):
                found.setdefault(name, {})[str(line[STEP])] = value
    return found


def wandb_history(parts: list[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Return the lines of the history of all files."""
    return [
        record["history"]["item"]
        for part in parts
        for record in part
        if record["type"] == "history"
    ]


def swanlab_curves(file: Path) -> Curves:
    """Return the complete records of the file; that of a killed run ends within a record."""
    from swanlab.exceptions import DataStoreError
    from swanlab.proto.swanlab.record.v1.record_pb2 import Record
    from swanlab.sdk.internal.core_python.store import DataStoreReader

    reader = DataStoreReader()
    reader.open(str(file))
    found: Curves = {}
    while True:
        try:
            data = reader.scan()
        except DataStoreError:
            return found
        if data is None:
            return found
        record = Record.FromString(data)
        if record.WhichOneof("record_type") == "scalar":
            found.setdefault(record.scalar.key, {})[record.scalar.step] = record.scalar.value.number
        elif record.WhichOneof("record_type") == "media":
            found.setdefault(record.media.key, {})[record.media.step] = len(
                record.media.value.items
            )


def wandb_records(folder: Path) -> list[dict[str, Any]]:
    """Return the records of the file of an offline run that has ended, with values by name.

    W&B's process writes the last ones after `finish` has returned.
    """
    (file,) = folder.glob("*.wandb")
    deadline = time.monotonic() + 60
    while True:
        found = [wandb_record(data) for data in leveldb_records(file.read_bytes())]
        if found and found[-1]["type"] == "exit":
            return found
        assert time.monotonic() < deadline, f"{file} has no end"
        time.sleep(0.05)


def wandb_record(data: bytes) -> dict[str, Any]:
    from google.protobuf.json_format import MessageToDict
    from wandb.proto.wandb_internal_pb2 import Record

    record = Record.FromString(data)
    kind = record.WhichOneof("record_type")
    content = MessageToDict(getattr(record, kind), preserving_proto_field_name=True)
    places = ((content, "item"), (content, "update"), (content.get("config", {}), "update"))
    for place, name in places:
        if isinstance(place.get(name), list):
            place[name] = {
                ".".join(each.get("nested_key") or [each["key"]]): json.loads(each["value_json"])
                for each in place[name]
            }
    return {"type": kind, kind: content}


def leveldb_records(data: bytes, block: int = 32768, start: int = 7) -> Iterator[bytes]:
    """Yield the records of a log in LevelDB's format, after W&B's header of 7 bytes."""
    at, parts = start, b""
    while at + 7 <= len(data):
        if block - at % block < 7:  # no header fits into the rest of a block
            at += block - at % block
            continue
        _, size, kind = struct.unpack_from("<IHB", data, at)
        parts += data[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # whole, or the last part
            yield parts
            parts = b""


def tensorboard_events(folder: Path) -> Iterator[Any]:
    from tensorboardX.proto.event_pb2 import Event

    for file in sorted(folder.glob("events.out*"), key=lambda path: path.stat().st_mtime):
        data, at = file.read_bytes(), 0
        while at < len(data):
            (length,) = struct.unpack_from("<Q", data, at)
            yield Event.FromString(data[at + 12 : at + 12 + length])
            at += 16 + length


def tensorboard_curves(folder: Path) -> dict[str, Any]:
    """Return curves as TensorBoard shows them: a session start hides later steps of older files."""
    scalars: Curves = {}
    texts: dict[str, dict[int, str]] = {}
    for event in tensorboard_events(folder):
        if event.session_log.status:
            for curve in (*scalars.values(), *texts.values()):
                for step in [step for step in curve if step >= event.step]:
                    del curve[step]
        for value in event.summary.value:
            if value.HasField("simple_value"):
                scalars.setdefault(value.tag, {})[event.step] = value.simple_value
            elif not value.tag.startswith("_hparams_"):
                cells = [cell.decode() for cell in value.tensor.string_val]
                texts.setdefault(value.tag, {})[event.step] = "\n".join(cells)
    return {"scalars": scalars, "texts": texts}


def mlflow_curves(database: Path, project: str) -> dict[str, Any]:
    from mlflow.tracking import MlflowClient

    client = MlflowClient(f"sqlite:///{database}")
    experiment = client.get_experiment_by_name(project)
    assert experiment is not None
    (run,) = client.search_runs([experiment.experiment_id])
    names = client.get_run(run.info.run_id).data.metrics
    curves = {
        name: {each.step: each.value for each in client.get_metric_history(run.info.run_id, name)}
        for name in names
    }
    artifacts = [each.path for each in client.list_artifacts(run.info.run_id, "generations")]
    return {
        "scalars": curves,
        "artifacts": artifacts,
        "status": run.info.status,
        "params": run.data.params,
        "tags": run.data.tags,
    }


def trackio_curves(project: str, run: str) -> dict[str, Any]:
    from trackio.sqlite_storage import SQLiteStorage

    curves: Curves = {}
    tables: list[Any] = []
    runs = SQLiteStorage.get_runs(project)
    for entry in SQLiteStorage.get_logs(project, run):
        for name, value in entry.items():
            if name == "val/generations":
                tables.append(value)
            elif name not in ("step", "timestamp"):
                curves.setdefault(name, {})[entry["step"]] = value
    group = (SQLiteStorage.get_run_config(project, run) or {}).get("_Group")
    return {"scalars": curves, "runs": len(runs), "tables": tables, "group": group}


def mode_of(
    name: str, mode: str | None = None, params: Mapping[str, Mapping[str, Any]] | None = None
) -> str:
    """Return the mode that a logger would use, or the error of its preflight."""
    try:
        return preflight(name, mode, params)
    except RlctlError as error:
        return f"{type(error).__name__} {error}"


def in_a_home(folder: Path) -> dict[str, str]:
    """Return an environment with its own home and without API keys."""
    kept = {name: os.environ[name] for name in ("PATH", "TMPDIR") if name in os.environ}
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    return kept | {"HOME": str(folder), "PYTHONPATH": path}


def call(function: Callable[..., Any], *arguments: Any, home: Path, **environment: str) -> Any:
    """Call a function in a process whose home and working directory is `home`.

    The script of its module calls `main`. Returns what the function returns as JSON; it must print
    nothing to stdout.
    """
    words = ("-m", function.__module__, function.__name__, json.dumps(arguments, default=str))
    variables = in_a_home(home) | {"TRACKIO_DIR": str(home / "trackio")} | environment
    done = run_python(*words, cwd=home, env=variables)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def main(names: Mapping[str, Any]) -> None:
    """Print the result of the call that `call` asks for, of a function in `names`."""
    name, given = sys.argv[1], json.loads(sys.argv[2])
    paths = (Path(each) if str(each).startswith("/") else each for each in given)
    print(json.dumps(names[name](*paths)))


if __name__ == "__main__":
    main(globals())
