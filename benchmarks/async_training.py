"""Throughput of training beside generation, relative to training that alternates with it.

    python -m benchmarks.async_training [--pairs 3] [--steps 10] [--median 24] [--staleness K]

Both runs of a pair have one core for the engine and one for the trainer, in pools of their own; the
first alternates (`async_training.max_staleness=0`), the second is one step ahead, or at most K with
`async_training.schedule=eager`. Lengths of responses are lognormal with a longest of 8 medians, and
do not depend on the policy. The ideal is what full overlap would give: the seconds of generation
and of learning in the first run, added and divided by the longer of them; an engine without pauses
can exceed it, for its batches stay full. The first 2 + K steps are not counted, nor the last K,
which have rollouts in store.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from pathlib import Path

from benchmarks.child import metric_rows, rlctl
from benchmarks.results import record

WARM_UP = 2
LONGEST = 8  # medians
SIGMA = 0.9  # of the logarithm of a length
# Engine that ends each response after a random length that its seed determines.
ENGINE = """
import math, random
from dataclasses import replace
from rlctl.runtime.rollout.hf import HFEngine

class Skewed(HFEngine):
    def submit(self, requests):
        super().submit([skewed(each) for each in requests])

def skewed(request):
    limits = tuple(
        min(limit, max(1, round({median} * math.exp({sigma} * random.Random(seed).gauss(0, 1)))))
        for limit, seed in zip(request.max_tokens, request.seeds)
    )
    decoding = replace(request.decoding, stop_token_ids=())
    return replace(request, max_tokens=limits, decoding=decoding)
"""
APART = (
    *("trainer.placement.rollout=engines", "trainer.placement.pools={main: 1, engines: 1}"),
    *("actor_rollout_ref.rollout.name=skewed:Skewed", "trainer.num_threads=1"),
    *("actor_rollout_ref.actor.use_kl_loss=false", "trainer.test_freq=-1", "trainer.save_freq=-1"),
    "algorithm.rollout_correction.rollout_is=token",
)


def seconds(folder: Path, name: str, steps: range, *settings: str) -> dict[str, float]:
    """Train and return the mean of each timing of `steps` in seconds, and `tokens`.

    `tokens` are those of the responses of one step.
    """
    rlctl(folder, "train", "grpo", "--name", name, *settings)
    rows = metric_rows(folder / "runs" / "quickstart" / name)
    rows = [row for row in rows if row["step"] in steps and "timing_s/step" in row]
    names = ("step", "gen", "reward", "wait_rollouts", "update_weights")
    found = {
        each: statistics.fmean(row.get(f"timing_s/{each}", 0.0) for row in rows) for each in names
    }
    tokens = statistics.fmean(row["response_length/mean"] for row in rows)
    idle = [row["async/trainer_idle"] for row in rows if "async/trainer_idle" in row]
    return found | {"tokens": tokens, "idle": statistics.fmean(idle) if idle else 0.0}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--median", type=int, default=24, help="tokens")
    parser.add_argument("--staleness", type=int, help="steps, with schedule=eager", metavar="K")
    given = parser.parse_args()
    ahead_by = given.staleness or 1
    counted = range(WARM_UP + ahead_by, WARM_UP + ahead_by + given.steps)
    settings = [
        *APART,
        f"data.max_response_length={LONGEST * given.median}",
        f"trainer.total_training_steps={counted.stop + ahead_by}",
        f"async_training.schedule={'eager' if given.staleness else 'fixed'}",
    ]
    ratios = []
    with tempfile.TemporaryDirectory(prefix="rlctl-async-") as scratch:
        folder = Path(scratch)
        (folder / "skewed.py").write_text(ENGINE.format(median=given.median, sigma=SIGMA))
        for pair in range(given.pairs):
            found = [
                seconds(
                    folder,
                    f"{pair}-{staleness}",
                    counted,
                    *settings,
                    f"async_training.max_staleness={staleness}",
                )
                for staleness in (0, ahead_by)
            ]
            alternating, ahead = found
            beside = alternating["gen"] + alternating["reward"]
            learning = alternating["step"] - beside
            ideal = alternating["step"] / max(beside, learning)
            speeds = [each["tokens"] / each["step"] for each in found]
            ratios.append(speeds[1] / speeds[0])
            print(
                f"alternating: generation {beside:.2f} s, the rest {learning:.2f} s; "
                f"{ahead_by} ahead: {ahead['step']:.2f} s, {ahead['idle']:.0%} of it waiting for "
                f"rollouts; ratio {ratios[-1]:.2f}, ideal {ideal:.2f}: "
                f"{ratios[-1] / ideal:.0%} of it",
                flush=True,
            )
    record("one step ahead over alternating", statistics.median(ratios), "higher")
    print(f"median ratio {statistics.median(ratios):.2f}")


if __name__ == "__main__":
    main()
