"""Tests of `rlctl sweep` with real Ray, real Optuna and real runs."""

from __future__ import annotations

import json
import os
import signal
from contextlib import nullcontext
from pathlib import Path

import pytest

from rlctl.__main__ import main
from rlctl.recipes.compose import compose
from tests.e2e.command import metrics, rlctl, start, wait_for_steps, wait_until_gone
from tests.e2e.killed_runs import events
from tests.settings import given

LR = "actor_rollout_ref.actor.optim.lr"
# A metric that is known in advance, so that the best and the pruned trials are too.
KNOWN_METRIC = ("--metric", "actor/lr", "ray_kwargs.ray_init.num_cpus=2")

# Reward that waits while `held(name, num_steps, signalled)` is true for its run: the number of
# logged steps, and True once the run has logged SIGTERM. So no test depends on the machine's speed.
HELD_REWARD = """
import os, pathlib, re, time
HERE = pathlib.Path(__file__).parent
RUNS = HERE / "runs" / "quickstart"

def num_steps_of(name):
    path = RUNS / name / "metrics.jsonl"
    return path.read_text().count("\\n") if path.exists() else 0

def held(name, num_steps, signalled):
    return {condition}

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    found = re.search("sweep-[0-9]+", os.readlink("/proc/self/fd/1"))  # its log
    if not found or not (RUNS / found[0] / "run.json").exists():
        return 1.0  # called by the checks before the run
    name = found[0]
    log = RUNS / "sweep" / "logs" / (name + ".log")
    while held(name, num_steps_of(name), "SIGTERM" in log.read_text()):
        time.sleep(0.05)
    return 1.0
"""


HELD = [*given(reward="score.py", reward_processes=1), "reward.timeout_s=300"]


def record(run: Path) -> dict[str, object]:
    return json.loads((run / "run.json").read_text())


def trials(folder: Path, name: str) -> list[dict[str, object]]:
    """Return the trials of `rlctl show NAME --json`, by number."""
    found = json.loads(rlctl("show", name, "--json", cwd=folder).stdout)["trials"]
    return sorted(found, key=lambda trial: trial["number"])


@pytest.mark.slow
def test_grid_is_pruned_and_its_best_trial_exported(settings: list[str], tmp_path: Path) -> None:
    """Run four trials, two at once, of which hyperband prunes two.

    By the name of the sweep the last three trials are in one bracket. The last two are worse than
    the second, and are held until that one is complete, and then until they are pruned.
    """
    condition = """{
        "sweep-000": not (RUNS / "sweep-001" / "run.json").exists(),
        "sweep-001": False,
    }.get(name, num_steps_of("sweep-001") < 9 or (num_steps >= 4 and not signalled))"""
    (tmp_path / "score.py").write_text(HELD_REWARD.format(condition=condition))
    own = [
        *(*HELD, *given(steps=9, validate_first=False, validate=9, response=4)),
        *(f"{LR}=5e-3,4e-3,3e-3,2e-3", "algorithm.norm_adv_by_std_in_grpo=false"),
        *("trainer.placement.device_fraction=0.5", "ray_kwargs.ray_init.num_cpus=1"),
    ]
    options = ["--metric", "actor/lr", "--pruner", "hyperband", "--name", "sweep"]
    done = rlctl("sweep", "grpo", *settings, *own, *options, cwd=tmp_path)
    assert "cluster: 1 CPU; a run takes 0.5 CPU: 2 at once" in done.stderr
    found = trials(tmp_path, "sweep")
    runs = [tmp_path / "runs" / "quickstart" / f"sweep-{number:03d}" for number in range(4)]
    records = [record(run) for run in runs]
    assert {each["sweep"] for each in records} == {"sweep"}
    assert records[1]["created"] < records[0]["ended"], "two at once"
    ends = [each["ended"] for each in records[:2]]
    assert records[2]["created"] > min(ends), "and no more than two"
    assert [trial["state"] for trial in found] == ["finished", "finished", "pruned", "pruned"]
    assert [trial["value"] for trial in found[:2]] == [5e-3, 4e-3]
    for run in runs[2:]:
        assert record(run)["state"] == "stopped"
        assert '"kind": "pruned"' in (run / "events.jsonl").read_text()
        assert metrics(run)[-1]["step"] < 9
    rlctl("sweep", "best", "sweep", "--export", "best.yaml", cwd=tmp_path)
    winner, exported = compose(tmp_path / "best.yaml").config, tmp_path / "best.yaml"
    assert winner.actor_rollout_ref.actor.optim.lr == 5e-3
    assert not winner.algorithm.norm_adv_by_std_in_grpo
    assert winner.data.train_batch_size == 8
    rlctl("sweep", "best", "sweep", "--export", exported, cwd=tmp_path, code=5)
    assert "sweep" in rlctl("sweeps", cwd=tmp_path).stdout


