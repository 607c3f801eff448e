"""Launch: restored roles, and the recorded state of a run that fails."""

from __future__ import annotations

import os
import pkgutil
import signal
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from rlctl.data_prep.arithmetic import train_and_validation
from rlctl.data_prep.rows import write_rows
from rlctl.errors import DeviceMemoryError, Terminated
from rlctl.recipes.compose import compose
from rlctl.runs.run_dir import RunDir
from rlctl.runtime.checkpoint.store import ControllerState
from rlctl.runtime.launch import train
from rlctl.runtime.planning.plan import Plan, make_plan
from rlctl.runtime.roles import Roles
from rlctl.runtime.training.restore import ResumePoint, restore
from rlctl.runtime.workers.rng import rng_state
from tests.models import write_tiny_model


class Recorder:
    """Stand-in for role, algorithm and collector: records what is loaded."""

    def __init__(self) -> None:
        self.loaded: list[Any] = []

    def load(self, folder: Path) -> None:
        self.loaded.append(folder.name)

    def load_state_dict(self, *state: Any) -> None:
        self.loaded.append(state)


def restored(start: ResumePoint | None) -> tuple[Any, dict[str, list[Any]], list[str]]:
    parts = {name: Recorder() for name in ("actor", "critic", "algorithm", "collector")}
    roles = Roles(cast(Any, parts["actor"]), cast(Any, None), cast(Any, parts["critic"]))
    phases: list[str] = []
    state = restore(
        start, cast(Any, parts["algorithm"]), cast(Any, parts["collector"]), roles, phases.append
    )
    return state, {name: part.loaded for name, part in parts.items()}, phases


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A checkpoint of step 4 without a critic."""
    (tmp_path / "actor").mkdir()
    state = ControllerState(4, "id", {"kl": 1}, 2, rng_state(), loader={"position": 3})
    state.write(tmp_path)
    return tmp_path


def test_roles_missing_from_the_checkpoint_start_from_scratch(checkpoint: Path) -> None:
    state, loaded, phases = restored(ResumePoint(Path("run"), checkpoint, 4))
    assert (state.step, state.skipped_in_a_row, state.new_run) == (4, 2, False)
    assert (loaded["actor"], loaded["critic"]) == (["actor"], [])
    assert loaded["algorithm"] == [({"kl": 1},)]
    assert loaded["collector"] == [({"position": 3}, 4)]
    assert phases == ["loading the checkpoint of step 4"]


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write `model/` and `train.parquet`, and return their folder."""
    folder = tmp_path_factory.mktemp("inputs")
    write_tiny_model(folder / "model")
    training, _ = train_and_validation(4, 2, seed=1, level=1, careless=0.0)
    write_rows(folder / "train.parquet", training)
    return folder


@pytest.fixture
def plan(inputs: Path, tmp_path: Path) -> Plan:
    overrides = [
        f"data.train_files={inputs}/train.parquet",
        f"actor_rollout_ref.model.path={inputs}/model",
        "data.max_prompt_length=160",
        "data.max_response_length=4",
        "data.train_batch_size=4",
        "actor_rollout_ref.actor.ppo_mini_batch_size=4",
        f"trainer.run_dir={tmp_path}/runs",
        "trainer.experiment_name=r",
        "trainer.logger=[]",
    ]
    return make_plan(compose("ppo_trainer", overrides), inline=True)


def test_failed_run_records_its_state_and_reports_its_end(tmp_path: Path, plan: Plan) -> None:
    def collect(*_: Any) -> None:
        raise DeviceMemoryError("no memory", key="critic.k", value=8, proposed=4)

    algorithm = SimpleNamespace(needs=plan.algorithm.needs, collect=collect)
    ends: list[tuple[str, str]] = []
    with pytest.raises(DeviceMemoryError, match=r"planned for the pool main: .* GiB, actor "):
        train(
            replace(plan, algorithm=cast(Any, algorithm)),
            on_end=lambda run, state, _: ends.append((run.record.name, state)),
        )
    [folder] = (tmp_path / "runs").glob("*/r")
    run = RunDir(folder)
    assert (run.record.state, run.record.exit_code) == ("failed", DeviceMemoryError.exit_code)
    assert run.record.failure == {"code": "E-OOM", "message": "no memory", "hint": None}
    assert ends == [("r", "failed")]
    assert '"proposed": 4' in (folder / "events.jsonl").read_text()


@pytest.mark.parametrize(
    "moment", ["rlctl.runs.run_dir.put_in_place", "rlctl.runtime.launch._load_trackers"]
)
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_run_stopped_while_it_is_created_is_recorded_as_stopped(
    tmp_path: Path,
    plan: Plan,
    moment: str,
    number: signal.Signals,
    code: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def terminate(*_: object) -> None:
        raise Terminated(number)

    real = pkgutil.resolve_name(moment)

    def interrupted(*arguments: Any) -> Any:
        result = real(*arguments)
        os.kill(os.getpid(), number)
        return result

    monkeypatch.setattr(moment, interrupted)
    before = signal.signal(signal.SIGTERM, terminate)
    ends: list[str] = []
    try:
        with pytest.raises((KeyboardInterrupt, Terminated)):
            train(plan, on_end=lambda _, state, __: ends.append(state))
    finally:
        signal.signal(signal.SIGTERM, before)
    [folder] = (tmp_path / "runs").glob("*/*")
    run = RunDir(folder)
    assert (run.record.state, run.record.exit_code, ends) == ("stopped", code, ["stopped"])
