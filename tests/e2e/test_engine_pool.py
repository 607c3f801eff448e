"""Engines and reward model in pools of their own: the same run, which survives lost engines."""

from __future__ import annotations

import json
import os
import shutil
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
import torch
from transformers import AutoModelForSequenceClassification

from rlctl.__main__ import main
from tests.e2e.command import (
    metrics,
    rlctl,
    start,
    wait_for_steps,
    wait_until_gone,
    with_marker,
)
from tests.e2e.killed_runs import events

SEPARATE = ["trainer.placement.rollout=engines", "trainer.placement.pools={engines: 2}"]

EAGER = (
    *("async_training.schedule=eager", "async_training.max_staleness=1"),
    "algorithm.rollout_correction.bypass_mode=true",
)

# An engine that is killed during a response once per file `die-*` beside it, and does not start
# if the file `full` exists.
ENGINE = """
import os, pathlib, signal
from rlctl.runtime.rollout.hf import HFEngine

FOLDER = pathlib.Path(__file__).parent

class Engine(HFEngine):
    @classmethod
    def from_spec(cls, spec, policy):
        if (FOLDER / "full").exists():
            print("there is no room for the engine", flush=True)
            os._exit(9)
        print("the engine is there", flush=True)
        return super().from_spec(spec, policy)

    def step(self):
        self.passes = getattr(self, "passes", 0) + 1
        for file in FOLDER.glob("die-*") if self.passes == 20 else ():
            try:
                file.unlink()
            except FileNotFoundError:  # the other engine was faster
                continue
            os.kill(os.getpid(), signal.SIGKILL)
        return super().step()
"""


def write_classifier(source: Path, target: Path) -> None:
    """Write the language model `source` as a reward model with a random head."""
    shutil.copytree(source, target)
    torch.manual_seed(0)
    AutoModelForSequenceClassification.from_pretrained(source, num_labels=1).save_pretrained(target)


