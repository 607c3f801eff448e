"""Plug-ins of eight kinds, most with a setting: see docs/extending.md.

They are in one file for brevity. A package would put data sets in a file without torch, so that
`rlctl prep --help` stays fast.
"""

import random

import typer
from pydantic import Field

import rlctl
from rlctl.data_prep.datasets import dataset
from rlctl.data_prep.rows import PromptRow
from rlctl.plugins import Params, declare
from rlctl.runtime.algorithms.advantages.base import estimator, on_tokens
from rlctl.runtime.algorithms.policy_losses.base import policy_loss, token_means
from rlctl.runtime.rollout.hf import HFEngine


class ScaledScoreParams(Params):
    scale: float = Field(default=1.0, gt=0, description="factor of all advantages")


@estimator(params=ScaledScoreParams)
def scaled_score(inputs, config, params):
    """Return scale · (score − mean score of the batch), on every token: (B, R), twice."""
    return on_tokens(params.scale * (inputs.scores - inputs.scores.mean()), inputs)


class LeashedParams(Params):
    beta: float = Field(default=0.1, ge=0, description="weight of the squared log-ratio")


@policy_loss(params=LeashedParams)
def leashed(tokens, clip, params):
    """Return −A·log π + β·d²: (T,), and metrics."""
    d = tokens.log_ratio
    losses = -tokens.advantages * tokens.log_probs + params.beta * d.square()
    return losses, token_means(tokens.mask, {"actor/ppo_kl": -d, "actor/leash": d.square()})


class CoolParams(Params):
    min_top_k: int = Field(default=0, ge=0, description="smallest top_k that is used; 0 = any")


class CoolEngine(HFEngine):
    """The built-in engine with a lower bound of top_k."""

    Params = CoolParams

    @classmethod
    def from_spec(cls, spec, policy):
        engine = super().from_spec(spec, policy)
        engine.params = CoolParams(**spec.rollout.params)
        return engine

    @staticmethod
    def unused_keys(config):
        return {"actor_rollout_ref.rollout.gpu_memory_utilization": "cool manages no memory"}

    def generate(self, prompt_ids, sampling):
        if 0 < sampling.top_k < self.params.min_top_k:
            raise ValueError(f"top_k is {sampling.top_k}")
        return super().generate(prompt_ids, sampling)


class SumsParams(Params):
    count: int = Field(default=64, ge=1, description="Problems in each split.")
    largest: int = Field(default=9, ge=1, description="Largest number of a problem.")


@dataset(SumsParams, "rlctl prep sums --largest 20", default_out="data/sums")
def sums(params):
    """Sums of two numbers, in train.parquet and val.parquet."""

    def rows(split):
        rng = random.Random(split)
        for index in range(params.count):
            a, b = rng.randint(1, params.largest), rng.randint(1, params.largest)
            chat = [{"role": "user", "content": f"Tom has {a} apples. He buys {b} more."}]
            extra = {"split": split, "index": index, "answer": f"#### {a + b}"}
            yield PromptRow("sums", chat, str(a + b), extra_info=extra)

    return {split: list(rows(split)) for split in ("train", "val")}


class TsvParams(Params):
    file: str = Field(default="metrics.tsv", min_length=1, description="file in the run's folder")


class TsvTracker:
    """A line of tab-separated text per step; lines about the run and its samples start with #."""

    Params = TsvParams

    def __init__(self, params):
        self.params = params

    def start(self, run):
        self.file = (run.folder / self.params.file).open("a", encoding="utf-8")
        if not run.resume_step:
            self.write("#", f"{run.project}/{run.name}", f"{run.total_steps} steps")
        return self.params.file

    def log(self, step, metrics):
        self.write(step, *(f"{name}={value:g}" for name, value in sorted(metrics.items())))

    def generations(self, step, samples):
        num_right = sum(each.right for each in samples)
        self.write("#", f"step {step}", f"{len(samples)} samples", f"{num_right} right")

    def finish(self, state):
        self.write("#", state)
        self.file.close()

    def write(self, *fields):
        print(*fields, sep="\t", file=self.file, flush=True)


class EveryOtherParams(Params):
    stride: int = Field(default=2, ge=1, description="distance of consecutive prompts in the data")


@declare(Params=EveryOtherParams)
def every_other(num_prompts, epoch, seed, params):
    """Return 0, stride, 2·stride, …, 1, stride + 1, …: (num_prompts,) int64."""
    import torch

    indices = [torch.arange(first, num_prompts, params.stride) for first in range(params.stride)]
    return torch.cat(indices)


class ContainsParams(Params):
    reward: float = Field(default=1.0, description="score of a response that has the number")


@declare(Params=ContainsParams)
def contains(data_source, solution_str, ground_truth, extra_info=None, *, reward):
    """Return `reward` if the response contains the ground truth, else 0."""
    return reward if str(ground_truth) in solution_str else 0.0


app = typer.Typer()


@app.command()
def lengths(run: str = "@last"):
    """Print the mean length of the responses of each step of a run."""
    for row in rlctl.open_run(run).history():
        if "response_length/mean" in row:
            print(f"{row['step']:g}\t{row['response_length/mean']:.1f}")
