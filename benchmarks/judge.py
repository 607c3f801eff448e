"""Rewards over HTTP: judged responses per second, and the gain of scoring during generation.

The server is in a process of its own and replies after 2 s. The slow function of the second part
sleeps; the responses are those of the quickstart's model, in this process.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryDirectory

from aiohttp import web

from benchmarks.prompts import prompt_set
from benchmarks.results import record, record_rows
from benchmarks.table import parse_arguments, show
from rlctl.data_prep.arithmetic import train_and_validation
from rlctl.data_prep.rows import PromptRow
from rlctl.quickstart import real_path
from rlctl.recipes.compose import compose
from rlctl.runtime.base.rank_info import RankInfo
from rlctl.runtime.build import build_actor, build_reward, load_algorithm
from rlctl.runtime.cluster.pools import InlinePool
from rlctl.runtime.data.tokenizer import tokenizer_of
from rlctl.runtime.generation.policy_engines import ColocatedEngines
from rlctl.runtime.generators import Generation, open_generator
from rlctl.runtime.rewards.functions import RewardSpec
from rlctl.runtime.rewards.request_limits import RequestSettings
from rlctl.runtime.rewards.reward_pool import RewardPool
from rlctl.suggest import hydra_text

SLOW = """
import time
def compute_score(solution_str, **kwargs):
    time.sleep({seconds})
    return float(len(solution_str) % 7)
"""


def main() -> None:
    """Measure both and print a table each."""
    args = parse_arguments(
        __doc__, responses=1024, concurrency=256, prompts=32, sleep="0.05", delay="2.0"
    )
    judged = judge(args.responses, args.concurrency, float(args.delay))
    show("responses of a judge", [judged], args.json)
    collected = [overlap(args.prompts, float(args.sleep))]
    show("collecting a batch, seconds", collected, args.json)
    record("ideal over measured", float(judged["ideal s"]) / float(judged["s"]), "higher")
    record_rows(collected, {"ratio": "higher"})


def judge(num_responses: int, concurrency: int, delay_s: float) -> dict[str, str | float]:
    """Return the seconds that it takes to judge the responses, with the start of the process."""
    with _server(delay_s) as url:
        spec = RewardSpec("judge", 1.0, {"base_url": url})
        settings = RequestSettings(timeout_s=60.0, max_concurrent=concurrency)
        rows = [PromptRow("s", [{"role": "user", "content": "Why?"}], "", extra_info={})]
        with RewardPool([spec], timeout_s=60.0, requests=settings) as pool:
            began = time.monotonic()
            report = pool.score(rows * num_responses, [str(i) for i in range(num_responses)])
            seconds = time.monotonic() - began
    assert report.num_errors + report.num_timeouts == 0, report.first_error
    best = -(-num_responses // concurrency) * delay_s
    return {"responses": num_responses, "at a time": concurrency, "s": seconds, "ideal s": best}


def overlap(num_prompts: int, sleep_s: float) -> dict[str, str | float]:
    """Return the seconds of generation and scoring with and without overlap."""
    with TemporaryDirectory() as folder:
        (Path(folder) / "slow.py").write_text(SLOW.format(seconds=sleep_s))
        results = {each: _collect(Path(folder), num_prompts, each) for each in ("false", "true")}
    (before, scores), (after, same) = results["false"], results["true"]
    assert scores == same, "overlap changes no score"
    return {"responses": len(scores), "after": before, "during": after, "ratio": before / after}


def _collect(folder: Path, num_prompts: int, overlapped: str) -> tuple[float, list[float]]:
    """Return the least seconds of three batches, and the scores of the last."""
    config = compose(
        "grpo",
        [
            *(f"reward.custom_reward_function.path={folder}/slow.py", "reward.num_processes=8"),
            f"reward.overlap={overlapped}",
            "actor_rollout_ref.rollout.max_num_seqs=12",  # responses finish one after the other
            hydra_text("actor_rollout_ref.model.path", real_path("quickstart")),
        ],
    ).config
    tokenizer = tokenizer_of(config.actor_rollout_ref.model)
    rows = train_and_validation(num_prompts, 1, seed=1, level=1, careless=0.0)[0]
    prompts = prompt_set(config, rows)
    batch = prompts.batch(range(num_prompts))
    rank_info = RankInfo(0, 1, "cpu", 1, 600.0, False, None)
    with ExitStack() as stack:
        pool = InlinePool(rank_info)
        stack.callback(pool.close)
        sources = {row.data_source for row in rows}
        reward = stack.enter_context(build_reward(config, tokenizer, sources))
        actor = build_actor(config, load_algorithm(config, 1), tokenizer, pool)
        actor.start_engine()
        generation = Generation(
            config, tokenizer, ColocatedEngines(actor), rank_info, reward=reward
        )
        generator, _ = stack.enter_context(open_generator(generation))
        times: list[float] = []
        scores: list[float] = []
        for _ in range(3):
            generator.update_weights()
            began = time.monotonic()
            rollouts = generator.generate_sequences(batch, seed=1)
            scores = reward.compute_scores(rollouts).scores.tolist()
            times.append(time.monotonic() - began)
    return min(times), scores


@contextmanager
def _server(delay_s: float) -> Iterator[str]:
    """Serve the API of chat completions in another process; yield its base URL."""
    own, other = multiprocessing.get_context("spawn").Pipe()
    process = multiprocessing.get_context("spawn").Process(target=_serve, args=(other, delay_s))
    process.start()
    try:
        yield own.recv()
    finally:
        process.terminate()
        process.join()


def _serve(connection: Connection, delay_s: float) -> None:
    import asyncio

    async def reply(request: web.Request) -> web.Response:
        await request.read()
        await asyncio.sleep(delay_s)
        message = {"role": "assistant", "content": '{"reasoning": "", "score": 5}'}
        return web.json_response({"choices": [{"message": message}], "usage": {"total_tokens": 9}})

    async def run() -> None:
        app = web.Application()
        app.router.add_post("/v1/chat/completions", reply)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0, backlog=1024).start()
        connection.send(f"http://127.0.0.1:{runner.addresses[0][1]}/v1")
        await asyncio.Event().wait()

    asyncio.run(run())


if __name__ == "__main__":
    main()
