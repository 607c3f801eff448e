"""Rewards that are computed while other responses are generated change no number of a run."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlctl.__main__ import main
from rlctl.runtime.rewards.pool import Scoring
from rlctl.runtime.workers.actor import ActorWorker
from tests.e2e.command import reproducible

REWARD = """
import asyncio, hashlib
from rlctl.plugins import declare

def number(text):
    return hashlib.sha256(text.encode()).digest()[0] / 255

async def compute_score(solution_str, **kwargs):
    await asyncio.sleep(0.01)
    if number(solution_str) > 0.8:
        raise ValueError("refused")
    return {"score": number(solution_str), "letters": len(solution_str)}

@declare(scores_groups=True)
def rank(data_source, solution_strs, ground_truth, extra_infos):
    scores = [number(each) for each in solution_strs]
    return [sorted(scores).index(each) for each in scores]
"""


SINGLE = [
    *("grpo", "actor_rollout_ref.rollout.n=4", "actor_rollout_ref.rollout.val_kwargs.n=2"),
    *("trainer.total_training_steps=1", "trainer.test_freq=1", "trainer.val_before_train=false"),
]
EPISODES = [
    *(
        "tools",
        "data.train_max_samples=2",
        "data.train_batch_size=2",
        "data.val_files=null",
        "trainer.num_threads=1",
    ),
    *("actor_rollout_ref.rollout.n=4", "actor_rollout_ref.actor.ppo_mini_batch_size=2"),
    *("trainer.total_training_steps=1", "trainer.save_freq=-1", "trainer.test_freq=-1"),
]


@pytest.mark.parametrize("is_episodes", [False, pytest.param(True, marks=pytest.mark.soak)])
def test_scores_are_those_without_overlap(
    settings: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_episodes: bool
) -> None:
    (tmp_path / "mine.py").write_text(REWARD)
    recipe, *overrides = EPISODES if is_episodes else [SINGLE[0], *settings, *SINGLE[1:]]
    events: list[str] = []

    def watch(owner: type, method: str) -> None:
        original = getattr(owner, method)

        def watched(*args: object) -> object:
            events.append(method)
            return original(*args)

        monkeypatch.setattr(owner, method, watched)

    watch(Scoring, "add")
    watch(ActorWorker, "end_exchange")
    rows = []
    for overlap in ("true", "false"):
        events.clear()
        given = [
            *("--inline", "--name", f"overlap-{overlap}", *overrides, f"reward.overlap={overlap}"),
            f"reward.functions=[{tmp_path}/mine.py:compute_score,{tmp_path}/mine.py:rank]",
            *("reward.failed=drop", "reward.num_processes=1", f"trainer.run_dir={tmp_path}/runs"),
        ]
        assert main(["train", "grpo", "--recipe", recipe, *given]) == 0
        found = reproducible(tmp_path / f"runs/quickstart/overlap-{overlap}")
        # Times of tools depend on the clock.
        rows.append([{k: v for k, v in row.items() if not k.startswith("tool/")} for row in found])
        assert (events[-1] == "end_exchange") is (overlap == "true")  # no response comes after it
    assert rows[0] == rows[1]
    dropped = [row["reward/num_dropped"] for row in rows[0] if "reward/num_dropped" in row]
    assert max(dropped) > 0
    assert rows[0][-1]["critic/score/max"] <= 0.8 + 3
