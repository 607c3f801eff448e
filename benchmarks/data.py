"""First and later start with many prompts: seconds, CPU seconds, and peak memory of the process.

    python -m benchmarks.data --prompts 1000000

Prompts have the lengths of GSM8K's (20 to 80 words, and an instruction). A start reads and checks
all rows, counts tokens with the quickstart's tokenizer and makes one batch of 512. Each runs in a
fresh process; memory includes torch and transformers, which `imports` shows alone. Targets for a
million prompts: first start 60 s on two quiet cores, later starts 5 s, 600 MB.
"""

from __future__ import annotations

import os
import random
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks.table import Row, in_fresh_process, parse_arguments, show
from rlctl.storage import CACHE_VARIABLE

_WORDS = ("how", "many", "does", "she", "have", "apples", "5", "12", "each", "in", "total", "left")
_PART = 10_000  # rows of a row group


def main() -> None:
    """Measure and print."""
    args = parse_arguments(__doc__, prompts=1_000_000)
    with tempfile.TemporaryDirectory(prefix="rlctl-data-") as folder:
        path, cache = f"{folder}/train.parquet", f"{folder}/cache"
        in_fresh_process(write, path, args.prompts)
        rows = [
            {"": name, **in_fresh_process(start, each, cache)}
            for name, each in (("imports", None), ("first start", path), ("later start", path))
        ]
    show(f"{args.prompts:,} prompts", rows, args.json)


def write(path: str, count: int) -> None:
    """Write a parquet file of `count` problems in words."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    parts = (pa.Table.from_pylist(each) for each in _parts(count))
    first = next(parts)
    with pq.ParquetWriter(path, first.schema) as writer:
        writer.write_table(first)
        for part in parts:
            writer.write_table(part)


def _parts(count: int) -> Iterator[list[dict[str, object]]]:
    rng = random.Random(0)
    for start_at in range(0, count, _PART):
        yield [
            {
                "data_source": "openai/gsm8k",
                "prompt": [{"role": "user", "content": f"{question} Let's think step by step."}],
                "ability": "math",
                "reward_model": {"style": "rule", "ground_truth": str(rng.randint(0, 999))},
                "extra_info": {"index": index, "question": question, "answer": answer},
            }
            for index in range(start_at, min(start_at + _PART, count))
            for question in [" ".join(rng.choices(_WORDS, k=rng.randint(20, 80)))]
            for answer in [" ".join(rng.choices(_WORDS, k=rng.randint(40, 100)))]
        ]


def start(path: str | None, cache: str) -> Row:
    """Load the prompts of a file, if there is one, and return seconds and megabytes."""
    os.environ[CACHE_VARIABLE] = cache
    from rlctl.quickstart import real_path
    from rlctl.recipes.compose import compose
    from rlctl.runtime.data.loader import PromptSet
    from rlctl.runtime.data.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(real_path("quickstart"))
    seconds, cpu = time.perf_counter(), time.process_time()
    if path is not None:
        data = compose(
            "ppo", [f"data.train_files={path}", "data.max_prompt_length=512"]
        ).config.data
        prompts = PromptSet.load_train(data, tokenizer)
        prompts.batch(range(0, len(prompts), -(-len(prompts) // 512)))
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    return {
        "seconds": time.perf_counter() - seconds,
        "CPU seconds": time.process_time() - cpu,
        "peak MB": int(status.split("VmHWM:")[1].split()[0]) * 1024 / 1e6,
    }


if __name__ == "__main__":
    main()
