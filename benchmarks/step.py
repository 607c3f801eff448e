"""Time of a GRPO step of rlctl on Ray relative to a plain loop with the same model code.

    python -m benchmarks.step [--steps 12] [--inline]

Both start from the same weights and sample the same responses, so that every step does the same
work; they alternate. The plain loop has no Ray, configuration or roles; with `--inline` rlctl has
no Ray either. Prints the median of the ratios and the phases of rlctl's step.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import torch

from benchmarks.results import record
from rlctl.recipes.compose import compose
from rlctl.runtime.algorithms.policy_losses.base import (
    ClipRange,
    PolicyTokens,
    load_policy_loss,
)
from rlctl.runtime.base.balance import TokenCounts, micro_batches
from rlctl.runtime.base.batch import Prompts, Ragged
from rlctl.runtime.base.clock import Clock
from rlctl.runtime.build import build_reward, build_roles
from rlctl.runtime.data.tokenizer import stop_token_ids
from rlctl.runtime.launch import open_pools
from rlctl.runtime.model.causal_lm import PolicyModel
from rlctl.runtime.model.load import load_model
from rlctl.runtime.model.sequences import Sequences, prompt_numbers
from rlctl.runtime.planning.plan import Plan, make_plan
from rlctl.runtime.rewards.gsm8k import score
from rlctl.runtime.rollout.engine import SamplingParams
from rlctl.runtime.rollout.hf import HFEngine

OVERRIDES = [
    "actor_rollout_ref.actor.use_kl_loss=false",
    "trainer.total_training_steps=1000",
    "trainer.total_epochs=1000",
]


class Bare:
    """GRPO in one function: no KL, vanilla loss, two mini-batches, AdamW."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        rollout = plan.config.actor_rollout_ref
        hf = load_model(rollout.model, "policy", torch.float32, 0)
        self.model, self.engine = (
            PolicyModel(hf, 1.0),
            HFEngine(hf, max_num_seqs=rollout.rollout.max_num_seqs),
        )
        optim = rollout.actor.optim
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(),
            lr=optim.lr,
            betas=optim.betas,
            weight_decay=optim.weight_decay,
            fused=True,
        )
        self.sampling = SamplingParams(
            1.0,
            1.0,
            -1,
            max_tokens=plan.config.data.max_response_length,
            stop_token_ids=stop_token_ids(plan.tokenizer, rollout.model.path),
            seed=0,
            n=8,
        )

    def log_probs(
        self, prompts: Ragged, responses: Ragged, index: torch.Tensor, with_entropy: bool
    ) -> torch.Tensor:
        """Return log-probs (T,) of the responses of the rows at `index` (N,)."""
        own = prompts.select(index)
        sequences = Sequences.from_ragged(
            own, responses.select(index), prompt_of_row=prompt_numbers(own)
        )
        return self.model(sequences, with_entropy=with_entropy).log_probs

    def step(self, prompts: Prompts, seed: int) -> None:
        """Run rollout, advantages and update for one batch of prompts."""
        actor = self.plan.config.actor_rollout_ref.actor
        out = self.engine.generate(
            prompts.prompt_ids, SamplingParams(**{**self.sampling.__dict__, "seed": seed})
        )
        texts = self.plan.tokenizer.batch_decode(
            [ids.tolist() for ids in out.response_ids.rows()], skip_special_tokens=True
        )
        truths = [row.ground_truth for row in prompts.rows for _ in range(8)]
        scores = torch.tensor(
            [
                score("", text, truth, method="strict")["score"]
                for text, truth in zip(texts, truths, strict=True)
            ]
        )
        groups = scores.view(-1, 8)
        advantages = (
            (groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-6)
        ).flatten()
        prompt_ids, responses = (
            prompts.prompt_ids.select(torch.arange(len(prompts)).repeat_interleave(8)),
            out.response_ids,
        )
        lengths, numbers = prompt_ids.lengths + responses.lengths, prompt_numbers(prompt_ids)

        def parts(rows: torch.Tensor) -> list[torch.Tensor]:
            counts = TokenCounts(lengths[rows], numbers[rows], prompt_ids.lengths[rows])
            return [rows[p] for p in micro_batches(counts, actor.ppo_max_token_len_per_gpu)]

        first, *later = torch.arange(len(lengths)).split(actor.ppo_mini_batch_size * 8)
        old: dict[int, torch.Tensor] = {}  # of the rows of later mini-batches
        with torch.no_grad():
            for index in (index for rows in later for index in parts(rows)):
                flat = self.log_probs(prompt_ids, responses, index, with_entropy=True)
                of_rows = flat.split(responses.lengths[index].tolist())
                old |= dict(zip(index.tolist(), of_rows, strict=True))
        loss = load_policy_loss(actor.policy_loss.loss_mode, actor.policy_loss.params)
        for rows in (first, *later):
            count = int(responses.lengths[rows].sum())
            for index in parts(rows):
                mine = responses.select(index)
                own_pass = rows is first
                now = self.log_probs(prompt_ids, responses, index, with_entropy=own_pass)
                tokens = PolicyTokens(
                    log_probs=now,
                    old_log_probs=now.detach()
                    if own_pass
                    else torch.cat([old[row] for row in index.tolist()]),
                    advantages=advantages[index][mine.row_of_token],
                    mask=torch.ones(len(mine.values)),
                    row=mine.row_of_token,
                    num_rows=len(index),
                )
                (loss(tokens, ClipRange.from_config(actor))[0].sum() / count).backward()
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), actor.grad_clip)
            self.optimizer.step()
            self.optimizer.zero_grad()


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--inline", action="store_true")
    arguments = parser.parse_args()
    steps, inline = arguments.steps, arguments.inline
    with tempfile.TemporaryDirectory() as folder:
        plan = make_plan(compose("grpo", [*OVERRIDES, f"trainer.run_dir={folder}"]), inline=inline)
        torch.set_num_threads(plan.num_threads)  # as rlctl's worker
        clock = Clock(lambda _: None)
        bare, bare_s, rlctl_s, phases = Bare(plan), [], [], []
        with (
            build_reward(plan.config, plan.tokenizer, plan.data_sources) as reward,
            open_pools(plan, Path(folder), print, lambda _kind, **_fields: None) as pools,
            clock.running(),
        ):
            roles, _ = build_roles(
                plan.config, plan.algorithm, plan.tokenizer, pools, reward, print
            )
            for step in range(1, steps + 3):
                begin = time.perf_counter()
                clock.take()
                with clock.phase("controller"):
                    plan.algorithm.learn(
                        plan.algorithm.collect(plan.loader.batch_at(step), roles, step), roles, step
                    )
                rlctl_s.append(time.perf_counter() - begin)
                phases.append(clock.take())
                begin = time.perf_counter()
                bare.step(plan.loader.batch_at(step), seed=step)
                bare_s.append(time.perf_counter() - begin)
    ratios = [a / b for a, b in zip(rlctl_s[2:], bare_s[2:], strict=True)]
    rlctl_median, bare_median = statistics.median(rlctl_s[2:]), statistics.median(bare_s[2:])
    print(
        f"rlctl {rlctl_median:.3f} s, bare {bare_median:.3f} s per step; "
        f"ratio {statistics.median(ratios):.3f} (median of {steps} pairs)"
    )
    name = "step over a bare loop, inline" if inline else "step over a bare loop"
    record(name, statistics.median(ratios), "lower")
    for name in phases[-1]:
        print(f"  {name:14s} {statistics.median(p[name] for p in phases[2:]):7.3f} s")


if __name__ == "__main__":
    main()
