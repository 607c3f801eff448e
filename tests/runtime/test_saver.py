"""Saver: order of a save, failed writes, retention by the best metric."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from math import nan
from pathlib import Path
from threading import Event
from typing import Any, cast

import pytest
from safetensors import SafetensorError

from rlctl.errors import ResourceError
from rlctl.runs.run_dir import RunDir
from rlctl.runtime.base.rank_info import RankInfo
from rlctl.runtime.base.roles import Roles
from rlctl.runtime.training.checkpoint_store import (
    ROWS,
    CheckpointStore,
    ControllerState,
    Retention,
)
from rlctl.runtime.training.complete_checkpoints import damage, latest_complete
from rlctl.runtime.training.saver import Saver
from rlctl.runtime.workers.background import FAILED, PARTS, WRITING, WRITTEN, BackgroundWriter
from tests.configs import configured


class Learner:
    """Stand-in for a learning role: writes what a worker's thread would, or that it failed."""

    def __init__(self) -> None:
        self.failure: str | None = None
        self.num_bytes = 3

    def check_folder(self, folder: Path) -> None:
        assert folder.is_dir()

    def state_bytes(self) -> int:
        return self.num_bytes

    def save(
        self, folder: Path, export: Path | None = None, contents: Sequence[str] = PARTS
    ) -> None:
        if export is not None:
            (export / "model.safetensors").write_text("1")
        folder.mkdir()
        (folder / "weights").write_text("1")
        if self.failure is None:
            (folder / WRITTEN).touch()
            return
        if self.failure:  # else there is no room for the reason
            (folder / FAILED).write_text(self.failure)
        (folder.parent / WRITING).unlink()


class Tokenizer:
    def save_pretrained(self, folder: Path) -> None:
        folder.mkdir()


class Case:
    """A saver of a run with actor and critic, and the checkpoints that it reported."""

    def __init__(self, root: Path, *overrides: str) -> None:
        files = ["data.train_files=[t.parquet]", "actor_rollout_ref.model.path=m"]
        config = configured("ppo_trainer", files, overrides)
        self.run = RunDir.create(root, "p", "r", "ppo")
        (self.run.path / "config.yaml").write_text("{}")
        self.run.metrics.write_text("")
        self.actor, self.critic = Learner(), Learner()
        roles = Roles(cast(Any, self.actor), cast(Any, None), cast(Any, self.critic))
        self.num_reported = 0
        tokenizer = cast(Any, Tokenizer())
        self.saver = Saver(self.run, roles, tokenizer, config.trainer, self.report)

    def report(self) -> None:
        self.num_reported += 1

    def begin(self, step: int, jobs: dict[str, Any] | None = None, **state: Any) -> None:
        """Begin to save `step` with `state`, values of `ControllerState`."""
        controller = ControllerState(step, "id", state.pop("algorithm", {}), 0, {}, **state)
        self.saver.begin(controller, jobs or {})

    def save(self, step: int, **metrics: float) -> None:
        """Save `step` and wait for the write."""
        self.begin(step, metrics=dict(metrics))
        self.commit()

    def commit(self) -> None:
        self.saver.commit()
        self.saver._wait()

    @property
    def steps(self) -> list[int]:
        return self.saver.store.steps()


def test_a_checkpoint_has_the_rows_that_may_not_be_on_disk(tmp_path: Path) -> None:
    case = Case(tmp_path)
    case.begin(1)
    case.saver.commit(b'{"step": 1}\n')
    case.saver._wait()
    folder = case.saver.store.path(1)
    assert (folder / ROWS).read_bytes() == b'{"step": 1}\n'
    assert damage(folder) is None
    (folder / ROWS).unlink()
    assert "is missing" in (damage(folder) or "")


