"""Rung of Ray: a process of a pool, started as for a run, sees one device and compiles on it."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

import ray
import torch
from torch._dynamo import config

from benchmarks.gpu.recorder import Recorder, Settings
from rlctl.recipes.compose import compose
from rlctl.runtime.base.rank_info import RankInfo
from rlctl.runtime.launch import open_pools
from rlctl.runtime.model.compiled import enable_compiler
from rlctl.runtime.planning.plan import make_plan
from rlctl.runtime.workers.dispatch import Dispatch, Worker, dispatch


class Probe(Worker):
    """Worker that compiles."""

    def __init__(self, rank_info: RankInfo) -> None:
        self.device = rank_info.device
        if self.device == "cpu":
            enable_compiler()  # as `use_torch_compile` does; on a GPU each process has one

    @dispatch(Dispatch.BROADCAST)
    def facts(self) -> dict[str, Any]:
        """Return the devices of this process, and the largest error of a compiled function."""
        values = torch.linspace(-4, 4, 1000, device=self.device)

        def function(x: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.silu(x).cumsum(0) * x.sigmoid()

        compiled = torch.compile(function, fullgraph=True)
        return {
            "devices": torch.cuda.device_count() if self.device == "cuda" else 0,
            "visible": os.environ.get("CUDA_VISIBLE_DEVICES"),
            "aot": _compiles_ahead(compiled),
            "error": float((compiled(values) - function(values)).abs().max()),
        }


def _compiles_ahead(compiled: Any) -> bool:
    """Return True if vLLM can compile ahead of time: it sets the option, off in torch 2.11."""
    with config.patch(enable_aot_compile=True):
        return hasattr(compiled, "aot_compile")


def measure(settings: Settings, recorder: Recorder) -> None:
    """Start a pool of one process, and let it compile."""
    with tempfile.TemporaryDirectory() as folder:
        place = [f"trainer.run_dir={folder}", f"trainer.device={settings.device}"]
        recipe = compose("grpo", [*place, "trainer.n_gpus_per_node=1"])
        plan, logs = make_plan(recipe, inline=False), Path(folder)
        with open_pools(plan, logs, print, lambda _kind, **_fields: None) as pools:
            (pool,) = pools.workers.values()
            facts = pool.spawn("probe", Probe).facts()
            counted = ray.cluster_resources().get("GPU", 0.0)
    expected = int(settings.device == "cuda")
    holds = facts["aot"] and facts["error"] < 1e-3 and facts["devices"] == expected <= counted
    recorder.row("ray", **facts, counted_by_ray=int(counted), ok=holds)
