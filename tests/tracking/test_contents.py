"""Tests of what each tracker shows of a run, read back from the files that its SDK writes."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from rlctl.tracking.loggers import make_tracker
from rlctl.tracking.shown import SampleTable
from rlctl.tracking.tracker import SAMPLES
from tests.tracking.contents import ALARM, LR, MESSAGE, attempt, info, samples, trackio_contents
from tests.tracking.real import call, tensorboard_events, wandb_records
from tests.tracking.swanlab_server import swanlab_server

ROW = ["step", "prompt", "response", "ground_truth", "pred", "score", "right"]


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Give SDKs a home of their own, without keys."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)


def swanlab_records(folder: Path) -> Iterator[Any]:
    from swanlab.proto.swanlab.record.v1.record_pb2 import Record
    from swanlab.sdk.internal.core_python.store import DataStoreReader

    (file,) = folder.glob("*.swanlab")
    reader = DataStoreReader()
    reader.open(str(file))
    while (data := reader.scan()) is not None:
        yield Record.FromString(data)


def swanlab_config(folder: Path) -> list[tuple[str, Any]]:
    """Return keys and values in the order in which SwanLab shows them."""
    config = yaml.safe_load((folder / "files" / "config.yaml").read_text())
    order = sorted(config, key=lambda key: config[key]["sort"])
    return [(key, config[key]["value"]) for key in order]


def folders(root: Path) -> list[Path]:
    """Return the folders of SwanLab's experiments, oldest first."""
    return sorted(root.glob("swanlog/run-*"), key=lambda path: path.stat().st_mtime)


def test_swanlab_offline_shows_a_flat_configuration_and_a_table_of_samples(tmp_path):
    run = info(tmp_path, modes={"swanlab": "offline"})
    first = attempt("swanlab", run)
    (folder,) = folders(run.folder)
    assert swanlab_config(folder) == [
        (LR, 0.5),  # of the command line
        ("trainer.total_epochs", 3),  # of the recipe
        ("actor_rollout_ref.actor.optim.betas", [0.9, 0.99]),
        ("algorithm.adv_estimator", "grpo"),
        ("algorithm.params", "{}"),
        ("data.train_files", '[{"path": "a.jsonl"}]'),
        ("data.limit", "null"),
        ("trainer.seed", 1),
    ]
    table = json.loads(next(folder.glob("media/echarts/001-*.json")).read_text())
    row, other = table["rowData"]
    assert [column["field"] for column in table["colDefs"]][: len(ROW)] == ROW
    assert (row["step"], row["response"], row["pred"]) == (1, samples(1)[0].response, "5")
    assert (row["acc"], row["format"], row["right"], row["ground_truth"]) == (1, 0.5, True, "5")
    assert (other["brevity"], other["acc"], other["pred"]) == (0.25, None, None)
    records = list(swanlab_records(folder))
    start = next(record.start for record in records if record.HasField("start"))
    assert (start.group, start.job_type, start.name) == ("lrs", "trial", "first")
    assert "rlctl show house/first" in start.description
    finish = next(record.finish for record in records if record.HasField("finish"))
    assert finish.error == MESSAGE
    alarms = [path.read_text() for path in folder.glob("media/text/*")]
    assert alarms == [str(ALARM)]
    run = info(tmp_path, modes={"swanlab": "offline"}, trackers={"swanlab": first}, attempt=2)
    attempt("swanlab", run, state="finished")
    start = next(record.start for record in swanlab_records(folders(run.folder)[1]))
    assert start.name == "first (attempt 2)"


def experiments(run: Path) -> list[tuple[str, int, int]]:
    """Return name, status and visibility of the experiments in SwanLab's local dashboard."""
    with closing(sqlite3.connect(run.parent / "swanlog" / "runs.swanlab")) as database:
        return database.execute('SELECT name, status, "show" FROM experiment').fetchall()


