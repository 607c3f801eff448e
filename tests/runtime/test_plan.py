"""Plans: all errors at once, number of steps, limits of `--inline`; a run that fails as it starts.

Its state is recorded, also if it is stopped while it is created; limits of time.
"""

from __future__ import annotations

import json
import os
import pkgutil
import shutil
import signal
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from rlctl import cores
from rlctl.__main__ import main
from rlctl.data_prep.arithmetic import train_and_validation
from rlctl.data_prep.rows import write_rows
from rlctl.errors import (
    ConfigError,
    DeviceMemoryError,
    NotFoundError,
    ResourceError,
    Terminated,
    TimeUp,
    UsageError,
)
from rlctl.recipes.compose import compose
from rlctl.runs.run_dir import RunDir
from rlctl.runtime.launch import train
from rlctl.runtime.planning.evaluation import target_config
from rlctl.runtime.planning.plan import Plan, make_plan
from rlctl.runtime.planning.preflight import check_disk
from rlctl.runtime.training.stopping import Stopping
from tests.e2e.conftest import small, write_shelf
from tests.models import write_tiny_model
from tests.settings import given

MISSING = "algorithm.params={teacher_models: {numbers: {model_path: /none/here}}}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("plan")
    write_tiny_model(folder / "model")
    training, _ = train_and_validation(10, 2, seed=1, level=1, careless=0.0)
    write_rows(folder / "train.parquet", training)
    return folder


def plan(folder: Path, *overrides: str, inline: bool = True) -> Plan:
    small = given(train=f"{folder}/train.parquet", model=f"{folder}/model", runs=f"{folder}/runs")
    small += given(prompt=160, response=4, batch=4, mini_batch=4, device="cpu")
    return make_plan(compose("ppo_trainer", [*small, *overrides]), inline)


def test_steps_are_complete_batches_times_epochs(folder: Path) -> None:
    assert plan(folder, "trainer.total_epochs=3").num_steps == 6  # 10 prompts: 2 batches of 4
    assert plan(folder, "trainer.total_training_steps=5").num_steps == 5


def test_plan_lists_roles_pools_and_memory(folder: Path) -> None:
    planned = plan(folder, "algorithm.use_kl_in_reward=true", "trainer.placement.critic=values")
    assert planned.roles == {"actor", "reference", "critic"}
    assert planned.pool_sizes == {"main": 1, "values": 1}
    assert [each.role for each in planned.memory.known()] == ["actor", "reference", "critic"]
    assert {pool: len(roles) for pool, roles in planned.memory.pools().items()} == {
        "main": 2,
        "values": 1,
    }


@pytest.mark.plugin("objectives")
def test_each_teacher_is_planned_and_each_row_needs_one(folder: Path) -> None:
    def teachers(key: str) -> list[str]:
        own = f"{{key: {key}, model_path: {folder}/model}}"
        params = f"algorithm.params={{teacher_models: {{numbers: {own}}}}}"
        return ["algorithm.name=distill", "actor_rollout_ref.rollout.n=2", params]

    planned = plan(folder, *teachers("rlctl/arithmetic"))
    assert planned.roles == {"actor", "reference"}
    assert [each.role for each in planned.memory.known()] == ["actor", "reference numbers"]
    with pytest.raises(ConfigError, match="no teacher for rows whose data_source is"):
        plan(folder, *teachers("poems"))
    with pytest.raises(ConfigError, match="there is no model folder") as raised:
        plan(folder, *teachers("x")[:2], MISSING)
    assert "/none/here" in raised.value.problems[0].message


