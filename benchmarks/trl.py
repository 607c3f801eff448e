"""Response tokens per second of a GRPO step of rlctl relative to TRL's.

    python -m venv /tmp/trl && /tmp/trl/bin/pip install -e . trl==1.16.0
    /tmp/trl/bin/python -m benchmarks.trl [--rounds 5] [--threads 1] [--model FILE.gguf]

Both train the quickstart's model in one process, without Ray and KL, and take turns: 32 prompts
with 8 responses each, one mini-batch, one epoch. Lengths are forced, the same in both: equal (58
tokens), then natural (lognormal with a median of 20 tokens and a longest of 256). The first round
is a warm-up. Bars: 1.6 and 3.

With `--model` both train that model on sums instead (see `benchmarks.trl_learning`).
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, StoppingCriteriaList, TrainerCallback

from benchmarks.results import record
from benchmarks.rollout import RowLimits
from rlctl.recipes.compose import compose
from rlctl.runtime.base.batch import Scored
from rlctl.runtime.base.roles import Roles
from rlctl.runtime.build import build_reward, build_roles
from rlctl.runtime.launch import open_pools
from rlctl.runtime.planning.plan import Plan, make_plan
from rlctl.runtime.rewards.gsm8k import score
from rlctl.runtime.rollout.engine import Responses, RolloutEngine, SamplingParams
from rlctl.runtime.workers.actor import ActorWorker

PROMPTS, N, EQUAL, LONGEST = 32, 8, 58, 256
BARS = {"equal": 1.6, "natural": 3.0}
OVERRIDES = (
    f"data.train_batch_size={PROMPTS}",
    f"actor_rollout_ref.rollout.n={N}",
    f"actor_rollout_ref.actor.ppo_mini_batch_size={PROMPTS}",
    f"data.max_response_length={LONGEST}",
    "actor_rollout_ref.actor.use_kl_loss=false",
    "actor_rollout_ref.rollout.name=hf",
    "data.val_files=null",
    "trainer.total_training_steps=1000",
    "trainer.total_epochs=1000",
)
Times = tuple[float, float]  # of the wall clock, of the CPU
Step = Callable[[], object]


def response_lengths(kind: str) -> Tensor:
    """Return the length of each response of a step: (B,) int64."""
    if kind == "equal":
        return torch.full((PROMPTS * N,), EQUAL)
    draw = torch.Generator().manual_seed(0)
    spread = (0.9 * torch.randn(PROMPTS * N, generator=draw)).exp()
    return (20 * spread).long().clamp(1, LONGEST)


def timed(step: Step) -> Times:
    """Return the seconds that a step takes."""
    begin = time.perf_counter(), time.process_time()
    step()
    return time.perf_counter() - begin[0], time.process_time() - begin[1]


class ForcedLengths:
    """Engine whose responses have given lengths."""

    def __init__(self, engine: RolloutEngine, limits: Tensor) -> None:
        self._engine = engine
        self._limits = limits

    def __getattr__(self, name: str) -> Any:
        """Return what the engine has."""
        return getattr(self._engine, name)

    def generate(self, prompts: Any, sampling: SamplingParams) -> Responses:
        """Sample responses of the given lengths."""
        forced = dataclasses.replace(sampling, max_tokens=self._limits, stop_token_ids=())
        return self._engine.generate(prompts, forced)


class Turns(TrainerCallback):
    """Times a step of TRL's trainer, then one of rlctl."""

    def __init__(self, other: Step) -> None:
        self.other = other
        self.begin = (0.0, 0.0)
        self.trl: list[Times] = []
        self.rlctl: list[Times] = []

    def on_step_begin(self, *_: object, **__: object) -> None:
        """Start the clock: the step generates, scores and learns."""
        self.begin = time.perf_counter(), time.process_time()

    def on_step_end(self, *_: object, **__: object) -> None:
        """Stop the clock, and run the step of rlctl."""
        now = time.perf_counter(), time.process_time()
        self.trl.append((now[0] - self.begin[0], now[1] - self.begin[1]))
        self.rlctl.append(timed(self.other))


def trl_trainer(
    plan: Plan,
    limits: Tensor,
    turns: TrainerCallback,
    rounds: int,
    folder: Path,
    passes: int = 1,
) -> Any:
    """Return TRL's trainer for the model, prompts, reward and optimizer of `plan`.

    It divides the rows of a step into `passes`. On a GPU its passes are in bfloat16.
    """
    rollout = plan.config.actor_rollout_ref
    model: Any = (
        AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(rollout.model.path))
        if rollout.model.init == "random"
        else AutoModelForCausalLM.from_pretrained(rollout.model.path, dtype=torch.float32)
    )
    padding = plan.tokenizer.pad_token_id
    generate = model.generate

    def forced(*arguments: Any, **options: Any) -> Any:
        width = options["input_ids"].shape[1]
        criteria = StoppingCriteriaList([RowLimits(width, limits)])
        return generate(*arguments, stopping_criteria=criteria, **options)

    model.generate = forced

    def reward(
        completions: Any, ground_truth: Any, completion_ids: Any, **_: object
    ) -> list[float]:
        longer = {
            len(ids) - limit for ids, limit in zip(completion_ids, limits.tolist(), strict=True)
        }
        assert longer <= {0, 1}, f"TRL has other lengths: {sorted(longer)[:9]}"
        pairs = zip(completions, ground_truth, strict=True)
        return [score("", text, truth, method="strict")["score"] for text, truth in pairs]

    more = {
        "max_completion_length": int(limits.max()),
        # Padding ends responses and is never sampled. None would mean the model's own end.
        "generation_kwargs": {"eos_token_id": padding, "suppress_tokens": [padding]},
    }
    trainer = grpo_trainer(plan, model, reward, turns, rounds, folder, passes, more)
    trainer.eos_token_ids = [padding]  # it cuts a response at the first one
    return trainer


