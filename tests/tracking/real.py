"""One attempt of a run with all real trackers, or those in LOGGERS, and readers of their files.

`python -m tests.tracking.real write FOLDER FIRST LAST RESUME_STEP` prints the run ids as JSON,
`… read RUN` the contents of all trackers.
"""

from __future__ import annotations

import json
import math
import os
import struct
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rlctl.tracking.async_tracker import TrackerTimeouts
from rlctl.tracking.fanout import Trackers
from rlctl.tracking.tracker import RunInfo, Sample

LOGGERS = ("swanlab", "wandb", "tensorboard", "mlflow", "trackio")
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
    folder: Path, first: int, last: int, resume_step: int, ids: dict[str, str]
) -> dict[str, str]:
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
        ids,
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

    trackers = Trackers.load(
        os.environ.get("LOGGERS", ",".join(LOGGERS)).split(","),
        event,
        TrackerTimeouts(1000, 300, 300, 300),
    )
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
        "tensorboard": tensorboard_curves(run / "tensorboard"),
        "mlflow": mlflow_curves(run.parent.parent / "mlflow.db", project),
        "trackio": trackio_curves(project, run.name),
    }


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
    command = [str(Path(sys.executable).parent / "wandb"), "leet", "inspect", str(folder), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=600)
    return [json.loads(line) for line in done.stdout.splitlines()]


def tensorboard_events(folder: Path) -> Iterator[Any]:
    from tensorboardX.proto.event_pb2 import Event

    for file in sorted(folder.glob("events*"), key=lambda path: path.stat().st_mtime):
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
            else:
                texts.setdefault(value.tag, {})[event.step] = value.tensor.string_val[0].decode()
    return {"scalars": scalars, "texts": texts}


def mlflow_curves(database: Path, project: str) -> dict[str, Any]:
    from mlflow.tracking import MlflowClient

    client = MlflowClient(f"sqlite:///{database}")
    (run,) = client.search_runs([client.get_experiment_by_name(project).experiment_id])
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
    return {"scalars": curves, "runs": len(runs), "tables": tables}


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    action, place, *numbers = sys.argv[1:]
    ids = json.loads(os.environ.get("IDS", "{}"))
    print(
        json.dumps(
            read(Path(place)) if action == "read" else write(Path(place), *map(int, numbers), ids)
        )
    )