@pytest.mark.parametrize(
    ("model", "hint"),
    [("quikstart", "did you mean quickstart?"), ("actor.jsonl", None), ("nothing", None)],
)
def test_help_for_a_wrong_model(
    model: str, hint: str | None, folder: Path, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    (here / "actor.jsonl").write_text("{}\n{}\n")
    (here / "nothing").mkdir()
    with pytest.raises(ConfigError, match=r"has no readable config\.json") as raised:
        plan(folder, f"actor_rollout_ref.model.path={model}")
    assert raised.value.problems[0].hint == hint


def test_a_selector_is_no_model(folder: Path) -> None:
    with pytest.raises(ConfigError, match="there is no model folder '@last'") as raised:
        plan(folder, "actor_rollout_ref.model.path=@last")
    assert "give the run's name" in (raised.value.problems[0].hint or "")


@pytest.mark.plugin("objectives")
def test_a_teacher_that_follows_the_policy_is_a_copy_of_its_weights(folder: Path) -> None:
    own = ["algorithm.name=self_distill", "data.response_key=extra_info.answer"]
    memory = [
        {each.role: each.parameters for each in plan(folder, *own, *more).memory.known()}
        for more in ([], ["algorithm.params={ema_decay: 0.9}"])
    ]
    assert memory[1] == {"actor": memory[0]["actor"] + memory[0]["reference"]}


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("trainer.n_gpus_per_node=2", "the configuration asks for 2"),
        ("trainer.placement.rollout=engines", "puts engines into others"),
    ],
)
def test_inline_refuses_more_than_one_process(folder: Path, override: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        plan(folder, override)


def test_checkpoints_that_do_not_fit_together_are_a_warning(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    many = ["trainer.total_training_steps=10000000000", "trainer.save_freq=1"]
    plan(folder, *many)
    assert "10000000000 checkpoints of about" in caplog.text
    assert "trainer.max_ckpt_to_keep=" in caplog.text
    caplog.clear()
    plan(folder, *many, "trainer.max_ckpt_to_keep=1")
    assert "checkpoints of about" not in caplog.text


def test_fewer_prompts_than_a_batch_is_an_error(folder: Path) -> None:
    with pytest.raises(ConfigError, match="10 training prompts do not fill one batch"):
        plan(folder, *given(batch=16, mini_batch=16))


def test_weights_that_do_not_fit_the_config_are_refused(folder: Path, tmp_path: Path) -> None:
    other = shutil.copytree(folder / "model", tmp_path / "model")
    config = json.loads((other / "config.json").read_text())
    config |= {"num_hidden_layers": 4, "layer_types": None}
    (other / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match="24 weights are missing for Qwen2ForCausalLM") as raised:
        plan(folder, f"actor_rollout_ref.model.path={other}")
    assert raised.value.exit_code == 3
    with pytest.raises(ConfigError, match="24 weights are missing for Qwen2Model") as raised:
        plan(folder, f"critic.model.path={other}")
    assert [each.where for each in raised.value.problems] == ["critic.model.path"]


def test_a_tokenizer_of_a_larger_model_is_refused(folder: Path, tmp_path: Path) -> None:
    model = tmp_path / "model"
    config = AutoConfig.from_pretrained(folder / "model", vocab_size=200)
    AutoModelForCausalLM.from_config(config).save_pretrained(model)
    AutoTokenizer.from_pretrained(folder / "model").save_pretrained(model)
    with pytest.raises(ConfigError, match="tokens that the model lacks: ") as raised:
        plan(folder, f"actor_rollout_ref.model.path={model}")
    assert [problem.where for problem in raised.value.problems] == ["actor_rollout_ref.model.path"]
    assert main(["generate", str(model), "a"]) == raised.value.exit_code == 3


@pytest.mark.plugin("objectives")
def test_gdpo_without_components_is_refused(folder: Path, tmp_path: Path) -> None:
    """The built-in scorer has no components; a dict of numbers, or a second function, has."""
    gdpo = ["algorithm.adv_estimator=gdpo", "actor_rollout_ref.rollout.n=2"]
    with pytest.raises(ConfigError, match="compares the components of the reward") as raised:
        plan(folder, *gdpo)
    assert "reward_keys" in (raised.value.problems[0].hint or "")
    (tmp_path / "mine.py").write_text(
        "def score(**kwargs): return {'score': 1.0, 'format': 0.5}\ndef other(**kwargs): return 1\n"
    )
    path = f"reward.custom_reward_function.path={tmp_path}/mine.py"
    plan(folder, *gdpo, path, "reward.custom_reward_function.name=score")
    plan(folder, *gdpo, f"reward.functions=[gsm8k,'{tmp_path}/mine.py:other']")
    with pytest.raises(ConfigError, match="has none"):
        plan(folder, *gdpo, path, "reward.custom_reward_function.name=other")


@pytest.mark.parametrize(
    ("overrides", "warning"),
    [
        (["actor_rollout_ref.rollout.n=100000"], "a step generates 400,000 responses"),
        (["actor_rollout_ref.actor.optim.lr=1e10"], "actor.optim.lr=1e+10 overwrites the weights"),
        (["critic.optim.lr=0.5"], "critic.optim.lr=0.5 overwrites the weights"),
        (["trainer.nnodes=2"], "trainer.nnodes=2 needs a running Ray cluster, and none is named"),
        (["trainer.nnodes=2", "ray_kwargs.ray_init.address=auto"], ""),
    ],
)
def test_values_that_can_hardly_be_meant_are_warnings(
    folder: Path,
    overrides: list[str],
    warning: str,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    caplog.set_level("WARNING", "rlctl")
    plan(folder, *overrides, "data.train_batch_size=4", inline=False)
    assert [each for each in caplog.messages if warning not in each] == []
    assert len(caplog.messages) == bool(warning)


def test_settings_that_do_not_what_they_say_are_warnings(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("WARNING", "rlctl")

    def said(*overrides: str, of: Path = folder, steps: int = 3) -> str:
        caplog.clear()
        validation = f"data.val_files={folder}/train.parquet"
        path = f"actor_rollout_ref.model.path={of}/model"
        length = ["trainer.critic_warmup=2", f"trainer.total_training_steps={steps}"]
        plan(folder, validation, path, *length, *overrides)
        return "; ".join(caplog.messages)

    values = "actor_rollout_ref.rollout.val_kwargs"
    assert said() == ""
    assert "gives equal responses" in said(f"{values}.n=4")
    assert "samples at temperature 0" in said(f"{values}.n=4", f"{values}.do_sample=true")
    sampled = [f"{values}.{each}" for each in ("n=4", "do_sample=true", "temperature=1.0")]
    assert said(*sampled) == ""
    assert "critic_warmup=2 of 2 steps" in said(steps=2)

    shutil.copytree(folder / "model", tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    tokenizer.pad_token = "<nope>"
    tokenizer.chat_template = tokenizer.chat_template.replace("<|im_end|>", "<|end_of_turn|>")
    tokenizer.save_pretrained(tmp_path / "model")
    messages = said(of=tmp_path)
    assert "the tokenizer has 1 token that the model lacks: '<nope>'" in messages
    assert "ends a turn with '<|end_of_turn|>', which has no stop token" in messages


def test_prompts_with_a_token_that_the_model_lacks_are_refused(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, rows = tmp_path / "model", tmp_path / "rows.parquet"
    shutil.copytree(folder / "model", model)
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.add_tokens(["<nope>"])
    tokenizer.save_pretrained(model)
    training, _ = train_and_validation(4, 2, seed=1, level=1, careless=0.0)
    training[2].prompt[-1]["content"] += "<nope>"
    write_rows(rows, training)
    for key in ("train_files", "val_files"):
        with pytest.raises(ConfigError, match="prompt 2 contains '<nope>', an added token"):
            plan(folder, f"actor_rollout_ref.model.path={model}", f"data.{key}={rows}")
    assert main(["generate", str(model), "a <nope>"]) == ConfigError.exit_code
    assert "prompt 0 contains '<nope>'" in capsys.readouterr().err


def test_a_finished_run_needs_no_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlctl.runtime.planning.preflight.free_space", lambda _: 0)
    run = RunDir.create(tmp_path, "p", "r", "ppo")
    model = "actor_rollout_ref.model.path=quickstart"
    two = compose("grpo", (model, "trainer.total_training_steps=2")).config
    with pytest.raises(ResourceError, match="0 MiB free"):
        check_disk(two, tmp_path, run.path)
    run.update(total_steps=2)
    run.finish("finished", 0)
    check_disk(two, tmp_path, run.path)
    more = compose("grpo", (model, "trainer.total_training_steps=3")).config
    with pytest.raises(ResourceError, match="0 MiB free"):
        check_disk(more, tmp_path, run.path)


def test_a_full_disk_gets_no_quickstart_data(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rlctl.runtime.planning.preflight.free_space", lambda _: 0)
    with pytest.raises(ResourceError, match="0 MiB free"):
        plan(folder, "data.train_files=quickstart", f"trainer.run_dir={tmp_path}")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("processes", "given", "in_a_job", "threads"),
    [
        *((1, None, False, 4), (3, None, False, 1), (8, None, False, 1)),
        *((2, "3", False, 3), (2, "", False, 2), (2, "0", False, 2), (2, "1", True, 2)),
    ],
)
def test_default_threads(
    processes: int, given: str | None, in_a_job: bool, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Divide four cores unless OMP_NUM_THREADS is set, and not by Ray for its job."""
    monkeypatch.setattr(cores, "available_cores", lambda: 4)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if given is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", given)
    if in_a_job:
        monkeypatch.setenv("RAY_JOB_CONFIG_JSON_ENV_VAR", "{}")
    assert cores.default_threads(processes) == threads


@pytest.mark.plugin("objectives")
def test_a_run_without_a_checkpoint_is_one_problem(folder: Path, tmp_path: Path) -> None:
    RunDir.create(tmp_path, "p", "judge", "rm").write_config("", {})
    overrides = ["reward.reward_model.enable=true", "reward.reward_model.model.path=judge"]
    with pytest.raises(NotFoundError) as raised:
        plan(folder, *overrides, f"trainer.run_dir={tmp_path}")
    (problem,) = raised.value.problems
    assert problem.message.startswith("no checkpoint in")


def test_folders_of_models_may_have_any_name(here: Path) -> None:
    folder = here / "model"
    write_tiny_model(folder)
    for name in ("äpfel", "model(1)", "a b", 'a"b', "x=y,z"):
        folder = folder.rename(here / name)
        assert target_config(name, [], "ppo").actor_rollout_ref.model.path == name


def test_a_model_folder_is_evaluated_with_the_values_given_and_without_training_data(
    here: Path,
) -> None:
    write_tiny_model(here / "model")
    given = ["data.val_files=mine.parquet", "data.max_response_length=64"]
    config = target_config("model", given, "ppo_trainer")
    assert config.data.val_files == ("mine.parquet",)
    assert config.data.max_response_length == 64
    assert config.data.train_paths == ()


def test_a_model_of_a_mesh_is_evaluated_in_one_process(here: Path) -> None:
    write_tiny_model(here / "model")
    mesh = "{tensor_model_parallel_size: 2, fsdp_size: 2, ulysses_sequence_parallel_size: 2}"
    actor = f"actor_rollout_ref: {{actor: {{fsdp_config: {mesh}}}}}"
    (here / "mesh.yaml").write_text(f"defaults: [ppo_trainer, _self_]\n{actor}\n")
    fsdp = target_config("model", [], "mesh.yaml").actor_rollout_ref.actor.fsdp_config
    assert (fsdp.tensor_model_parallel_size, fsdp.fsdp_size, fsdp.ranks_per_row) == (1, -1, 1)


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_shelf(tmp_path_factory.mktemp("inputs"))


@pytest.fixture
def launchable(inputs: Path, tmp_path: Path) -> Plan:
    own = given(response=4, runs=f"{tmp_path}/runs", name="r", logger=[])
    return make_plan(compose("ppo_trainer", [*small(inputs), *own]), inline=True)


def test_failed_run_records_its_state_and_reports_its_end(tmp_path: Path, launchable: Plan) -> None:
    def collect(*_: Any) -> None:
        raise DeviceMemoryError("no memory", key="critic.k", value=8, proposed=4)

    algorithm = SimpleNamespace(needs=launchable.algorithm.needs, collect=collect)
    ends: list[tuple[str, str]] = []
    with pytest.raises(DeviceMemoryError, match=r"planned for the pool main: .* GiB, actor "):
        train(
            replace(launchable, algorithm=cast(Any, algorithm)),
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
    launchable: Plan,
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
            train(launchable, on_end=lambda _, state, __: ends.append(state))
    finally:
        signal.signal(signal.SIGTERM, before)
    [folder] = (tmp_path / "runs").glob("*/*")
    run = RunDir(folder)
    assert (run.record.state, run.record.exit_code, ends) == ("stopped", code, ["stopped"])


@pytest.mark.parametrize("hours", [-2, 2])
def test_time_limit_does_not_follow_the_clock(
    hours: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    logged: list[str] = []
    end_by = time.monotonic() + 3600
    stopping = Stopping(60, logged.append, tmp_path / "stop", end_by)
    with stopping:
        stopping.check(0.0)
        jumped = time.time() + 3600 * hours
        monkeypatch.setattr(time, "time", lambda: jumped)
        stopping.check(0.0)
        assert not stopping.asked
        monkeypatch.setattr(time, "monotonic", lambda: end_by - 1.0)
        stopping.check(1.0)
        assert stopping.asked
    assert isinstance(stopping.error(), TimeUp)
    assert logged[0].startswith("1 s left, not enough for another step")
