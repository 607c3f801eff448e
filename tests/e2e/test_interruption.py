"""A stop request in work that changes nothing: the last finished step is saved, and at once."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from tests.e2e import command
from tests.e2e.command import reproducible, rlctl, start, wait_until_gone
from tests.e2e.killed_runs import learned, responses, state
from tests.progress import wait_until
from tests.settings import given

# Hangs in `part` once the run has reported `rows`; then the file `hangs` exists.
HANG = """
import time
from pathlib import Path

HERE = Path(__file__).parent

def hang(part):
    if not (HERE / "hang").exists():
        return
    wanted, rows, run = (HERE / "hang").read_text().split()
    lines = HERE / "runs" / "quickstart" / run / "metrics.jsonl"
    if part == wanted and lines.exists() and lines.read_text().count("\\n") >= int(rows):
        (HERE / "hangs").touch()
        time.sleep(600)
"""
ENGINE = (
    HANG
    + """
from rlctl.runtime.rollout.hf import HFEngine

class Engine(HFEngine):
    def generate(self, prompts, params):
        hang("engine")
        return super().generate(prompts, params)

    def step(self):
        hang("engine")
        return super().step()
"""
)
REWARD = (
    HANG
    + """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    hang("reward")
    if extra_info["split"] == "val":
        hang("validation")
    total = sum(map(ord, solution_str))
    return {"score": (total % 7) / 6, "even": float(total % 2 == 0)}
"""
)
TOOL = """
from rlctl.plugins.agents.environments.protocol import Step

class Slow:
    tools = []

    async def reset(self, row):
        return None

    async def step(self, turn):
        hang("tool")
        return Step(done=True)

    async def score(self):
        return 0.0

    async def close(self):
        pass