def test_swanlab_local_shows_one_experiment_of_a_resumed_run(tmp_path):
    modes = {"swanlab": "local"}
    first = attempt("swanlab", info(tmp_path, modes=modes), state="finished")
    run = info(tmp_path, modes=modes, trackers={"swanlab": first}, attempt=2)
    second = attempt("swanlab", run, state="finished")
    assert experiments(run.folder) == [("first (attempt 1)", 1, 0), ("first", 1, 1)]
    with closing(sqlite3.connect(run.folder.parent / "swanlog" / "runs.swanlab")) as database:
        database.execute("UPDATE experiment SET status = 0 WHERE name = 'first'")  # as if killed
        database.commit()
    run = info(tmp_path, modes=modes, trackers={"swanlab": second}, attempt=3)
    attempt("swanlab", run, state="failed")
    assert experiments(run.folder) == [
        ("first (attempt 1)", 1, 0),
        ("first (attempt 2)", -1, 0),
        ("first", -1, 1),
    ]
    newest = folders(run.folder.parent)[-1]
    assert MESSAGE in (newest / "console" / "error.log").read_text()
    logs = [json.loads(path.read_text().splitlines()[0]) for path in newest.glob("logs/*/*.log")]
    texts = next(line for line in logs if "response" in str(line) or "I do not" in str(line))
    assert texts["data"][0] == "It is | 5\nat step 1\n\n[prompt]\nWhat is 2 + 3?"
    assert texts["more"][0]["caption"] == "score 1, acc 1, format 0.5, pred 5, truth 5"


def test_swanlab_local_renames_the_attempts_of_earlier_versions(tmp_path):
    modes = {"swanlab": "local"}
    attempt("swanlab", info(tmp_path, modes=modes), steps=[1], state="finished")
    second = attempt("swanlab", info(tmp_path, modes=modes), steps=[1], state="finished")
    run = info(tmp_path, modes=modes, trackers={"swanlab": second}, attempt=3)
    assert [name for name, _, _ in experiments(run.folder)] == ["first", "first-2"]
    attempt("swanlab", run, steps=[1], state="finished")
    assert experiments(run.folder) == [
        ("first (attempt 1)", 1, 1),
        ("first (attempt 2)", 1, 0),
        ("first", 1, 1),
    ]


def test_swanlab_local_closes_experiments_of_killed_runs_and_orders_charts(tmp_path):
    modes = {"swanlab": "local"}
    killed = attempt("swanlab", info(tmp_path, modes=modes), state="finished")
    with closing(sqlite3.connect(tmp_path / "runs/house/swanlog/runs.swanlab")) as database:
        database.execute("UPDATE experiment SET status = 0, name = 'killed'")
        database.commit()
    rows = {1: {"perf/x": 1.0, "actor/entropy": 1.0, "critic/score/mean": 1.0}}
    run = info(tmp_path, modes=modes, lost=lambda _: [killed])
    attempt("swanlab", run, steps=[1], state="finished", rows=rows)
    assert experiments(run.folder) == [("killed", -1, 1), ("first", 1, 1)]
    with closing(sqlite3.connect(tmp_path / "runs/house/swanlog/runs.swanlab")) as database:
        charts = database.execute("SELECT name FROM chart WHERE experiment_id = 2 ORDER BY id")
        names = [name for (name,) in charts]
    assert [name for name in names if name != "val/generations"] == [
        "critic/score/mean",
        "actor/entropy",
        "perf/x",
    ]


@pytest.mark.soak
def test_wandb_shows_components_best_values_the_sweep_and_the_failure(tmp_path):
    run = info(tmp_path, modes={"wandb": "offline"})
    attempt("wandb", run)
    (folder,) = run.folder.glob("wandb/offline-run-*")
    records = wandb_records(folder)
    (opened,) = [each["run"] for each in records if "display_name" in each.get("run", {})]
    assert (opened["run_group"], opened["job_type"]) == ("lrs", "trial")
    assert "rlctl show house/first" in opened["notes"]
    own = opened["config"]["update"]["rlctl"]
    assert own["changed"] == {LR: 0.5, "trainer.total_epochs": 3}
    assert (own["commit"], own["show"]) == ("c0ffee", "rlctl show house/first")
    summary: dict[str, Any] = {}
    for each in records:
        summary |= each.get("summary", {}).get("update", {})
    assert summary["val-core/sums/acc/mean@1"] == {"max": 1, "last": 0.5}
    assert (summary["failure"], summary["actor/lr"]) == (MESSAGE, 0.1)
    alerts = [each["alert"] for each in records if each["type"] == "alert"]
    assert [(alert["level"], alert["text"]) for alert in alerts] == [
        ("WARN", str(ALARM)),
        ("ERROR", MESSAGE),
    ]
    (exit,) = [each["exit"] for each in records if each["type"] == "exit"]
    assert exit["exit_code"] == 1
    tables = [json.loads(path.read_text()) for path in folder.glob("files/media/table/val/*.json")]
    components = ["acc", "format", "brevity", "others"]
    for table in tables:
        assert table["columns"] == [*ROW, *components, "length", "finish", "data_source"]
    shown = [
        dict(zip(table["columns"], row, strict=True)) for table in tables for row in table["data"]
    ]
    assert sorted(row["step"] for row in shown) == [1, 1, 2, 2]
    assert {(row["acc"], row["brevity"], row["pred"]) for row in shown} == {
        (1.0, None, "5"),
        (None, 0.25, None),
    }


