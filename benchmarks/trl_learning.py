"""A pretrained model learns sums with rlctl and with TRL: time of a step, and accuracy.

    /tmp/trl/bin/python -m benchmarks.trl --model FILE.gguf [--rounds 20] [--threads 1]

See `benchmarks.trl` for the environment. Both take turns in one process, without Ray, KL and
dynamic sampling, from the same weights and rows: 8 prompts of a sum with 8 responses each, one
update a step, reward 1 for the right number alone. The accuracy is that of 96 held-out sums,
decoded greedily by transformers: before, after equal steps, and of rlctl after the time that TRL
took for them (equal minutes). The first round warms up and is not timed.
"""

from __future__ import annotations

import itertools
import statistics
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, TrainerCallback

from benchmarks.learning import write_rows_of
from benchmarks.results import record
from benchmarks.trl import Step, built, grpo_trainer, take_step
from rlctl.data_prep.sums import DATA_SOURCE
from rlctl.quickstart import real_path
from rlctl.runtime.rewards.same_text import score
from rlctl.runtime.training.validation import Validator

PROMPTS = 8
N = 8
LONGEST = 8
PASSES = 4  # of TRL: it holds the logits and activations of padded rows
BAR = 4.0
OVERRIDES = (
    f"data.train_batch_size={PROMPTS}",
    f"actor_rollout_ref.rollout.n={N}",
    f"actor_rollout_ref.actor.ppo_mini_batch_size={PROMPTS}",
    "data.max_prompt_length=96",
    f"data.max_response_length={LONGEST}",
    "actor_rollout_ref.actor.use_kl_loss=false",
    "actor_rollout_ref.actor.optim.lr=1e-5",
    "actor_rollout_ref.model.enable_gradient_checkpointing=false",
    "actor_rollout_ref.rollout.name=hf",
    "trainer.total_training_steps=1000",
    "trainer.total_epochs=1000",
)


@dataclass
class Timed(TrainerCallback):
    """Times each step of TRL's trainer, then one of rlctl."""

    other: Step
    begin: float = 0.0
    trl: list[float] = field(default_factory=list)
    rlctl: list[float] = field(default_factory=list)

    def on_step_begin(self, *_: object, **__: object) -> None:
        """Start the clock."""
        self.begin = time.perf_counter()

    def on_step_end(self, *_: object, **__: object) -> None:
        """Stop the clock; take and time a step of rlctl."""
        now = time.perf_counter()
        self.trl.append(now - self.begin)
        self.other()
        self.rlctl.append(time.perf_counter() - now)
        print(
            f"step {len(self.trl):3d}  TRL {self.trl[-1]:6.1f} s  rlctl {self.rlctl[-1]:6.1f} s",
            flush=True,
        )


def accuracy(model: Any, tokenizer: Any, prompts: Any) -> float:
    """Return the share of `prompts` answered by the right number alone, in percent."""
    right = 0.0
    model.eval()
    for ids, row in zip(prompts.prompt_ids.rows(), prompts.rows, strict=True):
        with torch.no_grad():
            whole = model.generate(
                ids[None],
                attention_mask=torch.ones_like(ids[None]),
                max_new_tokens=LONGEST,
                do_sample=False,
            )
        text = tokenizer.decode(whole[0, len(ids) :], skip_special_tokens=True)
        right += score(row.data_source, text, row.ground_truth)["score"]
    model.train()
    return 100 * right / len(prompts.rows)


def learn(model: str, rounds: int, threads: int) -> None:
    """Train both for `rounds` steps, then rlctl for the rest of TRL's time, and print."""
    with tempfile.TemporaryDirectory(prefix="rlctl-trl-") as scratch:
        folder = Path(scratch)
        write_rows_of("sums_smollm", folder)
        _learn(model, rounds, threads, folder)


def _learn(path: str, rounds: int, threads: int, folder: Path) -> None:
    given = (
        *OVERRIDES,
        f"data.train_files={folder}/data/sums/train.parquet",
        f"data.val_files={folder}/data/sums/val.parquet",
        f"actor_rollout_ref.model.path={path}",
        f"trainer.run_dir={folder}",
        f"trainer.num_threads={threads}",
    )
    with built(given, folder) as (plan, roles):
        assert isinstance(plan.validator, Validator)
        validator = plan.validator
        scores: dict[str, list[float]] = {"rlctl": [], "TRL": []}
        numbers = itertools.count(1)

        def step() -> None:
            scored = take_step(plan, roles, next(numbers))
            scores["rlctl"].append(float(scored.scores.mean()))

        def rewarded(completions: Any, ground_truth: Any, **_: object) -> list[float]:
            pairs = zip(completions, ground_truth, strict=True)
            values = [score(DATA_SOURCE, text, truth)["score"] for text, truth in pairs]
            scores["TRL"].append(statistics.fmean(values))
            return values

        def measured() -> float:
            metrics = validator.run(roles).metrics
            [value] = [each for name, each in metrics.items() if name.startswith("val-core/")]
            return 100 * value

        config = plan.config.actor_rollout_ref.model
        theirs: Any = AutoModelForCausalLM.from_pretrained(
            real_path(config.path), dtype=torch.float32
        )
        held_out = validator.prompts.batch(range(len(validator.prompts)))
        before = measured(), accuracy(theirs, plan.tokenizer, held_out)
        turns = Timed(step)
        more = {"max_completion_length": LONGEST}
        grpo_trainer(plan, theirs, rewarded, turns, rounds, folder, PASSES, more).train()
        after = measured(), accuracy(theirs, plan.tokenizer, held_out)
        left = sum(turns.trl) - sum(turns.rlctl)
        further = 0
        while left > 0:
            begin = time.perf_counter()
            step()
            further += 1
            left -= time.perf_counter() - begin
        later = measured()
    ratios = [trl / ours for trl, ours in zip(turns.trl, turns.rlctl, strict=True)][1:]
    ratio = statistics.median(ratios)
    print(
        f"a step takes TRL {statistics.median(turns.trl[1:]):.1f} s, rlctl "
        f"{statistics.median(turns.rlctl[1:]):.1f} s; ratio {ratio:.2f} ({min(ratios):.2f} to "
        f"{max(ratios):.2f}), bar {BAR}"
    )
    for name, values in scores.items():
        print(f"mean reward of {name}:", *(f"{value:.2f}" for value in values))
    print("accuracy in %         | rlctl |   TRL")
    print(f"before                | {before[0]:5.1f} | {before[1]:5.1f}")
    print(f"after {rounds:3d} steps       | {after[0]:5.1f} | {after[1]:5.1f}")
    print(f"after TRL's time      | {later:5.1f} | {after[1]:5.1f}   ({further} more steps)")
    record("GRPO step over TRL, a pretrained model", ratio, "higher")
