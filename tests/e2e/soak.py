"""`make soak`: runs that are killed at random moments and must equal undisturbed ones.

Twenty kills by default: PPO and GRPO in one process, and PPO on two ranks. Prints what each run was
doing when it was killed, and fails if any recorded or learned byte differs.
"""

from __future__ import annotations

import argparse
import random
import shutil
import sys
import tempfile
import time
from pathlib import Path

from rlctl.data_prep.arithmetic import train_and_validation
from rlctl.data_prep.rows import write_rows
from tests.e2e.command import reproducible
from tests.e2e.killed_runs import (
    LOGGER,
    SCORE,
    finish_despite,
    learned,
    random_kills,
    responses,
    run,
    state,
)
from tests.models import write_tiny_model

SETTINGS = [
    "data.train_files=train.parquet",
    "data.val_files=val.parquet",
    "actor_rollout_ref.model.path=model",
    "data.max_prompt_length=160",
    "data.max_response_length=8",
    "data.train_batch_size=8",
    "data.train_max_samples=40",
    "actor_rollout_ref.actor.ppo_mini_batch_size=4",
    "trainer.total_epochs=2",
    "trainer.test_freq=3",
    "trainer.save_freq=2",
    "trainer.project_name=quickstart",
    "trainer.rollout_data_dir=elsewhere",
    "trainer.num_threads=1",
    "trainer.timeouts.ray_start_s=120",
    "actor_rollout_ref.model.enable_gradient_checkpointing=false",
    "reward.custom_reward_function.path=score.py",
    LOGGER,
]
PPO = [
    "algorithm.use_kl_in_reward=true",
    "algorithm.kl_ctrl.type=adaptive",
    "trainer.critic_warmup=3",
]
GRPO = [
    "actor_rollout_ref.rollout.n=4",
    "actor_rollout_ref.actor.use_kl_loss=true",
    "actor_rollout_ref.actor.shuffle=true",
]
CASES = {  # name: verb, settings, options, share of the kills
    "ppo": ("ppo", PPO, ["--inline"], 0.4),
    "grpo": ("grpo", GRPO, ["--inline"], 0.4),
    "ppo on two ranks": ("ppo", [*PPO, "trainer.n_gpus_per_node=2"], [], 0.2),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    wanted = parser.parse_args()
    print(f"seed {wanted.seed}")
    generator = random.Random(wanted.seed)
    with tempfile.TemporaryDirectory(prefix="rlctl-soak-") as scratch:
        folder = Path(scratch)
        (folder / "score.py").write_text(SCORE)
        write_tiny_model(folder / "model")
        train, val = train_and_validation(64, 8, seed=1, level=1, careless=0.0)
        write_rows(folder / "train.parquet", train)
        write_rows(folder / "val.parquet", val)
        verdicts = [_survives(case, wanted.kills, generator, folder) for case in CASES]
        return 0 if all(verdicts) else 1


def _survives(case: str, num_kills: int, generator: random.Random, folder: Path) -> bool:
    """Return True if the run of `case`, killed as often as its share says, equals its twin.

    A run that finishes too early is started again.
    """
    verb, settings, options, share = CASES[case]
    name = case.replace(" ", "-")
    command = ["train", verb, *options, *SETTINGS, *settings, "--name"]
    ended = run(*command, name, cwd=folder)
    assert ended.code == 0, ended.talk
    straight, same, killed = folder / "runs" / "quickstart" / name, True, 0
    while killed < round(num_kills * share):
        kills = random_kills(round(num_kills * share) - killed, 50, generator)
        begin = time.monotonic()
        doing = finish_despite(kills, "killed", [*command, "killed"], folder, *options)
        path = straight.with_name("killed")
        verdict = {
            "metrics": reproducible(path) == reproducible(straight),
            "weights, moments, random state": learned(path) == learned(straight),
            "controller": state(path) == state(straight),
            "answers": responses(path) == responses(straight),
        }
        for at, what in zip(kills, doing, strict=False):
            print(f"{case:18}  {at:>9}  {what}")
        print(
            f"{case:18}  {len(doing)} kills, {time.monotonic() - begin:.0f} s: ",
            *(f"{k} {'same' if ok else 'DIFFER'}  " for k, ok in verdict.items()),
        )
        killed, same = killed + len(doing), same and all(verdict.values())
        shutil.rmtree(path)
        shutil.rmtree(folder / "elsewhere" / "quickstart" / "killed")
        sys.stdout.flush()
    return same


if __name__ == "__main__":
    sys.exit(main())
