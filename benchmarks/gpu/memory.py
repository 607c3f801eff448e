"""Rung of memory: peak memory of updates beside the estimate of `--dry-run`; offload is exact."""

from __future__ import annotations

import gc
import tempfile
from importlib.util import find_spec
from pathlib import Path

import torch

from benchmarks.gpu.recorder import Recorder, Settings
from benchmarks.gpu.work import pool, rank_info
from benchmarks.memory import CASES, EIGHT_BITS, MIB, OFFLOADED, planned, run, write_model

_LIMIT = 0.15  # difference of plan and peak
_SIZES = {True: (128, 2, 1024, 2), False: (1024, 16, 32768, 16)}  # hidden, layers, vocabulary, rows


def measure(settings: Settings, recorder: Recorder) -> None:
    """Measure each case of one rank; offloaded ones must give the weights of the same case."""
    hidden, layers, vocabulary, rows = _SIZES[settings.tiny]
    cases = {name: case for name, case in CASES.items() if case.ranks == 1}
    cases |= {name: case for name, (_, case) in OFFLOADED.items()}
    if find_spec("torchao") is None:
        del cases[EIGHT_BITS]
        recorder.note(EIGHT_BITS, "torchao is not installed")
    digests: dict[str, int] = {}
    with tempfile.TemporaryDirectory() as folder, pool(settings.device):
        write_model(Path(folder), hidden, layers, vocabulary)
        for name, case in cases.items():
            with recorder.attempt(name):
                found = run(rank_info(settings.device), case, folder, rows)
                plan = planned(case, folder, settings.device, rows)
                digests[name] = found["digest"]
                ratio = plan.peak / found["peak"]
                same = OFFLOADED[name][0] if name in OFFLOADED else name
                exact = digests[name] == digests.get(same)
                recorder.row(
                    "memory",
                    case=name,
                    peak_mib=found["peak"] / MIB,
                    plan_mib=plan.peak / MIB,
                    plan_by_peak=ratio,
                    exact=exact if name in OFFLOADED else None,
                    ok=exact and (settings.tiny or abs(ratio - 1) <= _LIMIT),
                )
            gc.collect()
            if settings.device == "cuda":
                torch.cuda.empty_cache()