def test_components_that_the_first_samples_lack_share_a_column():
    right, wrong = samples(1)
    table = SampleTable.of([right], has_others=True)
    row = dict(zip(table.columns, table.row(1, wrong), strict=True))
    assert (row["acc"], row["format"], row["others"]) == (None, None, '{"brevity": 0.25}')
    clash = replace(right, components={"score": 0.5})
    table = SampleTable.of([clash])
    row = dict(zip(table.columns, table.row(1, clash), strict=True))
    assert (row["score"], row["score (component)"]) == (1.0, 0.5)


@pytest.mark.plugin("bridges")
def test_trackio_shows_system_metrics_alerts_and_each_step_once(tmp_path):
    shown = call(trackio_contents, tmp_path, home=tmp_path)
    assert shown["steps"] == {"0": 1, "1": 1, "2": 1, "3": 1}
    assert shown["accuracies"] == [0.5, 1.0, 0.25, 0.25]  # steps 2 and 3 are those of attempt 2
    assert [row["n0/cpu"] for row in shown["system"]] == [50.0] * 2
    alerts = [(alert["level"], alert["text"], alert["step"]) for alert in shown["alerts"]]
    assert sorted(alerts) == [("error", MESSAGE, 3), ("warn", str(ALARM), 2)]
    config = shown["config"]
    assert list(config)[:2] == [LR, "trainer.total_epochs"]
    assert (config["_Group"], config["show"]) == ("lrs", "rlctl show house/first")
    row, other = shown["tables"][-1]
    assert (row["acc"], row["format"], row["right"], other["brevity"]) == (1.0, 0.5, True, 0.25)


@pytest.mark.plugin("bridges")
@pytest.mark.soak
def test_mlflow_shows_a_table_the_sweep_the_source_and_the_end_of_killed_runs(tmp_path):
    from mlflow.tracking import MlflowClient

    uri = f"sqlite:///{tmp_path / 'runs' / 'mlflow.db'}"
    killed = attempt("mlflow", info(tmp_path, sweep=None, commit=None), state="")
    assert killed is not None
    run = info(tmp_path, lost=lambda _: [killed])
    first = attempt("mlflow", run, steps=(1, 2, 3), state="finished")
    assert first is not None
    resumed = replace(run, trackers={"mlflow": first}, resume_step=1, attempt=2)
    assert attempt("mlflow", resumed, steps=(2,)) == first
    failed = MlflowClient(uri).get_run(first)
    assert (failed.info.status, failed.data.tags["failure"]) == ("FAILED", MESSAGE)
    attempt("mlflow", replace(resumed, attempt=3), steps=(), state="finished")
    other = attempt("mlflow", replace(run, name="second"), steps=(), state="finished")
    assert other is not None
    client = MlflowClient(uri)
    assert client.get_run(killed).info.status == "FAILED"
    data, status = client.get_run(first).data, client.get_run(first).info.status
    assert (status, "failure" in data.tags) == ("FINISHED", False)
    assert (data.tags["rlctl.sweep"], data.tags["mlflow.source.git.commit"]) == ("lrs", "c0ffee")
    assert (data.tags["mlflow.source.name"], data.tags["rlctl"]) == ("rlctl train grpo", "")
    assert data.tags["alarm.kl"] == str(ALARM)
    parents = {client.get_run(each).data.tags["mlflow.parentRunId"] for each in (first, other)}
    (parent,) = parents
    assert client.get_run(parent).info.run_name == "lrs"
    assert "mlflow.parentRunId" not in client.get_run(killed).data.tags
    (shown,) = json.loads(data.tags["mlflow.loggedArtifacts"])
    assert shown["type"] == "table"
    table = json.loads(
        Path(client.download_artifacts(first, shown["path"])).read_text(encoding="utf-8")
    )
    rows = [dict(zip(table["columns"], row, strict=True)) for row in table["data"]]
    assert [row["step"] for row in rows] == [1, 1, 2, 2]  # step 3 is that of the first attempt
    assert (rows[0]["acc"], rows[0]["pred"], rows[1]["brevity"]) == (1.0, "5", 0.25)


