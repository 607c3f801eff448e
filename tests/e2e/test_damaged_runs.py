"""Resume of runs whose folder was edited, damaged, poisoned, or is on a full disk."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from rlctl.errors import ConfigError, ConflictError, NotFoundError
from rlctl.process import DriverProcess
from rlctl.runs.record import RunRecord
from rlctl.runs.run_dir import RunDir
from rlctl.runtime.planning.early_resume import compose_resumed
from rlctl.runtime.resume import ResumeOptions, plan_resume
from rlctl.runtime.start import StartPlan
from rlctl.runtime.training.input_hashes import input_hashes
from rlctl.runtime.training.run_folder import open_run
from tests.e2e.command import train
from tests.e2e.conftest import small
from tests.settings import given


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, shelf: Path) -> Path:
    """Return a run of two steps with two checkpoints."""
    folder = tmp_path_factory.mktemp("trained")
    shutil.copytree(shelf / "model", folder / "model")
    own = given(val=None, model=f"{folder}/model", response=4, batch=4, project="p", save=1)
    own += given(keep=None, validate=-1, validate_first=False)
    return train("ppo", "r", "--inline", *small(shelf), *own, cwd=folder)


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    """Return a copy of the run that failed after its second step."""
    copied = tmp_path / "runs" / "p" / "r"
    shutil.copytree(trained, copied, symlinks=True)
    RunDir(copied).update(state="failed")
    return copied


def plan(run: Path, *overrides: str, force: bool = False, fork: str | None = None) -> StartPlan:
    recipe = compose_resumed(run, overrides, fork)
    return plan_resume(run, recipe, ResumeOptions(inline=True, force=force, fork=fork))


def reopened(resumed: StartPlan) -> RunDir:
    config = resumed.plan.config
    return open_run(resumed.plan.recipe, config, resumed.start, input_hashes(config))


def edit(run: Path, old: str, new: str) -> None:
    file = run / "config.yaml"
    assert old in file.read_text()
    file.write_text(file.read_text().replace(old, new))


def test_edited_configuration_is_drift(run: Path) -> None:
    assert plan(run, "trainer.total_training_steps=3").warnings == []
    edit(run, "seed: 1\n", "seed: 5\n")
    with pytest.raises(ConfigError, match="seed: 1 → 5 would change the run 'r'") as refused:
        plan(run, "trainer.total_training_steps=3")
    assert "--fork NAME" in str(refused.value)
    more = "trainer.total_training_steps=3"
    for accepted in (plan(run, force=True), plan(run, more, fork="other")):
        assert any(each.key.endswith("seed") for each in accepted.changes)
    with pytest.raises(ConfigError, match="would change the run 'r'"):  # its folder has the name
        plan(run, "trainer.experiment_name=other", force=True)


def test_edit_of_a_free_key_is_a_change_and_needs_a_checkpoint_to_be_no_drift(run: Path) -> None:
    edit(run, "save_freq: 1\n", "save_freq: 2\n")
    assert [str(each) for each in plan(run).changes] == ["trainer.save_freq: 1 → 2"]
    shutil.rmtree(run / "checkpoints")
    edit(run, "seed: 1\n", "seed: 5\n")
    with pytest.raises(ConfigError, match="no checkpoint has a copy"):
        plan(run)


def test_damaged_checkpoints_are_named_and_the_previous_one_is_used(run: Path) -> None:
    problem = "step_000002 is damaged: manifest.json is missing"
    (run / "checkpoints/step_000002/manifest.json").unlink()
    planned = plan(run)
    assert planned.start.step == 1
    assert planned.warnings == [problem]
    (run / "checkpoints/step_000001/state.json").unlink()
    for state in ("failed", "finished"):
        RunDir(run).update(state=state)
        with pytest.raises(NotFoundError) as refused:
            plan(run, "trainer.total_training_steps=3")
        assert [each.message for each in refused.value.problems] == [
            problem,
            "step_000001 is damaged: state.json is missing",
        ]


def test_changed_content_of_the_model_folder_is_drift(run: Path, trained: Path) -> None:
    """Change the last bytes of the weights; notes beside them and a copy elsewhere do not count."""
    model = trained.parents[2] / "model"
    weights = model / "model.safetensors"
    (model / "NOTES.md").write_text("mine")
    assert plan(run, "trainer.total_training_steps=3").warnings == []
    before = weights.read_bytes()
    changed = f"{model} has changed since the run started"
    try:
        weights.write_bytes(before[:-4] + b"\0\0\0\x3f")
        with pytest.raises(ConfigError, match="has changed since the run started") as refused:
            plan(run, "trainer.total_training_steps=3")
        assert [each.message for each in refused.value.problems] == [changed]
        more = "trainer.total_training_steps=3"
        accepted = plan(run, more, force=True), plan(run, more, fork="other")
        assert [each.warnings for each in accepted] == [[changed]] * 2
        other = shutil.copytree(model, trained.parents[2] / "other")
        with pytest.raises(ConfigError, match=r"actor_rollout_ref\.model\.path: .* would change"):
            plan(run, f"actor_rollout_ref.model.path={other}")
    finally:
        weights.write_bytes(before)


def test_another_value_from_the_environment_is_drift(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Refuse it by name, without its value; a free key and a rotated secret may change."""
    kwargs = "+reward.custom_reward_function.reward_kwargs"
    for name in ("SEED", "THREADS", "HF_TOKEN", "OTHER"):
        monkeypatch.setenv(name, "1")
    read = [
        f'trainer.{key}="${{oc.decode:${{oc.env:{name}}}}}"'
        for key, name in (("seed", "SEED"), ("num_threads", "THREADS"))
    ] + [f"{kwargs}.n=${{oc.env:HF_TOKEN}}", f"{kwargs}.api_key=${{oc.env:OTHER}}"]
    planned = plan(run, *read, force=True)
    reopened(planned).finish("failed", 1)
    assert set(RunDir(run).record.environment) == {"trainer.seed", "trainer.num_threads"}
    assert plan(run).changes == []
    for name in ("THREADS", "HF_TOKEN", "OTHER"):
        monkeypatch.setenv(name, "2")
    text = "${oc.decode:${oc.env:THREADS}}"
    shown = f"trainer.num_threads: {text} → {text} with another value"
    assert [str(each) for each in plan(run).changes] == [shown]
    monkeypatch.setenv("SEED", "9")
    with pytest.raises(ConfigError, match=r"trainer\.seed: .* with another value would change"):
        plan(run)


