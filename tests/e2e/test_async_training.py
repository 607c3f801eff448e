"""One step off: the same run again, after a resume, and with engines beside the trainer.

Rewards are computed beside generation, and prompts are drawn by the scores of earlier steps. A run
with `schedule=eager` is no function of its seed: `tests.e2e.soak` counts its prompts.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rlctl.__main__ import main
from rlctl.runtime.rewards.reward_pool import Scoring
from rlctl.runtime.workers.actor import ActorWorker
from tests.e2e import command
from tests.e2e.command import reproducible, rlctl
from tests.e2e.conftest import small
from tests.e2e.killed_runs import SCORE
from tests.settings import given

Rows = list[dict[str, Any]]
AHEAD = [
    *("async_training.max_staleness=1", "algorithm.rollout_correction.rollout_is=token"),
    *given(n=2, lr=1e-3, steps=3, validate=3, reward="score.py", reward_processes=1),
    "data.sampler=curriculum",
]


def train(name: str, settings: list[str], cwd: Path, *words: str) -> Path:
    """Train with GRPO and return the run."""
    (cwd / "score.py").write_text(SCORE)
    return command.train("grpo", name, *settings, *AHEAD, *words, cwd=cwd)


@pytest.fixture(scope="module")
def in_step(shelf: Path, tmp_path_factory: pytest.TempPathFactory) -> Rows:
    """Return the metrics of an uninterrupted run with the trainer's own engines."""
    return reproducible(train("first", small(shelf), tmp_path_factory.mktemp("first"), "--inline"))


def test_run_one_step_off_is_exact(settings: list[str], in_step: Rows, tmp_path: Path) -> None:
    """Train without overlap, and continue that run from its second checkpoint."""
    save = "trainer.save_freq=1"
    run = train("second", settings, tmp_path, "--inline", save, "reward.overlap=false")
    assert reproducible(run) == in_step
    assert [row["async/staleness/mean"] for row in in_step if row["step"]] == [0.0, 1.0, 1.0]
    # The importance weights are 1 only where the trainer's policy generated the rollouts.
    weights = [abs(row["rollout_corr/kl"]) for row in in_step if row["step"]]
    assert weights[0] < 1e-6 < min(weights[1:])
    rlctl("resume", run, "--from-step", 2, "--inline", cwd=tmp_path)
    assert reproducible(run) == in_step


def test_interpolated_policy_takes_no_pass_of_its_own(settings: list[str], tmp_path: Path) -> None:
    anchor = ["algorithm.rollout_correction.bypass_mode=loglinear", "trainer.test_freq=-1"]
    run = train("loglinear", settings, tmp_path, "--inline", *anchor)
    lines = (run / "metrics.jsonl").read_text().splitlines()
    rows = [row for row in map(json.loads, lines) if row["step"]]
    assert [row["async/staleness/share/1"] for row in rows] == [0, 1, 1]
    assert not any("timing_s/old_log_prob" in row for row in rows)
    # Fresh rollouts have weights of 1; those of stale ones are between 1 and π/π_rollout.
    assert rows[0]["rollout_corr/rollout_is_max"] == rows[0]["rollout_corr/rollout_is_min"] == 1
    assert all(row["rollout_corr/rollout_is_std"] > 1e-4 for row in rows[1:])


def test_engines_beside_the_trainer_change_nothing(
    settings: list[str], in_step: Rows, tmp_path: Path
) -> None:
    apart = ["trainer.placement.rollout=engines", "trainer.placement.pools={main: 1, engines: 1}"]
    beside = reproducible(train("beside", [*settings, *apart], tmp_path))
    assert [row["step"] for row in beside] == [row["step"] for row in in_step]
    assert all(row["async/weight_sync_gb"] > 0 for row in beside[1:])
    for one, other in zip(in_step, beside, strict=True):
        same = [name for name in one if name in other and not name.startswith("global_seqlen/")]
        assert len(same) > 40 or one["step"] == 0
        assert {name: other[name] for name in same} == pytest.approx(
            {name: one[name] for name in same}, abs=1e-5
        )


def test_stale_rollouts_need_a_chosen_correction(
    settings: list[str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    command = ["train", "grpo", "--dry-run", *settings, f"trainer.run_dir={tmp_path}"]
    assert main([*command, "async_training.max_staleness=1"]) == 3
    assert "rollout_is=token weighs each token" in capfd.readouterr().err
    assert main([*command, "async_training.max_staleness=2"]) == 3


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
    *("actor_rollout_ref.rollout.val_kwargs.n=2", *given(n=4, steps=1, validate=1)),
    *given(validate_first=False),
]
EPISODES = given(train_rows=2, batch=2, mini_batch=2, n=4, val=None, threads=1, steps=1, save=-1)


@pytest.mark.parametrize(
    "is_episodes",
    [False, pytest.param(True, marks=[pytest.mark.soak, pytest.mark.plugin("agents")])],
)
def test_scores_are_those_without_overlap(
    settings: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_episodes: bool
) -> None:
    (tmp_path / "mine.py").write_text(REWARD)
    recipe = "tools" if is_episodes else "grpo"
    overrides = [*EPISODES, *given(validate=-1)] if is_episodes else [*settings, *SINGLE]
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
        words = [
            *("--inline", "--name", f"overlap-{overlap}", *overrides, f"reward.overlap={overlap}"),
            f"reward.functions=[{tmp_path}/mine.py:compute_score,{tmp_path}/mine.py:rank]",
            *("reward.failed=drop", *given(reward_processes=1, runs=f"{tmp_path}/runs")),
        ]
        assert main(["train", "grpo", "--recipe", recipe, *words]) == 0
        found = reproducible(tmp_path / f"runs/quickstart/overlap-{overlap}")
        # Times of tools depend on the clock.
        rows.append([{k: v for k, v in row.items() if not k.startswith("tool/")} for row in found])
        assert (events[-1] == "end_exchange") is (overlap == "true")  # no response comes after it
    assert rows[0] == rows[1]
    dropped = [row["reward/num_dropped"] for row in rows[0] if "reward/num_dropped" in row]
    assert max(dropped) > 0
    assert rows[0][-1]["critic/score/max"] <= 0.8 + 3
