"""Time from import to first response of vLLM, in seconds, as rlctl starts it and with its defaults.

    python -m benchmarks.vllm_start [--runs 3] [--threads 2] [--json]

A model of a million parameters; each start in a fresh process, alternating. `import`: torch and
vLLM. `engine`: until it accepts requests. `first`: one prompt, four tokens, and for rlctl the
weight sync before it. The default start is `vllm.LLM(model, load_format="dummy")` with a small
cache and no tokenizer, otherwise unchanged: separate processes, and everything compiled that vLLM
compiles on a CPU.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time

from benchmarks.results import record_rows
from benchmarks.table import Row, in_fresh_process, parse_arguments, show

PHASES = ("import", "engine", "first")


def start_as_rlctl(folder: str, num_threads: int) -> dict[str, float]:
    """Start vLLM as rlctl does; return the seconds of each phase."""
    begin = time.perf_counter()
    import vllm  # noqa: F401  # pyright: ignore[reportMissingImports, reportUnusedImport]

    imported = time.perf_counter()
    import torch
    from transformers import AutoModelForCausalLM

    from benchmarks.rollout import vllm_settings
    from rlctl.runtime.base.batch import Ragged
    from rlctl.runtime.base.rank_info import RankInfo
    from rlctl.runtime.rollout.engine import EngineSpec, SamplingParams
    from rlctl.runtime.rollout.vllm_engine.vllm_in_process import VLLMEngine

    torch.set_num_threads(num_threads)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    part = vllm_settings(folder)
    spec = EngineSpec(
        part.model,
        part.rollout,
        torch.float32,
        RankInfo(0, 1, "cpu", num_threads, 600.0, False, None),
        256,
        seed=0,
    )
    ready = time.perf_counter()
    engine = VLLMEngine.from_spec(spec, model)
    started = time.perf_counter()
    engine.load_weights((name, value.detach()) for name, value in model.named_parameters())
    engine.generate(
        Ragged.from_rows([[5, 6, 7]], torch.int64),
        SamplingParams(1.0, 1.0, -1, (), max_tokens=4, seed=0, n=1),
    )
    return {
        "import": imported - begin,
        "engine": started - ready,
        "first": time.perf_counter() - started,
    }


def start_with_defaults(folder: str, num_threads: int) -> dict[str, float]:
    """Start vLLM with its defaults; return the seconds of each phase."""
    begin = time.perf_counter()
    from vllm import LLM, SamplingParams  # pyright: ignore[reportMissingImports]

    imported = time.perf_counter()
    llm = LLM(
        folder,
        load_format="dummy",
        skip_tokenizer_init=True,
        max_model_len=256,
        kv_cache_memory_bytes=2**28,
    )
    started = time.perf_counter()
    llm.generate(
        [{"prompt_token_ids": [5, 6, 7]}],
        SamplingParams(max_tokens=4, detokenize=False),
        use_tqdm=False,
    )
    responded = time.perf_counter()
    llm.llm_engine.engine_core.shutdown()  # otherwise its processes keep this one alive
    del num_threads  # vLLM chooses its own number
    return {"import": imported - begin, "engine": started - imported, "first": responded - started}


def save_model(folder: str) -> None:
    """Save a small random model in `folder`."""
    from benchmarks.rollout import build

    build("1m").save_pretrained(folder)


def main() -> None:
    """Measure and print."""
    arguments = parse_arguments(__doc__, runs=3, threads=2)
    starts = {"rlctl": start_as_rlctl, "default": start_with_defaults}
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")  # it logs to stdout
    found: dict[str, list[dict[str, float]]] = {name: [] for name in starts}
    with tempfile.TemporaryDirectory() as folder:
        in_fresh_process(save_model, folder)
        for _ in range(arguments.runs):
            for name, start in starts.items():
                found[name].append(in_fresh_process(start, folder, arguments.threads))
    totals = {
        name: statistics.median(sum(each.values()) for each in times)
        for name, times in found.items()
    }
    rows: list[Row] = [
        {"start": name}
        | {phase: statistics.median(each[phase] for each in times) for phase in PHASES}
        | {"together": totals[name], "ratio": totals[name] / totals["rlctl"]}
        for name, times in found.items()
    ]
    record_rows(rows, {"ratio": "higher"})
    show(
        f"vLLM until its first response, seconds, median of {arguments.runs} starts",
        rows,
        arguments.json,
    )


if __name__ == "__main__":
    main()
