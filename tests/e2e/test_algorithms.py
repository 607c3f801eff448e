"""Two steps of each algorithm beyond PPO, and the second one again from the checkpoint."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from rlctl.data_prep.arithmetic import generate
from rlctl.data_prep.rows import write_rows
from tests.e2e.command import VERBS, metrics, reproducible, rlctl
from tests.e2e.killed_runs import SCORE, learned
from tests.models import write_tiny_model

SAMPLED = [
    "actor_rollout_ref.rollout.n=4",
    "reward.custom_reward_function.path=score.py",
    "reward.num_processes=1",
]
# Recipe -> settings, and a metric that shows that it learned.
CASES: dict[str, tuple[list[str], str]] = {
    "online_dpo": ([*SAMPLED, "algorithm.params.pairs=random"], "pairs/margin"),
    "raft": ([*SAMPLED, "actor_rollout_ref.actor.shuffle=true"], "raft/kept_score"),
    "distill": (
        [
            "algorithm.params.teacher_models={one: {key: rlctl/arithmetic, model_path: teacher}, "
            "others: {model_path: teacher}}"
        ],
        "distill/reverse_kl",
    ),
    "self_distill": (
        ["algorithm.params={loss_mode: forward_kl_topk, ema_decay: 0.5}"],
        "distill/forward_kl_topk",
    ),
    "dpo": (["data.train_files=pairs.parquet"], "pairs/accuracy"),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    (folder / "score.py").write_text(SCORE)
    rows = generate(16, seed=1, level=1, careless=0.0, split="train")
    for row in rows:
        row.extra_info["chosen"] = row.extra_info.pop("answer")
        row.extra_info["rejected"] = "#### 0"
    write_rows(folder / "pairs.parquet", rows)
    write_tiny_model(folder / "teacher", seed=5)
    return folder


SOAK = pytest.mark.soak


@pytest.mark.parametrize(
    "recipe",
    [pytest.param(name, marks=SOAK if name in ("raft", "distill") else ()) for name in CASES],
)
def test_two_steps_and_an_exact_resume(recipe: str, folder: Path, settings: list[str]) -> None:
    more, metric = CASES[recipe]
    settings = [*settings, "data.max_response_length=8", "trainer.save_freq=1", *more]
    settings += ["trainer.val_before_train=false", "actor_rollout_ref.actor.optim.lr=1e-3"]
    verb = VERBS.get(recipe, "ppo")
    rlctl("train", verb, "--recipe", recipe, "--inline", "--name", recipe, *settings, cwd=folder)
    run = folder / "runs" / "quickstart" / recipe
    assert [row["step"] for row in metrics(run)] == [1, 2]
    for row in metrics(run):
        assert math.isfinite(row[metric])
        assert row["actor/grad_norm"] > 0
    rlctl("resume", recipe, "--inline", "--from-step", "1", "--fork", f"{recipe}-2", cwd=folder)
    again = run.with_name(f"{recipe}-2")
    assert reproducible(again)[-1] == reproducible(run)[-1]
    assert learned(again) == learned(run)