"""
USUAL = [
    *given(engine="hanging:Engine", reward="score.py", reward_processes=1, steps=4, n=2),
    *("algorithm.filter_groups.enable=true", "data.sampler=curriculum"),
]
PPO = [
    *given(engine="hanging:Engine", reward="score.py", reward_processes=1, steps=4, lr=1e-3),
    *("algorithm.use_kl_in_reward=true", "algorithm.kl_ctrl.type=adaptive"),
]
AHEAD = ["async_training.max_staleness=1", "algorithm.rollout_correction.rollout_is=token"]
APART = ["trainer.placement.rollout=engines", "trainer.placement.pools={main: 1, engines: 1}"]


def write_code(folder: Path) -> None:
    (folder / "hanging.py").write_text(ENGINE)
    (folder / "score.py").write_text(REWARD)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("verb", "part", "rows", "more", "inline"),
    [
        pytest.param("ppo", "engine", 3, PPO, True, id="generation"),
        pytest.param("grpo", "reward", 4, USUAL, True, id="reward"),
        pytest.param("grpo", "validation", 2, USUAL, True, id="validation"),
        pytest.param("ppo", "engine", 3, PPO, False, id="ray-generation"),
        pytest.param("grpo", "reward", 3, [*USUAL, *AHEAD], True, id="one-step-off"),
        pytest.param("grpo", "validation", 2, [*USUAL, *AHEAD, *APART], False, id="engines"),
    ],
)
def test_stop_saves_the_last_finished_step(
    verb: str,
    part: str,
    rows: int,
    more: list[str],
    inline: bool,
    settings: list[str],
    tmp_path: Path,
) -> None:
    write_code(tmp_path)
    how = ["--inline"] if inline else []
    words = [*settings, *more, *how]
    straight = command.train(verb, "straight", *words, "trainer.save_freq=4", cwd=tmp_path)
    (tmp_path / "hang").write_text(f"{part} {rows} stopped")
    marker, run = f"{os.getpid()}-{part}-{rows}", straight.with_name("stopped")
    process = start("train", verb, "--name", "stopped", *words, cwd=tmp_path, marker=marker)
    hangs = tmp_path / "hangs"
    wait_until(lambda: hangs.exists() or process.poll() is not None, process.pid, "the hang")
    assert process.poll() is None, process.communicate()
    os.killpg(process.pid, signal.SIGTERM)  # like `timeout`
    _, talk = process.communicate(timeout=120)  # the call hangs for 600 s
    assert process.returncode == 143, talk
    assert "Traceback" not in talk
    wait_until_gone(marker)
    last = rows - (part != "validation")
    assert [path.name for path in (run / "checkpoints").iterdir()] == [f"step_{last:06d}"], talk
    assert len((run / "metrics.jsonl").read_text().splitlines()) == rows
    (tmp_path / "hang").unlink()
    rlctl("resume", "stopped", *how, "trainer.save_freq=4", cwd=tmp_path)
    assert reproducible(run) == reproducible(straight)
    assert learned(run) == learned(straight)
    assert state(run) == state(straight)
    assert responses(run) == responses(straight)


@pytest.mark.slow
def test_stop_of_the_eager_schedule_loses_no_step(settings: list[str], tmp_path: Path) -> None:
    """A thread waits for the scores of later groups; its metrics depend on the clock."""
    write_code(tmp_path)
    (tmp_path / "hang").write_text("reward 3 eager")
    correction = "algorithm.rollout_correction.rollout_is=token"
    engines = [*APART, "async_training.schedule=eager", "async_training.max_staleness=2"]
    engines.append(correction)
    words = [*settings, *given(reward="score.py", reward_processes=1, steps=5, n=2, validate=-1)]
    process = start("train", "grpo", "--name", "eager", *words, *engines, cwd=tmp_path)
    hangs, run = tmp_path / "hangs", tmp_path / "runs" / "quickstart" / "eager"
    wait_until(lambda: hangs.exists() or process.poll() is not None, process.pid, "the hang")
    assert process.poll() is None, process.communicate()
    os.kill(process.pid, signal.SIGTERM)
    _, talk = process.communicate(timeout=120)
    assert process.returncode == 143, talk
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    last = rows[-1]["step"]
    assert last >= 2
    assert (run / "checkpoints" / f"step_{last:06d}").is_dir(), talk
    assert f"continues after step {last}" in talk
    (tmp_path / "hang").unlink()
    rlctl("resume", "eager", cwd=tmp_path)
    steps = [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert steps == list(range(6))


@pytest.mark.plugin("agents")
@pytest.mark.slow
def test_a_tool_that_hangs_is_interrupted(settings: list[str], tmp_path: Path) -> None:
    write_code(tmp_path)
    (tmp_path / "hangtool.py").write_text(HANG + TOOL)
    (tmp_path / "hang").write_text("tool 2 tools")
    agent = "actor_rollout_ref.rollout"
    words = [*settings, *given(reward="score.py", reward_processes=1, steps=3, validate=-1)]
    words += [f"{agent}.multi_turn.enable=true", f"{agent}.agent.environment=hangtool.py:Slow"]
    process = start("train", "grpo", "--inline", "--name", "tools", *words, cwd=tmp_path)
    hangs, run = tmp_path / "hangs", tmp_path / "runs" / "quickstart" / "tools"
    wait_until(lambda: hangs.exists() or process.poll() is not None, process.pid, "the hang")
    assert process.poll() is None, process.communicate()
    os.kill(process.pid, signal.SIGTERM)
    _, talk = process.communicate(timeout=120)
    assert process.returncode == 143, talk
    assert (run / "checkpoints" / "step_000001").is_dir(), talk


@pytest.mark.slow
def test_request_from_another_machine_interrupts(settings: list[str], tmp_path: Path) -> None:
    write_code(tmp_path)
    (tmp_path / "hang").write_text("engine 2 twice")
    process = start("train", "grpo", "--inline", "--name", "twice", *settings, *USUAL, cwd=tmp_path)
    run, hangs = tmp_path / "runs" / "quickstart" / "twice", tmp_path / "hangs"
    wait_until(lambda: hangs.exists() or process.poll() is not None, process.pid, "the hang")
    (run / "stop").touch()  # what `rlctl stop` does from another machine
    _, talk = process.communicate(timeout=120)
    assert process.returncode == 143, talk
    assert json.loads((run / "run.json").read_text())["state"] == "stopped"
    assert (run / "checkpoints" / "step_000001").is_dir()