def test_failed_write_is_reported_and_leaves_earlier_checkpoints(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    case = Case(tmp_path)
    case.save(1)
    case.critic.failure = "OSError: disk full"
    with caplog.at_level(logging.WARNING):
        case.save(2)
    assert case.steps == [1]
    assert "the checkpoint of step 2 was not written: OSError: disk full" in caplog.text
    assert '"checkpoint_failed"' in (case.run.path / "events.jsonl").read_text()
    with pytest.raises(ResourceError, match="step 2 was not written"):
        case.saver.close()
    case.critic.failure = None
    case.save(3)
    case.saver.close()  # a later save succeeded
    assert case.steps == [1, 3]


def test_failed_write_without_room_for_its_reason_is_given_up(tmp_path: Path) -> None:
    case = Case(tmp_path)
    case.critic.failure = ""
    case.save(1)  # `timeouts.call_s` is an hour
    assert case.steps == []
    failure = case.saver.failure
    assert failure is not None
    assert "a rank could not write its part" in str(failure)


def test_failed_export_gives_the_checkpoint_up_although_the_state_is_written(
    tmp_path: Path,
) -> None:
    case = Case(tmp_path)
    case.begin(1)
    (case.saver.store.folder / ".step_000001.partial" / WRITING).unlink()
    case.commit()
    assert (case.steps, case.saver.failure is None) == ([], False)


def test_error_of_another_library_is_reported(tmp_path: Path) -> None:
    def full(_: Path) -> None:
        raise SafetensorError("Error while serializing: I/O error: No space left on device")

    case = Case(tmp_path)
    case.begin(1, {"rollouts": full})
    case.saver.commit()
    with pytest.raises(ResourceError, match="step 1 was not written: SafetensorError"):
        case.saver.close()
    assert case.steps == []


def test_state_that_is_not_finite_gives_the_checkpoint_up_and_metrics_do_not(
    tmp_path: Path,
) -> None:
    case = Case(tmp_path)
    case.begin(1, algorithm={"kl": {"coef": nan}})
    assert case.saver.failure is not None
    ahead = {"weights": 1, "metrics": {"good": 0.5, "bad": nan}}
    case.begin(2, metrics={"bad": nan}, ahead=ahead)
    case.saver.commit()
    case.saver.close()
    state = ControllerState.read(case.saver.store.path(2))
    assert state.metrics == {"bad": None}
    assert state.ahead["metrics"] == pytest.approx(ahead["metrics"], nan_ok=True)


def test_save_without_enough_space_fails_before_the_copy(tmp_path: Path) -> None:
    case = Case(tmp_path)
    case.critic.num_bytes = 2**60
    case.save(1)
    assert case.steps == []
    with pytest.raises(ResourceError, match="MiB are free"):
        case.saver.close()


def test_retention_keeps_the_newest_and_the_best(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    keep = ["trainer.max_ckpt_to_keep=1", "trainer.keep_best.metric=acc"]
    case = Case(tmp_path, *keep)
    for step, acc in ((1, 0.1), (2, 0.9), (3, 0.2), (4, 0.3)):
        case.save(step, acc=acc)
    assert case.steps == [2, 4]
    for step in (5, 6):
        case.save(step)
    assert case.steps == [2, 6]
    assert caplog.text.count("is not among the metrics of step") == 1  # warned once
    with Case(tmp_path / "again", *keep).saver as other:
        assert other.store.steps() == []


# Renames of a commit: of the new checkpoint, then of the one that retention drops.
RENAMES = [("replace", ".step_000003.partial"), ("rename", "step_000001")]


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize(("method", "renamed"), RENAMES)
def test_killed_beside_a_rename_of_the_commit(
    tmp_path: Path, method: str, renamed: str, after: bool
) -> None:
    """Exit without cleanup: a complete checkpoint is found, and the next start removes the rest."""
    case = Case(tmp_path, "trainer.max_ckpt_to_keep=2")
    case.save(1)
    case.save(2)

    def dying(path: Path, target: Path) -> None:
        if path.name == renamed and not after:
            os._exit(9)
        os.rename(path, target)
        if path.name == renamed:
            os._exit(9)

    if (child := os.fork()) == 0:
        setattr(Path, method, dying)
        case.begin(3)
        case.saver._write(3)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    dropped = renamed == "step_000001"
    complete = [*([] if dropped and after else [1]), 2, *([3] if dropped or after else [])]
    store = CheckpointStore(case.run.path / "checkpoints")
    assert (store.steps(), latest_complete(store)) == (complete, (complete[-1], []))
    with case.saver:
        pass
    assert sorted(each.name for each in store.folder.iterdir()) == [
        f"step_{step:06d}" for step in complete[-2:]
    ]
    assert all(damage(each) is None for each in store.folders().values())


def test_interrupted_setting_aside_leaves_no_checkpoint_after_a_moved_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = CheckpointStore(tmp_path)
    for step in (1, 2, 3, 4):
        store.path(step).mkdir()
    rename = Path.rename

    def once(path: Path, target: Path) -> None:
        if (tmp_path / "aside" / "step_000004").exists():
            raise KeyboardInterrupt
        rename(path, target)

    monkeypatch.setattr(Path, "rename", once)
    with pytest.raises(KeyboardInterrupt):
        store.set_aside_after(1, "aside")
    monkeypatch.undo()
    assert list(store.folders()) == [1, 2, 3]
    assert store.set_aside_after(1, "aside") == [2, 3]


def test_job_that_outlives_its_checkpoint_leaves_no_folder(tmp_path: Path) -> None:
    """Give a checkpoint up while a job writes; the job recreates its folder and succeeds."""
    store = CheckpointStore(tmp_path / "checkpoints")
    writer = BackgroundWriter(RankInfo(0, 1, "cpu", 1, 60.0, True, None))
    aside = store.begin(1)
    given_up = Event()

    def write() -> None:
        given_up.wait(60)
        (aside / "actor").mkdir(parents=True)
        (aside / "actor" / WRITTEN).touch()

    writer.submit(aside / "actor", write)
    store.clear()
    given_up.set()
    writer._thread.shutdown()
    assert not list(store.folder.iterdir())


SCORES: dict[int, dict[str, float | None]] = {
    10: {"acc": 0.5},
    20: {"acc": 0.9},
    30: {"acc": None},
    40: {},
    50: {"acc": 0.9},
    60: {"acc": 0.1},
    70: {"acc": 0.2},
}


@pytest.mark.parametrize(
    ("retention", "kept"),
    [
        (Retention(None, "acc", True, 1), [10, 20, 30, 40, 50, 60, 70]),
        (Retention(2, None, True, 1), [60, 70]),
        (Retention(1, "acc", True, 1), [20, 70]),  # ties go to the older
        (Retention(1, "acc", True, 2), [20, 50, 70]),
        (Retention(1, "acc", False, 1), [60, 70]),
        (Retention(2, "acc", False, 2), [60, 70]),
        (Retention(1, "unknown", True, 3), [70]),
        (Retention(9, "acc", True, 1), [10, 20, 30, 40, 50, 60, 70]),
    ],
)
def test_kept_checkpoints_are_the_newest_and_the_best(
    retention: Retention, kept: list[int]
) -> None:
    assert [step for step in SCORES if step not in retention.to_delete(SCORES)] == kept
    left: dict[int, dict[str, float | None]] = {}
    for step, metrics in SCORES.items():  # adding one checkpoint at a time gives the same result
        left[step] = metrics
        for gone in retention.to_delete(left):
            del left[gone]
        assert step in left
    assert list(left) == kept
