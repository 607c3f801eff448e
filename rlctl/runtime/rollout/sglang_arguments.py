"""Keys of `rollout.engine_kwargs` for the engine `sglang`, and the arguments of its server."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Self

from rlctl.errors import Problem, raise_problems
from rlctl.recipes import schema
from rlctl.runtime.rollout.engine import EngineSpec

ENGINE_KWARGS = "actor_rollout_ref.rollout.engine_kwargs"


@dataclass(frozen=True)
class SGLangArguments:
    """Keys of `rollout.engine_kwargs` for this engine."""

    url: str | tuple[str, ...] | None = None  # running servers, one per rank; None: start one each
    server_args: tuple[str, ...] = ()  # additional arguments of sglang.launch_server
    start_timeout_s: float = 300.0  # until the server must be ready
    weights_dir: str | None = None  # folder shared with the server for weights; None: shared memory

    @classmethod
    def from_config(cls, rollout: schema.Rollout) -> Self:
        """Read `rollout.engine_kwargs`. Raises ConfigError for an unknown key."""
        known = cls.__dataclass_fields__
        unknown = [key for key in rollout.engine_kwargs if key not in known]
        hint = f"known: {', '.join(known)}"
        raise_problems(
            [
                Problem(
                    f"the engine sglang has no argument {key!r}", where=ENGINE_KWARGS, hint=hint
                )
                for key in unknown
            ]
        )
        given: dict[str, Any] = {
            key: tuple(value) if isinstance(value, list) else value
            for key, value in rollout.engine_kwargs.items()
        }
        return cls(**given)

    @property
    def urls(self) -> tuple[str, ...]:
        """URLs of running servers; empty if each rank starts its own."""
        if self.url is None:
            return ()
        return (self.url,) if isinstance(self.url, str) else self.url


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
        "--mem-fraction-static": rollout.gpu_memory_utilization,
        "--random-seed": spec.seed,
        "--device": spec.rank_info.device,
        "--json-model-override-args": json.dumps(spec.model.override_config),
    }
    return [str(part) for pair in values.items() for part in pair] + [
        name for name, on in switches.items() if on
    ]