def test_running_run_is_refused(run: Path) -> None:
    here = DriverProcess.current()
    RunDir(run).update(state="running", process=here)
    with pytest.raises(ConflictError, match=f"is running: process {here.pid} on {here.host}"):
        plan(run, force=True)
    RunDir(run).update(process=replace(here, host="elsewhere"))
    with pytest.raises(ConflictError, match=f"process {here.pid} on elsewhere") as refused:
        plan(run)
    assert "--force" in str(refused.value.problems[0].hint)
    assert plan(run, force=True).start is not None


def test_run_without_a_checkpoint_starts_over(run: Path) -> None:
    with pytest.raises(NotFoundError) as refused:
        plan_resume(run, compose_resumed(run, (), None), ResumeOptions(from_step=3, inline=True))
    assert refused.value.problems[0].hint == "steps with a checkpoint: 1, 2"
    shutil.rmtree(run / "checkpoints")
    start = plan(run).start
    assert (start.checkpoint, start.step) == (None, 0)


def test_run_without_its_configuration_says_what_to_do(run: Path) -> None:
    (run / "config.yaml").unlink()
    newest = run / "checkpoints" / "step_000002" / "config.yaml"
    with pytest.raises(NotFoundError) as refused:
        plan(run)
    assert str(refused.value.problems[0].hint).endswith(f"cp {newest} {run / 'config.yaml'}")
    shutil.rmtree(run / "checkpoints")
    with pytest.raises(NotFoundError, match="`rlctl runs rm r` frees the name"):
        plan(run)


def test_keys_that_do_not_change_the_run_may_change(run: Path, tmp_path: Path) -> None:
    """Move checkpoints to another disk and back; later ones are written there."""
    elsewhere = tmp_path / "elsewhere"
    changed = [f"trainer.default_local_dir={elsewhere}", "reward.timeout_s=7"]
    changed += [f"trainer.rollout_data_dir={elsewhere}/rollouts"]
    for overrides, place in ((changed, elsewhere / "p" / "r"), ([], run / "checkpoints")):
        planned = plan(run, *overrides, *([] if overrides else ["trainer.default_local_dir=null"]))
        reopened(planned).finish("failed", 1)
        assert (run / "checkpoints").resolve() == place
        assert {each.name for each in place.iterdir()} == {"step_000001", "step_000002"}
        assert (run / "rollouts").resolve() == elsewhere / "rollouts" / "p" / "r"
        assert plan(run).warnings == []
    assert not (elsewhere / "p" / "r").exists()


@pytest.mark.parametrize("rollouts", ["elsewhere", "null"])
def test_resuming_a_copy_leaves_the_folders_of_the_original(
    run: Path, tmp_path: Path, rollouts: str
) -> None:
    """Move later records aside in the copy's own folders, also those that it stops to write."""
    elsewhere = tmp_path / "elsewhere"
    folders = [
        f"trainer.{key}={elsewhere}/{key}" for key in ("default_local_dir", "rollout_data_dir")
    ]
    reopened(plan(run, *folders)).finish("failed", 1)
    (run / "rollouts" / "step_000003.jsonl").write_text("{}\n")
    before = sorted(elsewhere.rglob("*"))
    copy = tmp_path / "copied" / "p" / "r"
    shutil.copytree(run, copy, symlinks=True)
    changed = [] if rollouts == "elsewhere" else ["trainer.rollout_data_dir=null"]
    resumed = reopened(plan(copy, *changed))
    assert resumed.record.id != RunRecord.read(run / "run.json").id
    assert (resumed.record.name, resumed.record.trackers) == ("r", {})
    resumed.finish("failed", 1)
    assert sorted(path for path in elsewhere.rglob("*") if "-copy-" not in str(path)) == before
    assert not (copy / "rollouts" / "step_000003.jsonl").exists()
    assert (run / "rollouts" / "step_000003.jsonl").exists()


def test_a_resume_that_fails_at_its_start_records_the_cause(run: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere/p/r/step_000009").mkdir(parents=True)
    with pytest.raises(ConflictError):
        reopened(plan(run, f"trainer.default_local_dir={tmp_path}/elsewhere"))
    record = RunDir(run).record
    assert (record.state, record.exit_code) == ("failed", 5)
    assert record.failure["code"] == "E-EXISTS"
    assert record.failure["message"].startswith("the folder has files of another run")
