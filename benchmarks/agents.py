"""Episodes with slow tools: share of time in which the engine works, continuous against lock-step.

The tool takes a lognormal time (median 0.2 s, 99th percentile 3 s) that depends on the row and the
turn. Lock-step lets every episode write its turn, waits for all tools, and begins the next turn.
The controller's share of a core is measured with tools that take no time of the processor.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import random
import statistics
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

from benchmarks.prompts import prompt_set
from benchmarks.results import record
from rlctl.cores import available_cores
from rlctl.data_prep.arithmetic import train_and_validation
from rlctl.plugins.agents.environments.protocol import Row, Step
from rlctl.plugins.agents.generator import EpisodeGenerator
from rlctl.quickstart import real_path
from rlctl.recipes.compose import compose
from rlctl.runtime.base.batch import Prompts
from rlctl.runtime.base.rank_info import RankInfo
from rlctl.runtime.build import build_actor, load_algorithm
from rlctl.runtime.cluster.pools import InlinePool
from rlctl.runtime.data.tokenizer import tokenizer_of
from rlctl.runtime.generation import schedule
from rlctl.runtime.generation.policy_engines import ColocatedEngines
from rlctl.runtime.generators import Generation, open_generator
from rlctl.runtime.rollout.requests import Slice
from rlctl.runtime.serving.chat import Turn
from rlctl.suggest import hydra_text

MEDIAN_S, P99_S, NUM_TURNS = 0.2, 3.0, 4
ROLLOUT = "actor_rollout_ref.rollout"


class SlowTool:
    """Environment that repeats the question after the time of a slow tool."""

    tools = ()

    async def reset(self, row: Row) -> None:
        """Remember the row's question and number."""
        self.question = row["prompt"][-1]["content"]
        self.random = random.Random(row["extra_info"]["number"])
        self.turn = 0

    async def step(self, turn: Turn) -> Step:
        """Wait; end the episode after the last turn."""
        del turn
        self.turn += 1
        if self.turn == NUM_TURNS:
            return Step(done=True)
        spread = math.log(P99_S / MEDIAN_S) / 2.326
        await asyncio.sleep(self.random.lognormvariate(math.log(MEDIAN_S), spread))
        return Step([{"role": "user", "content": self.question}])

    async def score(self) -> float:
        """Return 0."""
        return 0.0

    async def close(self) -> None:
        """Do nothing."""


@contextmanager
def episodes(
    engine: str, num: int, max_num_seqs: int
) -> Iterator[tuple[EpisodeGenerator, Prompts]]:
    """Yield a generator of episodes, and `num` prompts."""
    config = compose(
        "grpo",
        [
            "data.max_prompt_length=160",
            "data.max_response_length=512",
            hydra_text("actor_rollout_ref.model.path", real_path("quickstart")),
            f"{ROLLOUT}.name={engine}",
            f"{ROLLOUT}.n=1",
            f"{ROLLOUT}.max_num_seqs={max_num_seqs}",
            f"{ROLLOUT}.multi_turn.enable=true",
            f"{ROLLOUT}.agent.environment={Path(__file__).resolve()}:SlowTool",
            f"{ROLLOUT}.agent.num_workers=1",
        ],
    ).config
    tokenizer = tokenizer_of(config.actor_rollout_ref.model)
    problems, _ = train_and_validation(num, 1, seed=0, level=2, careless=0.0)
    rows = [
        replace(row, extra_info={"number": number}) for number, row in enumerate(problems[:num])
    ]
    prompts = prompt_set(config, rows)
    info = RankInfo(0, 1, "cpu", available_cores(), 600.0, False, None)
    with ExitStack() as stack:
        pool = InlinePool(info)
        stack.callback(pool.close)
        actor = build_actor(config, load_algorithm(config, 1), tokenizer, pool)
        actor.start_engine()
        generation = Generation(config, tokenizer, ColocatedEngines(actor), info)
        generator, _ = stack.enter_context(open_generator(generation))
        assert isinstance(generator, EpisodeGenerator)
        yield generator, prompts.batch(range(num))


def play(
    generator: EpisodeGenerator, prompts: Prompts, lock_step: bool
) -> tuple[float, float, float]:
    """Return seconds in all, of the engine's work, and of the controller beside it."""
    generator.busy_s = 0.0
    generator.settings = replace(generator.settings, fixed=lock_step)
    with patch.object(schedule, "FIXED", Slice(steps=None)):
        generator.update_weights()
        main_s, begin = time.thread_time(), time.monotonic()
        generator.generate_sequences(prompts, seed=1)
        return time.monotonic() - begin, generator.busy_s, time.thread_time() - main_s


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engine", default="hf")
    parser.add_argument("--episodes", type=int, default=256)
    parser.add_argument("--max-num-seqs", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    with episodes(given.engine, given.episodes, given.max_num_seqs) as (actor, prompts):
        ratios: list[float] = []
        for number in range(given.rounds):
            steps_s, _, _ = play(actor, prompts, lock_step=True)
            total_s, busy_s, controller_s = play(actor, prompts, lock_step=False)
            ratios.append(steps_s / total_s)
            print(
                f"round {number}: lock-step {steps_s:.2f} s, continuous {total_s:.2f} s, "
                f"ratio {steps_s / total_s:.2f}; engine busy {busy_s / total_s:.0%}, controller "
                f"{controller_s / total_s:.1%} of a core",
                flush=True,
            )
    record("continuous over lock-step", statistics.median(ratios), "higher")


if __name__ == "__main__":
    main()
