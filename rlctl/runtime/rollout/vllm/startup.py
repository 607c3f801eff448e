"""How a vLLM engine is started inside a worker process: arguments, memory, process groups, silence.

Written for vLLM 0.32.0. Started so, it takes 2 to 4 s on a CPU, where the defaults (a process of its own, compilation, a profiling run)
take half a minute.
"""

# pyright: reportMissingImports=false, reportMissingModuleSource=false
# (an extra: types are checked where it is installed)
from __future__ import annotations

import os
import sys
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from transformers import AutoConfig

from rlctl.errors import ConfigError, ResourceError, RlctlError
from rlctl.runtime.ops import ceil_div
from rlctl.runtime.rollout.engine import EngineSpec
from rlctl.runtime.rollout.vllm.cpu import keep_weights_plain, pad_heads, padded_head_size

if TYPE_CHECKING:
    from vllm import LLM

_BLOCK = 128  # tokens of a block of the KV cache on a CPU

_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine runs in this process: no start, no serialisation
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
}


def prepare(spec: EngineSpec) -> None:
    """Import vLLM, and fit it to this process."""
    os.environ.update(_ENVIRONMENT)
    on_cpu = spec.rank_info.device == "cpu"
    if on_cpu:
        os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")  # nothing is compiled there
    with _quiet():
        from vllm import LLM  # noqa: F401

        _look_at_models_here()
        if on_cpu:
            keep_weights_plain()
            pad_heads()


def start(spec: EngineSpec) -> LLM:
    """The engine, with random weights. Raises ConfigError for arguments it does not take, ResourceError for memory it does not get."""
    from vllm import LLM

    arguments = engine_arguments(spec) | dict(spec.rollout.engine_kwargs)
    set_num_threads = torch.set_num_threads
    with _quiet():
        try:
            llm = LLM(**arguments)
            if spec.rollout.tensor_model_parallel_size > 1:
                _forget_shared_memory()
            return llm
        except (TypeError, ValueError) as error:
            kind = ResourceError if "memory" in str(error).lower() else ConfigError
            reason = str(error).strip().splitlines()[0]
            raise kind(
                f"vLLM does not start: {reason}",
                where="actor_rollout_ref.rollout",
                hint="engine_kwargs are passed on to vllm.LLM",
            ) from error
        except RuntimeError as error:
            raise RlctlError(
                f"vLLM does not start: {error}", where="actor_rollout_ref.rollout"
            ) from error
        finally:
            torch.set_num_threads = (
                set_num_threads  # vLLM puts in its place a function that does nothing
            )


def engine_arguments(spec: EngineSpec) -> dict[str, Any]:
    """Keyword arguments of `vllm.LLM` that follow from the configuration; `engine_kwargs` may change any of them."""
    rollout, rank_info = spec.rollout, spec.rank_info
    arguments: dict[str, Any] = {
        "model": spec.model.path,
        "trust_remote_code": spec.model.trust_remote_code,
        "load_format": "dummy",  # weights come from the trainer
        "dtype": str(spec.dtype).removeprefix("torch."),
        "seed": spec.seed,
        "max_model_len": spec.max_length,
        "max_num_seqs": rollout.max_num_seqs,
        "max_num_batched_tokens": rollout.max_num_batched_tokens,
        "tensor_parallel_size": rollout.tensor_model_parallel_size,
        "logprobs_mode": "processed_logprobs",
        "generation_config": "vllm",  # what is sampled is said in each request, never by the model's folder
        "skip_tokenizer_init": True,
        "enable_prefix_caching": True,
    }
    if rank_info.device == "cpu":
        arguments |= {
            "enforce_eager": True,
            "kv_cache_memory_bytes": kv_cache_bytes(spec),
            # A request that is prefilled in two parts takes back a random number, which generators on a CPU cannot do.
            "enable_chunked_prefill": False,
            "max_num_batched_tokens": max(rollout.max_num_batched_tokens, spec.max_length),
        }
    else:
        arguments |= {
            "enforce_eager": rollout.enforce_eager,
            "gpu_memory_utilization": rollout.gpu_memory_utilization,
            "enable_sleep_mode": rollout.free_cache_engine,
        }
    if rank_info.world_size > 1:
        arguments["distributed_executor_backend"] = _executor(spec)
    return arguments