@pytest.mark.soak
def test_run_with_a_killed_engine_equals_a_colocated_run(
    settings: list[str], shelf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_classifier(shelf / "model", tmp_path / "rm")
    settings = [
        *settings,
        *("reward.reward_model.enable=true", "reward.reward_model.rule_weight=1"),
        f"reward.reward_model.model.path={tmp_path}/rm",
        "actor_rollout_ref.rollout.n=2",
    ]
    (tmp_path / "mortal.py").write_text(ENGINE)
    (tmp_path / "die-1").touch()
    assert main(["train", "ppo", "--inline", "--name", "together", *settings]) == 0
    done = rlctl(
        *("train", "ppo", "--name", "apart"),
        *settings,
        *("trainer.placement.rollout=engines", "trainer.placement.reward=scores"),
        "trainer.placement.pools={engines: 2, scores: 1}",
        "actor_rollout_ref.rollout.name=mortal:Engine",
        cwd=tmp_path,
    )
    assert "is lost" in done.stderr
    runs = tmp_path / "runs" / "quickstart"
    together, apart = metrics(runs / "together"), metrics(runs / "apart")
    assert [row.keys() for row in together] == [row.keys() for row in apart]
    for one, other in zip(together, apart, strict=True):
        for name, value in one.items():
            if not name.startswith(("timing", "perf/", "rollout_corr/", "training/rollout_probs")):
                assert other[name] == pytest.approx(value, rel=1e-3, abs=1e-5), name
    assert all(row["training/rollout_probs_diff_max"] < 1e-4 for row in apart[1:])
    assert all(row["reward/reward_model/mean"] for row in apart[1:])
    assert len(events(runs / "apart", "engine_lost")) == 1
    assert json.loads((runs / "apart" / "run.json").read_text())["exit_code"] == 0


@pytest.mark.soak
@pytest.mark.slow
def test_run_without_engines_fails_and_can_be_resumed(settings: list[str], tmp_path: Path) -> None:
    (tmp_path / "mortal.py").write_text(ENGINE)
    marker = f"{os.getpid()}-engines"
    overrides = [
        *(*settings, *SEPARATE, "trainer.timeouts.rollout_restart_s=4"),
        *("actor_rollout_ref.rollout.name=mortal:Engine", "actor_rollout_ref.rollout.n=2"),
        *("trainer.total_training_steps=1000", "trainer.total_epochs=1000"),
        *("trainer.save_freq=1", "trainer.max_ckpt_to_keep=1"),
    ]
    run = tmp_path / "runs" / "quickstart" / "alone"
    process = start("train", "grpo", "--name", "alone", *overrides, cwd=tmp_path, marker=marker)
    wait_for_steps(process, run, 4)
    (tmp_path / "full").touch()
    for log in (run / "attempts" / "1").glob("engines-*.log"):
        for each in with_marker(marker):
            with suppress(psutil.NoSuchProcess):  # ended with its worker
                # The driver reads the log of a lost engine.
                if each.pid != process.pid and log in [
                    Path(file.path) for file in each.open_files()
                ]:
                    each.kill()
    _, talk = process.communicate(timeout=600)
    assert process.returncode == 1, talk
    assert "no rollout engine is left, and none could be started again within 4 s" in talk
    assert talk.count("the engine is there") >= 2  # the last lines of both logs
    record = json.loads((run / "run.json").read_text())
    assert (record["state"], record["exit_code"]) == ("failed", 1)
    wait_until_gone(marker)
    (tmp_path / "full").unlink()
    saved = max(
        int(each.name.removeprefix("step_")) for each in (run / "checkpoints").glob("step_*")
    )
    assert saved >= 2
    rlctl("resume", "alone", f"trainer.total_training_steps={saved + 1}", cwd=tmp_path)
    assert [row["step"] for row in metrics(run)] == list(range(saved + 2))
    assert json.loads((run / "run.json").read_text())["exit_code"] == 0


@pytest.mark.extra("vllm")
@pytest.mark.soak
@pytest.mark.parametrize("options", [(), ("actor_rollout_ref.rollout.mode=async",), EAGER])
def test_an_engine_on_two_devices_survives_the_loss_of_one(
    options: tuple[str, ...], settings: list[str], tmp_path: Path
) -> None:
    marker = f"{os.getpid()}-shared"
    overrides = [
        *(*settings, *SEPARATE, "trainer.total_training_steps=5", "trainer.total_epochs=9"),
        *("actor_rollout_ref.rollout.name=vllm", "actor_rollout_ref.rollout.n=2"),
        "actor_rollout_ref.rollout.tensor_model_parallel_size=2",
        *options,
    ]
    run = tmp_path / "runs" / "quickstart" / "shared"
    process = start("train", "grpo", "--name", "shared", *overrides, cwd=tmp_path, marker=marker)
    wait_for_steps(process, run, 2)
    [engine] = json.loads((run / "attempts" / "1" / "engines.json").read_text())["engines"]
    assert engine["devices"] == {"CPU": 2.0}
    log = run / "attempts" / "1" / "engines-0-rank-1.log"
    [second] = [
        each
        for each in with_marker(marker)
        if each.pid != process.pid and log in [Path(file.path) for file in each.open_files()]
    ]
    second.kill()
    _, talk = process.communicate(timeout=900)
    assert process.returncode == 0, talk
    assert talk.count("is lost") == len(events(run, "engine_lost")) == 1
    assert len(events(run, "engine_restarted")) == 1
    rows = metrics(run)[1:]
    assert len(rows) == 5
    if options != EAGER:  # there an older policy generates
        assert all(row["training/rollout_probs_diff_max"] < 1e-4 for row in rows)
    wait_until_gone(marker)


def test_invalid_engine_pools_are_refused(
    settings: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    same = ["trainer.placement.rollout=x", "trainer.placement.critic=x"]
    assert main(["train", "ppo", *settings, *same]) == 3
    assert "pool 'x' holds the rollout engines and critic" in capsys.readouterr().err
    assert main(["train", "ppo", "--inline", *settings, *SEPARATE]) == 2
    assert "--inline runs one process" in capsys.readouterr().err
    assert main(["train", "ppo", *settings, *SEPARATE, "actor_rollout_ref.rollout.mode=async"]) == 3
    message = "rollout.mode=async is set, but the engine hf runs one batch at a time"
    assert message in capsys.readouterr().err


def test_dry_run_shows_the_engines(settings: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    words = ["train", "grpo", "--dry-run", "--json", *settings, *SEPARATE]
    assert main([*words, "actor_rollout_ref.rollout.n=2"]) == 0
    planned = json.loads(capsys.readouterr().out)
    rollout = next(each for each in planned["placement"] if each["role"] == "rollout")
    assert (rollout["pool"], rollout["processes"]) == ("engines", 2)
    memory = {each["role"]: each for each in planned["memory"]}
    assert memory["actor"]["engine"]["cache"] == 0
    # a request has one of eight prompts and two responses: keys and values, layers, sizes
    assert memory["rollout"]["engine"]["cache"] == 2 * 2 * 16 * (160 + 2 * 12) * 4
    assert memory["rollout"]["parameters"] == 4 * memory["rollout"]["num_parameters"]
