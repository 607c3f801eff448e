"""Time of `generate` of the engine `hf` relative to an earlier commit, in alternation.

    python -m benchmarks.generate_change [--base 9fbb446] [--runs 7] [--sizes 1m,20m] [--threads 1]

The default is the last commit whose `generate` decoded batches directly, without requests. Each
commit has a process with its own code, the model and the work of `benchmarks.rollout`; they take
turns, so that the load of the machine changes both. The ratio is the base's time divided by this
version's, median of the pairs: 1 is as fast, more is faster. Time is CPU time.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def child(size: str, max_num_seqs: int, threads: int) -> None:
    """Generate once for each line of stdin; print CPU seconds. Runs with either version's code."""
    import torch

    from benchmarks.rollout import WORK, build
    from rlctl.runtime.base.batch import Ragged
    from rlctl.runtime.rollout.engine import SamplingParams
    from rlctl.runtime.rollout.hf import HFEngine

    torch.set_num_threads(threads)
    num_prompts, n, longest = WORK[size]
    random = torch.Generator().manual_seed(0)
    lengths = torch.randint(30, 91, (num_prompts,), generator=random)
    limits = torch.linspace(8, longest, num_prompts * n).round().long()
    limits = limits[torch.randperm(num_prompts * n, generator=random)]
    model = build(size)
    values = torch.randint(1, model.config.vocab_size, (int(lengths.sum()),), generator=random)
    prompts, engine = Ragged(values, lengths), HFEngine(model, max_num_seqs=max_num_seqs)
    sampling = SamplingParams(
        temperature=1.0, top_p=1.0, top_k=0, max_tokens=limits, stop_token_ids=(), seed=1, n=n
    )
    engine.generate(prompts, sampling)  # warms up
    print("ready", flush=True)
    for _ in sys.stdin:
        began = time.process_time()
        responses = engine.generate(prompts, sampling)
        seconds = time.process_time() - began
        print(seconds, int(responses.response_ids.values.sum()), flush=True)


class Version:
    """Process with the code of one commit."""

    def __init__(self, root: Path, arguments: list[str]) -> None:
        code = f"from benchmarks.generate_change import child; child({', '.join(arguments)})"
        path = os.pathsep.join([str(root)])
        script = (root / "benchmarks" / Path(__file__).name).resolve()
        if not script.exists():
            script.write_text(Path(__file__).read_text(encoding="utf-8"))
        self.process = subprocess.Popen(
            [sys.executable, "-c", code],
            cwd=root,
            env={**os.environ, "PYTHONPATH": path},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def read(self) -> list[str]:
        """Return the words of the next line."""
        assert self.process.stdout is not None, "a pipe"
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit("a version ended with an error")
        return line.split()

    def generate(self) -> tuple[float, str]:
        """Return CPU seconds of one call, and a checksum of the tokens."""
        assert self.process.stdin is not None, "a pipe"
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        seconds, checksum = self.read()
        return float(seconds), checksum

    def close(self) -> None:
        """End the process."""
        self.process.kill()
        self.process.wait()


def compare(base: Path, size: str, max_num_seqs: int, threads: int, runs: int) -> str:
    """Return the ratio of base and this version as a line."""
    arguments = [repr(size), str(max_num_seqs), str(threads)]
    with ExitStack() as stack:
        versions = [Version(root, arguments) for root in (base, ROOT)]
        for each in versions:
            stack.callback(each.close)
        for each in versions:
            each.read()
        times: list[tuple[float, float]] = []
        equal = True
        for run in range(runs):
            order = versions if run % 2 else versions[::-1]
            found = {each: each.generate() for each in order}
            (before, first), (after, second) = (found[each] for each in versions)
            times.append((before, after))
            equal = equal and first == second
    ratios = [before / after for before, after in times]
    least_before, least_after = (min(each) for each in zip(*times, strict=True))
    return (
        f"{size}, {max_num_seqs} concurrent: ratio {statistics.median(ratios):.3f} "
        f"({min(ratios):.3f} to {max(ratios):.3f}), of the least times "
        f"{least_before / least_after:.3f} ({least_before:.3f} s, now {least_after:.3f} s), "
        f"{'the same' if equal else 'other'} tokens"
    )


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--base", default="9fbb446")
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument("--sizes", default="1m,20m")
    parser.add_argument("--threads", type=int, default=1)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        base = Path(folder) / "base"
        git = ["git", "-C", str(ROOT), "worktree"]
        subprocess.run([*git, "add", "--detach", "-q", str(base), given.base], check=True)
        try:
            for size in given.sizes.split(","):
                for max_num_seqs in (256, 64):
                    line = compare(base, size, max_num_seqs, given.threads, given.runs)
                    print(line, flush=True)
        finally:
            subprocess.run([*git, "remove", "--force", str(base)], check=True)


if __name__ == "__main__":
    main()
