"""`rlctl runs prune`: checkpoints that are removed, kept and guarded; sizes of runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rlctl.errors import NotFoundError, RlctlError, UsageError
from rlctl.runs.prune import Keep, pruned_steps
from rlctl.runs.run_dir import RunDir
from rlctl.runs.store import RunStore
from rlctl.runtime.resume import CheckpointRef
from rlctl.runtime.training.checkpoint_store import CONFIG, CheckpointStore
from rlctl.runtime.training.complete_checkpoints import policy_folder
from tests.recorded import called, record

METRIC = "val-core/x/acc/mean@1"


def stored(root: Path, name: str, state: str, steps: tuple[int, ...], **changes: Any) -> RunDir:
    """Return a run with checkpoints of 1,000 bytes and more; step 4 validates best."""
    run = RunDir.create(root, "p", name, "ppo")
    run.write_config("trainer: {}\n", {})
    record(run.path, {step: {METRIC: 1.0 if step == 4 else 0.5} for step in (2, 4, 6, 8)})
    store = CheckpointStore(run.path / "checkpoints")
    for step in steps:
        aside = store.begin(step)
        (aside / "huggingface").mkdir()
        (aside / "huggingface" / "weights").write_bytes(bytes(1000))
        (aside / CONFIG).write_text("trainer: {}\n")
        store.finish(step)
    found = json.loads((run.path / "run.json").read_text())
    ended = {"state": state, "exit_code": 0, "ended": found["created"], "total_steps": 8}
    (run.path / "run.json").write_text(json.dumps(found | ended | changes))
    return run


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    stored(tmp_path / "runs", "done", "finished", (2, 4, 6, 8))
    return tmp_path / "runs"


def steps_of(root: Path, name: str) -> list[int]:
    return CheckpointStore(root / "p" / name / "checkpoints").steps()


def pruned(*words: str) -> Any:
    done = called("runs", "prune", *words, "--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_the_best_and_the_last_checkpoint_stay(root: Path) -> None:
    (entry,) = pruned("done", "--dry-run")
    assert (entry["would_remove"], entry["removed"], entry["kept"]) == ([2, 6], [], [4, 8])
    assert entry["bytes"] > 2000
    assert steps_of(root, "done") == [2, 4, 6, 8]
    (entry,) = pruned("done", "--yes")
    assert (entry["removed"], entry["kept"], entry["guarded"]) == ([2, 6], [4, 8], {})
    assert steps_of(root, "done") == [4, 8]
    assert not list((root / "p" / "done" / "checkpoints").glob(".*"))
    assert pruned_steps(root / "p" / "done") == [2, 6]
    shown = called("show", "done").stdout
    assert "steps 2, 6" in shown
    assert METRIC in shown
    assert pruned("done")[0]["removed"] == []  # nothing to ask about


@pytest.mark.parametrize(
    ("keep", "kept"),
    [("last:3", [4, 6, 8]), ("best", [4]), ("2, last", [2, 8]), ("6", [6]), ("none", [])],
)
def test_what_stays_can_be_named(root: Path, keep: str, kept: list[int]) -> None:
    assert pruned("done", "--keep", keep, "--yes")[0]["kept"] == kept
    assert steps_of(root, "done") == kept


def test_an_unfinished_run_keeps_what_it_resumes_from(root: Path) -> None:
    stored(root, "stopped", "stopped", (2, 4))
    (entry,) = pruned("stopped", "--keep", "none", "--yes")
    assert entry["guarded"] == {"4": "the run is stopped, and resumes from it"}
    assert steps_of(root, "stopped") == [4]
    pruned("stopped", "--keep", "none", "--yes", "--force")
    assert steps_of(root, "stopped") == []


def test_a_fork_that_has_not_saved_keeps_its_start(root: Path) -> None:
    start = root / "p" / "done" / "checkpoints" / "step_000002"
    parent = {"run": "id", "step": 2, "path": str(start)}
    stored(root, "fork", "stopped", (), parent=parent)
    (entry,) = pruned("done", "--yes")
    assert entry["guarded"] == {"2": "fork was forked from it and has no checkpoint yet"}
    pruned("done", "--yes", "--force")
    assert steps_of(root, "done") == [4, 8]


def test_nothing_is_removed_without_a_word(root: Path) -> None:
    done = called("runs", "prune", "done")
    assert done.returncode == 2
    assert "done" in done.stdout
    assert "2 checkpoints, " in done.stderr
    assert "--yes removes them, --dry-run lists them" in done.stderr
    done = called("runs", "prune", "done", "--keep", "5")
    assert (done.returncode, "no checkpoint of step 5" in done.stderr) == (2, True)
    with pytest.raises(UsageError, match="'newest' names no checkpoints"):
        Keep.parse("best,newest")
    with pytest.raises(UsageError, match="'none' names no checkpoints"):
        Keep.parse("none,last")
    assert steps_of(root, "done") == [2, 4, 6, 8]


def test_errors_say_that_a_checkpoint_was_pruned(root: Path) -> None:
    pruned("done", "--yes")
    store = CheckpointStore(root / "p" / "done" / "checkpoints")
    with pytest.raises(NotFoundError, match=r"of steps 2, 6(.|\n)*checkpoint: 4, 8"):
        policy_folder(store, 2)
    with pytest.raises(NotFoundError, match="no checkpoint of step 3"):
        policy_folder(store, 3)
    pruned("done", "--yes", "--force", "--keep", "none")
    run = RunStore(root).find("done")
    assert run.record is not None
    for call in (
        lambda: policy_folder(store),
        lambda: CheckpointRef.find(run.path, run.readable_record(), None),
    ):
        with pytest.raises(RlctlError, match="removed the checkpoints of steps 2, 4, 6, 8"):
            call()


def test_sizes_are_listed_and_sorted(root: Path) -> None:
    stored(root, "small", "finished", (2,))
    listed = json.loads(called("runs", "--sort", "-size", "--cols", "+size", "--json").stdout)
    assert [run["name"] for run in listed] == ["done", "small"]
    assert listed[0]["size"] > listed[1]["size"] > 1000
    table = called("runs", "--sort", "size", "--cols", "+size").stdout.splitlines()
    assert [line.split()[0] for line in table[1:]] == ["small", "done"]
    assert all(line.endswith(" KiB") for line in table[1:])
    details = json.loads(called("show", "small", "--json").stdout)
    assert details["bytes"] == listed[1]["size"]
    assert 1000 < details["checkpoint_bytes"]["step_000002"] < details["bytes"]
    assert "step_000002 (1." in called("show", "small").stdout