def tensorboard_values(folder: Path) -> dict[tuple[str, int], Any]:
    """Return the values of all events by tag and step; later ones replace earlier ones."""
    events = tensorboard_events(folder)
    return {(value.tag, event.step): value for event in events for value in event.summary.value}


def hparams_data(value: Any) -> Any:
    from tensorboardX.proto.plugin_hparams_pb2 import HParamsPluginData

    return HParamsPluginData.FromString(value.metadata.plugin_data.content)


@pytest.mark.plugin("bridges")
def test_tensorboard_shows_hyperparameters_a_table_alarms_and_the_failure(tmp_path):
    run = info(tmp_path)
    assert attempt("tensorboard", run) == "."
    shown = tensorboard_values(run.folder)  # the page names the run project/name
    begin = hparams_data(shown["_hparams_/session_start_info", 0]).session_start_info
    values = {name: value.WhichOneof("kind") for name, value in begin.hparams.items()}
    assert values == {
        LR: "number_value",
        "algorithm.adv_estimator": "string_value",
        "trainer.seed": "number_value",
        "trainer.total_epochs": "number_value",
    }
    assert begin.hparams[LR].number_value == 0.5
    end = hparams_data(shown["_hparams_/session_end_info", 2]).session_end_info
    assert end.status == 2  # STATUS_FAILURE
    table = shown["val/generations/text_summary", 2].tensor
    rows, columns = (dim.size for dim in table.tensor_shape.dim)
    cells = [cell.decode() for cell in table.string_val]
    names = [*ROW[1:], "acc", "format", "brevity", "length", "finish", "data_source"]
    assert (rows, columns, cells[:columns]) == (3, len(names), names)
    first = dict(zip(names, cells[columns : 2 * columns], strict=True))
    assert (first["response"], first["score"]) == ("    It is | 5\n    at step 2", "1")
    assert (first["pred"], first["format"], first["brevity"]) == ("    5", "0.5", "")
    texts = {tag: value.tensor.string_val for (tag, _), value in shown.items()}
    assert texts["alarms/kl/text_summary"] == [str(ALARM).encode()]
    assert texts["failure/text_summary"] == [f"    {MESSAGE}".encode()]


@pytest.mark.plugin("bridges")
def test_tensorboard_continues_a_run_of_an_earlier_version_in_its_folder(tmp_path):
    run = info(tmp_path, trackers={"tensorboard": "tensorboard"}, resume_step=1, attempt=2)
    assert attempt("tensorboard", run, state="finished") == "tensorboard"
    assert len(list((run.folder / "tensorboard").glob("events.out.tfevents*"))) == 1
    assert not list(run.folder.glob("events.out*"))


@pytest.mark.soak
def test_swanlab_online_receives_tables_alarms_and_the_state(tmp_path, monkeypatch):
    with swanlab_server() as (address, experiments):
        for name, value in (
            ("SWANLAB_API_HOST", address),
            ("SWANLAB_WEB_HOST", address),
            ("SWANLAB_API_KEY", "k" * 21),
        ):
            monkeypatch.setenv(name, value)
        run = info(tmp_path, modes={"swanlab": "online"})
        first = attempt("swanlab", run)
        created = experiments["abc123"].created
        assert "rlctl show house/first" in created["description"], created
        assert (created["cluster"], created["job"]) == ("lrs", "trial"), created
        assert experiments["abc123"].state == "CRASHED"
        assert experiments["abc123"].media == {"val/generations": [1, 2], "alarms/kl": [2]}
        resumed = replace(run, trackers={"swanlab": first or ""}, attempt=2, resume_step=2)
        assert attempt("swanlab", resumed, steps=(3,), state="finished") == first
    assert list(experiments) == ["abc123"]
    assert experiments["abc123"].media["val/generations"] == [1, 2, 3]
    assert experiments["abc123"].state == "FINISHED"


@pytest.mark.plugin("bridges")
@pytest.mark.soak
def test_mlflow_reads_back_what_it_has(tmp_path):
    run = info(tmp_path)
    first = attempt("mlflow", run, steps=(2,), state="finished")
    tracker: Any = make_tracker("mlflow", {})
    tracker.start(replace(run, trackers={"mlflow": first}))
    name = "val-core/sums/acc/mean@1"
    found = tracker.received({"actor/lr", name, "new", SAMPLES})
    assert found == {"actor/lr": {2}, name: {2}, "new": set(), SAMPLES: {2}}