def grpo_trainer(
    plan: Plan,
    model: Any,
    reward: Callable[..., list[float]],
    turns: TrainerCallback,
    rounds: int,
    folder: Path,
    passes: int,
    more: Mapping[str, object],
) -> Any:
    """Return TRL's trainer of `model` for the prompts and the optimizer of `plan`.

    It gets their text, as it would begin a new message after any: its prompts are rlctl's tokens.
    """
    datasets: Any = import_module("datasets")  # of the environment with TRL alone
    trl: Any = import_module("trl")
    config = plan.config.actor_rollout_ref
    optim = config.actor.optim
    on_cpu = plan.devices.kind == "cpu"
    num_rows = plan.config.data.train_batch_size * config.rollout.n
    batches = [plan.loader.batch_at(step) for step in range(1, rounds + 1)]
    data = datasets.Dataset.from_list(
        [
            {"prompt": text_of(plan, ids), "ground_truth": row.ground_truth}
            for batch in batches
            for ids, row in zip(batch.prompt_ids.rows(), batch.rows, strict=True)
        ]
    )
    settings = trl.GRPOConfig(
        output_dir=str(folder),
        use_cpu=on_cpu,
        bf16=not on_cpu,
        gradient_checkpointing=not on_cpu,
        per_device_train_batch_size=num_rows // passes,
        gradient_accumulation_steps=passes,
        num_generations=config.rollout.n,
        max_steps=rounds,
        learning_rate=optim.lr,
        weight_decay=optim.weight_decay,
        max_grad_norm=config.actor.grad_clip,
        lr_scheduler_type="constant",
        optim="adamw_torch_fused",
        loss_type="grpo",
        report_to=[],
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
        **more,
    )
    return trl.GRPOTrainer(
        model,
        reward,
        settings,
        train_dataset=data,
        processing_class=plan.tokenizer,
        callbacks=[turns],
    )


def text_of(plan: Plan, ids: Tensor) -> str:
    """Return the text of a prompt, which must be tokenized to `ids` again."""
    text = str(plan.tokenizer.decode(ids))
    assert plan.tokenizer(text)["input_ids"] == ids.tolist(), text
    return text


@contextmanager
def built(overrides: Sequence[str], folder: Path) -> Iterator[tuple[Plan, Roles]]:
    """Build GRPO with `overrides` in this process, and yield its plan and roles."""
    plan = make_plan(compose("grpo", overrides), inline=True)
    with (
        build_reward(plan.config, plan.tokenizer, plan.data_sources) as reward,
        open_pools(plan, folder, lambda _: None, lambda _kind, **_fields: None) as pools,
    ):
        roles, _ = build_roles(
            plan.config, plan.algorithm, plan.tokenizer, pools, reward, lambda _: None
        )
        yield plan, roles


def take_step(plan: Plan, roles: Roles, number: int) -> Scored:
    """Take a step of rlctl, and return its responses."""
    scored = plan.algorithm.collect(plan.loader.batch_at(number), roles, number)
    plan.algorithm.learn(scored, roles, number)
    return scored


def compare(
    kind: str, rounds: int, folder: Path, overrides: Sequence[str], passes: int = 1
) -> list[tuple[Times, Times]]:
    """Return the times of TRL and rlctl in each round, after one that does not count."""
    limits = response_lengths(kind)
    given = (*OVERRIDES, f"trainer.run_dir={folder}", *overrides)
    with built(given, folder) as (plan, roles):
        actor: Any = roles.actor
        assert isinstance(actor, ActorWorker)
        actor.engine = ForcedLengths(actor.engine, limits)  # type: ignore[assignment]
        numbers = itertools.count(1)

        def step() -> None:
            scored = take_step(plan, roles, next(numbers))
            assert torch.equal(scored.response_ids.lengths, limits)

        turns = Turns(step)
        trl_trainer(plan, limits, turns, rounds + 1, folder, passes).train()
    return list(zip(turns.trl, turns.rlctl, strict=True))[1:]


def measure(kind: str, rounds: int, threads: int, folder: Path) -> None:
    """Run the rounds of one kind of lengths, and print the ratio."""
    pairs = compare(kind, rounds, folder, [f"trainer.num_threads={threads}"])
    wall, cpu = ([theirs[i] / ours[i] for theirs, ours in pairs] for i in (0, 1))
    ratio = statistics.median(wall)
    print(
        f"{kind:8s} {int(response_lengths(kind).sum())} response tokens; TRL "
        f"{statistics.median(theirs[0] for theirs, _ in pairs):.2f} s, rlctl "
        f"{statistics.median(ours[0] for _, ours in pairs):.2f} s; ratio {ratio:.2f} "
        f"({min(wall):.2f} to {max(wall):.2f}), of CPU time {statistics.median(cpu):.2f}; "
        f"bar {BARS[kind]}",
        flush=True,
    )
    record(f"GRPO step over TRL, {kind} lengths", ratio, "higher")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--model", help="a pretrained model: a folder or a GGUF file")
    arguments = parser.parse_args()
    if arguments.model:
        from benchmarks.trl_learning import learn

        learn(arguments.model, arguments.rounds, arguments.threads)
        return
    for kind in BARS:
        with tempfile.TemporaryDirectory() as folder:
            measure(kind, arguments.rounds, arguments.threads, Path(folder))


if __name__ == "__main__":
    main()