@pytest.mark.soak
@pytest.mark.slow
def test_crashed_trial_is_retried_and_then_fails_alone(settings: list[str], tmp_path: Path) -> None:
    (tmp_path / "crash.py").write_text(
        "import os\n\ndef estimator(inputs, config):\n    os.kill(os.getpid(), 9)\n"
    )
    short = given(steps=1, validate=1, validate_first=False)
    crash = (*short, "algorithm.adv_estimator=crash:estimator,grpo")
    rlctl(
        *("sweep", "grpo", *settings, *crash, *KNOWN_METRIC, "--name", "crash"),
        cwd=tmp_path,
        more={"PYTHONPATH": str(tmp_path)},
    )
    found = trials(tmp_path, "crash")
    assert [trial["state"] for trial in found] == ["failed", "finished"]
    record = json.loads((tmp_path / "runs" / "quickstart" / "crash" / "sweep.json").read_text())
    assert record["retried"] == {"crash-000": 1}
    assert record["exit_code"] == 0


def test_excessive_resources_and_invalid_values_are_rejected(
    settings: list[str],
    here: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Sweep in this process, on a cluster of two CPUs instead of Ray."""
    monkeypatch.setattr("rlctl.runtime.cluster.session.ray_session", lambda *_: nullcontext())
    total = {"CPU": 2.0, "GPU": 0.0}
    monkeypatch.setattr("rlctl.runtime.cluster.resources.total", lambda: total)
    too_many = ("trainer.n_gpus_per_node=4,2", "ray_kwargs.ray_init.num_cpus=2")
    assert main(["sweep", "ppo", *settings, *too_many, "--name", "large"]) == 7
    assert "needs 4 CPU; the whole cluster has 2 CPU" in capsys.readouterr().err
    stored = json.loads((here / "runs" / "quickstart" / "large" / "sweep.json").read_text())
    assert stored["state"] == "failed"
    assert main(["sweep", "ppo", *settings, f"{LR}=1e-4,1e-3", "--dry-run", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert (plan["runs"], plan["settings"]["sampler"]) == (2, "grid")
    assert [trial["overrides"] for trial in plan["trials"]] == [[f"{LR}=0.0001"], [f"{LR}=0.001"]]
    assert main(["sweep", "ppo", *settings, f"{LR}=1e-4,fast", "--dry-run"]) == 3
    assert f"trial {LR}=fast" in capsys.readouterr().err
    loggers = ("--logger", "tensorboard", "-l", "nothing")
    assert main(["sweep", "ppo", *settings, f"{LR}=1e-4,1e-3", *loggers, "--dry-run"]) == 3
    error = capsys.readouterr().err
    assert "unknown logger 'nothing'" in error
    assert "trainer.logger=[console,tensorboard,nothing]" in error


@pytest.mark.soak
@pytest.mark.slow
def test_interrupted_sweep_resumes(settings: list[str], tmp_path: Path) -> None:
    """Interrupt the first trial with Ctrl-C and the second with kill -9, and resume the sweep.

    The completed trial stays, the others continue from their checkpoints, and no step runs twice.
    """
    condition = "num_steps >= 2 and not signalled"
    (tmp_path / "score.py").write_text(HELD_REWARD.format(condition=condition))
    own = [*HELD, *given(steps=6, validate=6, validate_first=False, save=1)]
    own.append(f"{LR}=choice(1e-4,2e-4)")
    words = ["sweep", "grpo", *settings, *own, *KNOWN_METRIC, "--parallel", "1", "--name", "sweep"]
    first, second = (tmp_path / "runs" / "quickstart" / f"sweep-{trial:03d}" for trial in range(2))
    interrupt(words, tmp_path, first, signal.SIGINT, 130)
    assert "stopped" in rlctl("sweeps", cwd=tmp_path).stdout
    assert record(first)["state"] == "stopped"
    assert not second.exists()
    interrupt(["resume", "sweep"], tmp_path, second, signal.SIGKILL, -signal.SIGKILL)
    assert "lost" in rlctl("sweeps", cwd=tmp_path).stdout
    before = record(first)
    assert before["state"] == "finished"
    rlctl("resume", second.name, cwd=tmp_path)  # by itself: the sweep's cluster has ended
    assert record(second)["state"] == "finished"
    rlctl("resume", "sweep", cwd=tmp_path)
    assert [(trial["state"], trial["value"]) for trial in trials(tmp_path, "sweep")] == [
        ("finished", 1e-4),
        ("finished", 2e-4),
    ]
    assert record(first) == before
    for run in (first, second):
        assert record(run)["attempts"] == 2
        assert [row["step"] for row in metrics(run)] == list(range(1, 7))
        assert [each["step"] > 0 for each in events(run, "resume")] == [True], "from a checkpoint"


def interrupt(words: list[str], cwd: Path, run: Path, number: int, code: int) -> None:
    """Send the sweep a signal after two steps of the run; check that no process is left."""
    marker = f"{os.getpid()}-sweep-{number}"
    process = start(*words, cwd=cwd, marker=marker)
    wait_for_steps(process, run, 2)
    if number == signal.SIGKILL:
        os.kill(process.pid, number)
    else:
        os.killpg(process.pid, number)  # like a terminal
    _, output = process.communicate(timeout=600)
    assert process.returncode == code, output
    wait_until_gone(marker)
