"""N steps are k steps, `kill -9`, `rlctl resume` and N − k steps: the same bytes in the metrics and in what was learnt."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import pytest

from tests.e2e.command import metrics, reproducible
from tests.e2e.interrupted import LOGGER, SCORE, events, finish_in_spite_of, learnt, random_kills, run, state

STEPS = 6


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    (folder / "score.py").write_text(SCORE)
    return folder


@pytest.fixture
def small(settings: list[str]) -> list[str]:
    """Six steps of eight prompts, answers scored 0 to 1; validated and saved every second step."""
    return [
        *settings,
        f"trainer.total_training_steps={STEPS}",
        "trainer.save_freq=2",
        "trainer.test_freq=2",
        "data.max_response_length=8",
        "reward.custom_reward_function.path=score.py",
        LOGGER,
    ]


def train(verb: str, name: str, settings: list[str], folder: Path) -> Path:
    """A run that nothing disturbs; made once a module."""
    path = folder / "runs" / "quickstart" / name
    if not path.exists():
        ended = run("train", verb, "--inline", "--name", name, *settings, cwd=folder)
        assert ended.code == 0, ended.talk
    return path


def copy_of(path: Path, name: str) -> Path:
    """The same run under another name: a run is its folder."""
    shutil.copytree(path, path.with_name(name), symlinks=True)
    record = path.with_name(name) / "run.json"
    record.write_text(record.read_text().replace(f'"name": "{path.name}"', f'"name": "{name}"'))
    return path.with_name(name)


PPO = ["algorithm.use_kl_in_reward=true", "algorithm.kl_ctrl.type=adaptive", "trainer.critic_warmup=2"]
GRPO = ["actor_rollout_ref.rollout.n=4", "actor_rollout_ref.actor.use_kl_loss=true", "actor_rollout_ref.actor.shuffle=true"]


@pytest.mark.parametrize(("verb", "more"), [("ppo", PPO), ("grpo", GRPO)])
def test_killed_at_any_moment(verb: str, more: list[str], small: list[str], folder: Path) -> None:
    """Three random moments each, one after the other in the same run."""
    straight = train(verb, verb, [*small, *more], folder)
    assert len({row["critic/score/mean"] for row in metrics(straight)[1:]}) > 1  # there is something to learn from
    seed = random.SystemRandom().randrange(10**6)
    kills = random_kills(3, 24, random.Random(seed))
    name = f"{verb}-killed"
    doing = finish_in_spite_of(kills, name, ["train", verb, "--inline", "--name", name, *small, *more], folder, "--inline")
    killed = straight.with_name(name)
    assert doing, f"seed {seed}"
    assert reproducible(killed) == reproducible(straight), f"seed {seed}: {kills}, {doing}"
    assert learnt(killed) == learnt(straight), f"seed {seed}: {kills}, {doing}"
    assert state(killed) == state(straight), f"seed {seed}: {kills}, {doing}"
    assert len(events(killed, "attempt")) == len(doing) + 1
    assert not list(killed.glob("checkpoints/.*"))
