"""Keys of `rollout.engine_kwargs` for the engine `sglang`, and the arguments of its server."""

from __future__ import annotations

import json
from dataclasses import dataclass

from rlctl.runtime.rollout.engine import EngineSpec
from rlctl.runtime.rollout.http_engine import ServerArguments


@dataclass(frozen=True)
class SGLangArguments(ServerArguments):
    """Keys of `rollout.engine_kwargs` for this engine; without `url`, ranks start servers."""

    server_args: tuple[str, ...] = ()  # additional arguments of sglang.launch_server


def launch_arguments(spec: EngineSpec) -> list[str]:
    """Return the arguments of `sglang.launch_server` that follow from the configuration."""
    rollout = spec.rollout
    switches = {
        "--skip-tokenizer-init": True,
        "--enable-deterministic-inference": True,
        "--trust-remote-code": spec.model.trust_remote_code,
        "--disable-cuda-graph": rollout.enforce_eager,
        "--enable-memory-saver": rollout.free_cache_engine,
    }
    values = {
        "--model-path": spec.model.path,
        "--load-format": "dummy",
        "--dtype": str(spec.dtype).removeprefix("torch."),
        "--context-length": spec.max_length,
        "--max-running-requests": rollout.max_num_seqs,
        "--max-prefill-tokens": rollout.max_num_batched_tokens,
        "--mem-fraction-static": spec.memory_fraction,
        "--random-seed": spec.seed,
        "--device": spec.rank_info.device,
        "--json-model-override-args": json.dumps(spec.model.override_config),
    }
    return [str(part) for pair in values.items() for part in pair] + [
        name for name, on in switches.items() if on
    ]
