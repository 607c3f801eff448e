"""Tokens per second of separate vLLM engines with `rollout.mode=async`, relative to `sync`.

    python -m benchmarks.pool_mode [--runs 5] [--sizes 1m,20m] [--engines 1,2] [--json]

256 responses: 64 prompts of 30 to 90 tokens, 4 responses each, which end with a stop token (1 in
40: 37 tokens on average, at most 128). One thread per engine, at most 64 concurrent rows. Both
pools alternate; a ratio is the median over runs.
"""

from __future__ import annotations

import statistics
import tempfile
import time

import torch

from benchmarks.results import record_rows
from benchmarks.rollout import build
from benchmarks.table import Row, in_fresh_process, parse_arguments, show
from benchmarks.weight_sync import engine_pool, send_to
from rlctl.recipes.compose import compose
from rlctl.runtime.batch import Prompts, Ragged
from rlctl.runtime.cluster.session import ray_session

NUM_PROMPTS, N = 64, 4


def measure(size: str, runs: int, num_engines: int) -> list[Row]:
    """Return one row per mode."""
    model = build(size)
    random = torch.Generator().manual_seed(0)
    lengths = torch.randint(30, 91, (NUM_PROMPTS,), generator=random)
    ids = torch.randint(
        model.config.vocab_size // 40,
        model.config.vocab_size,
        (int(lengths.sum()),),
        generator=random,
    )
    prompts = Prompts(Ragged(ids, lengths), torch.arange(NUM_PROMPTS), [])
    settings = [f"actor_rollout_ref.rollout.n={N}", "actor_rollout_ref.rollout.max_num_seqs=64"]
    ray = compose(
        "ppo_trainer", ["data.train_files=none", "actor_rollout_ref.model.path=none"]
    ).config.ray_kwargs.ray_init
    with tempfile.TemporaryDirectory() as folder, ray_session(ray, 2 * num_engines, 1, 120.0):
        model.save_pretrained(folder)
        groups = {
            mode: engine_pool(
                model, folder, num_engines, 128, *settings, f"actor_rollout_ref.rollout.mode={mode}"
            )
            for mode in ("sync", "async")
        }
        for group in groups.values():
            group.wait()
            send_to(group, model)
        speeds: dict[str, list[float]] = {mode: [] for mode in groups}
        for run in range(runs + 1):  # the first run warms up
            for mode, group in groups.items():
                start = time.perf_counter()
                rollouts = group.generate_sequences(prompts, seed=run)
                if run:
                    speeds[mode].append(
                        len(rollouts.response_ids.values) / (time.perf_counter() - start)
                    )
        for group in groups.values():
            group.pool.close()
    ratios = {
        mode: [value / base for value, base in zip(speed, speeds["sync"], strict=True)]
        for mode, speed in speeds.items()
    }
    return [
        {
            "model": size,
            "engines": str(num_engines),
            "mode": mode,
            "tokens/s": statistics.median(speeds[mode]),
            "ratio": statistics.median(ratios[mode]),
            "least": min(ratios[mode]),
            "most": max(ratios[mode]),
        }
        for mode in speeds
    ]


def main() -> None:
    """Measure and print."""
    arguments = parse_arguments(__doc__, runs=5, sizes="1m,20m", engines="1,2")
    cases = [
        (size, int(engines))
        for size in arguments.sizes.split(",")
        for engines in arguments.engines.split(",")
    ]
    rows = [
        row
        for size, engines in cases
        for row in in_fresh_process(measure, size, arguments.runs, engines)
    ]
    record_rows(rows, {"ratio": "higher"})
    show(
        f"separate engines, async relative to sync, median of {arguments.runs} runs",
        rows,
        arguments.json,
    )


if __name__ == "__main__":
    main()