def kv_cache_bytes(spec: EngineSpec) -> int:
    """Bytes for the keys and values of `max_num_seqs` answers of full length, or as many as the memory that is free has room for.

    On a CPU `gpu_memory_utilization` is the share of the free memory that the caches of all ranks together may take.
    """
    import psutil

    config = AutoConfig.from_pretrained(
        spec.model.path, trust_remote_code=spec.model.trust_remote_code
    ).get_text_config()
    rollout = spec.rollout
    heads = -(
        -(getattr(config, "num_key_value_heads", None) or config.num_attention_heads)
        // rollout.tensor_model_parallel_size
    )
    head_size = (
        getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    )
    block = (
        2
        * config.num_hidden_layers
        * heads
        * padded_head_size(head_size)
        * spec.dtype.itemsize
        * _BLOCK
    )
    blocks_of_a_row = ceil_div(spec.max_length, _BLOCK)
    wanted = (rollout.max_num_seqs * blocks_of_a_row + 1) * block  # one block stays empty
    allowed = int(
        psutil.virtual_memory().available
        * rollout.gpu_memory_utilization
        / spec.rank_info.world_size
    )
    least = (blocks_of_a_row + 1) * block
    if least > allowed:
        raise ResourceError(
            f"one answer of {spec.max_length} tokens needs {least / 2**20:.0f} MiB for keys and values; {allowed / 2**20:.0f} may be taken",
            where="actor_rollout_ref.rollout.gpu_memory_utilization",
            hint="shorter data.max_prompt_length and data.max_response_length, or a larger share of the memory",
        )
    return min(wanted, allowed)


def _executor(spec: EngineSpec) -> type:
    """vLLM's executor for ranks that somebody else has started, in our process group: consecutive ranks share an engine."""
    from vllm.v1.executor.uniproc_executor import ExecutorWithExternalLauncher

    name = [os.urandom(8).hex()]
    dist.broadcast_object_list(name, src=0)  # the shared memory of the ranks is named after it
    rank_info = spec.rank_info

    class ExecutorOfOurRanks(ExecutorWithExternalLauncher):
        def _distributed_args(self) -> tuple[str, int, int]:
            return f"tcp://rlctl:{name[0]}", rank_info.rank, 0

    return ExecutorOfOurRanks


def _forget_shared_memory() -> None:
    """Take away the names of the memory that the ranks of an engine share, now that all have it: it ends with them, however they end."""
    from vllm.distributed.parallel_state import get_tp_group

    dist.barrier()
    ring: Any = get_tp_group().mq_broadcaster.buffer  # pyright: ignore[reportOptionalMemberAccess]
    if ring.is_creator:
        ring.shared_memory.unlink()
        ring.is_creator = False
    if group := os.environ.get("VLLM_DIST_IDENT"):  # on a CPU
        for file in Path("/dev/shm").glob(f"{group}-*"):
            file.unlink(missing_ok=True)


def _look_at_models_here() -> None:
    """vLLM asks what a model's class can do in a process of its own, the first time on a machine, so as not to touch a GPU too early. That
    takes ten seconds and more, and this process is about to load the class and use the device anyway."""
    from vllm.model_executor.models import registry

    registry._run_in_subprocess = lambda fn: fn()


@contextmanager
def _quiet() -> Iterator[None]:
    """What vLLM prints while it starts, by whatever means, is kept back, and shown only if it fails."""
    sys.stdout.flush()
    sys.stderr.flush()
    kept = [os.dup(1), os.dup(2)]
    with tempfile.TemporaryFile() as log, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
        failed = True
        try:
            yield
            failed = False
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            for number, saved in enumerate(kept, 1):
                os.dup2(saved, number)
                os.close(saved)
            if failed:
                log.seek(0)
                os.write(2, log.read())
