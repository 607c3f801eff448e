"""Startup of a vLLM engine inside a worker process: arguments, memory, process groups, output.

Written for vLLM 0.31 and 0.32. Startup takes 2 to 4 s on a CPU, compared to half a minute with
vLLM's defaults (a separate process, compilation, a profiling run).
"""

# pyright: reportMissingImports=false, reportMissingModuleSource=false
# (an extra: types are checked where it is installed)
from __future__ import annotations

import os
import sys
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, redirect_stdout
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from rlctl.errors import ConfigError, ResourceError, RlctlError, raise_problems
from rlctl.runtime.base.ops import any_algorithms
from rlctl.runtime.model.load import load_config
from rlctl.runtime.model.state_layers import has_states
from rlctl.runtime.rollout.engine import EngineSpec
from rlctl.runtime.rollout.sampling_params import rows_at_a_time
from rlctl.runtime.rollout.vllm_engine.classes import (
    import_without_torchvision,
    inspect_models_in_process,
    keep_classes,
    replace_processors,
    restore_configs,
)
from rlctl.runtime.rollout.vllm_engine.versions import HF_HINT, MERGE_HINT, unlike_transformers

if TYPE_CHECKING:
    from vllm import LLM

# A model's class in vLLM may fail in any way where the config is not what it expects.
_REFUSALS = (
    AssertionError,
    AttributeError,
    ImportError,
    LookupError,
    OSError,
    TypeError,
    ValueError,
)
# vLLM adds a token to their windows, and transformers does not.
_WIDER_WINDOWS = ("cohere2", "cohere2_moe")
_TOKENS_PER_PASS = 8192  # on a CPU
_SHARED_MEMORY = Path("/dev/shm")

_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # run in this process: faster start, no serialization
    "VLLM_NO_USAGE_STATS": "1",
}
_LEVEL = "VLLM_LOGGING_LEVEL"
_QUIET = "ERROR"  # unless another level is set


def set_environment() -> None:
    """Set vLLM's variables; a level of its log, and a choice of its sampler, may be given."""
    os.environ.update(_ENVIRONMENT)
    os.environ.setdefault(_LEVEL, _QUIET)
    if find_spec("flashinfer") is None:  # vLLM imports it on a GPU to ask what it can do
        os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")


def shows_output(log_path: Path | None) -> bool:
    """Return True if vLLM's output is kept: it has a file, or a level is given that asks for it."""
    return log_path is not None or os.environ.get(_LEVEL, _QUIET) != _QUIET


def prepare(spec: EngineSpec) -> None:
    """Import vLLM and patch it for this process."""
    set_environment()
    if spec.rank_info.host:  # else vLLM looks for a way to the internet
        os.environ.setdefault("VLLM_HOST_IP", spec.rank_info.host)
    on_cpu = spec.rank_info.device == "cpu"
    if on_cpu:
        os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")  # the engine compiles nothing on a CPU
    with _quiet(spec):
        from vllm import LLM  # noqa: F401

        inspect_models_in_process()
        keep_classes()
        replace_processors()
        if on_cpu:
            from rlctl.runtime.rollout.vllm_engine.cpu import (
                keep_weights_unpacked,
                pack_loaded_experts,
                pad_attention_heads,
                rotate_unaligned_heads,
                size_cache,
            )
            from rlctl.runtime.rollout.vllm_engine.cpu_states import compute_delta_nets

            keep_weights_unpacked()
            pack_loaded_experts()
            pad_attention_heads()
            rotate_unaligned_heads()
            import_without_torchvision()
            compute_delta_nets()
            size_cache()
        if on_cpu and spec.model.lora_rank > 0:
            from rlctl.runtime.rollout.vllm_engine.adapters import apply_one_adapter

            apply_one_adapter()


def start(spec: EngineSpec) -> LLM:
    """Build the engine with dummy weights.

    Raises:
        ConfigError: vLLM refuses the arguments.
        ResourceError: memory does not suffice.
        RlctlError: any other failure of vLLM's startup.
    """
    from vllm import LLM

    arguments = engine_arguments(spec) | _arguments_of_model(spec)
    arguments |= dict(spec.rollout.engine_kwargs)
    set_num_threads = torch.set_num_threads
    # vLLM 0.31 needs a file, which a notebook's output is not.
    stdout = os.fdopen(1, "w", closefd=False)
    with redirect_stdout(stdout), _quiet(spec), any_algorithms():
        try:
            llm = LLM(**arguments)
            if spec.rollout.tensor_model_parallel_size > 1:
                _unlink_shared_memory()
            return llm
        except _REFUSALS as error:
            kind = ResourceError if "memory" in str(error).lower() else ConfigError
            lines = str(error).strip().splitlines() or [type(error).__name__]
            if "validation error" in lines[0]:  # of pydantic, whose next line has the reason
                lines = [lines[1].partition(" [type=")[0].strip()]
            hint = (
                "check rollout.engine_kwargs, which are passed to vllm.LLM; if it does not know "
                f"the model, {HF_HINT}"
            )
            if "enable_lora" in arguments:
                hint += f"; or {MERGE_HINT}"
            raise kind(
                f"vLLM failed to start: {lines[0]}", where="actor_rollout_ref.rollout", hint=hint
            ) from error
        except RuntimeError as error:
            raise RlctlError(
                f"vLLM failed to start: {error}", where="actor_rollout_ref.rollout"
            ) from error
        finally:
            restore_configs()
            torch.set_num_threads = set_num_threads  # vLLM replaces it by a no-op


def engine_arguments(spec: EngineSpec) -> dict[str, Any]:
    """Return the arguments of `vllm.LLM` from the configuration; `engine_kwargs` override them."""
    rollout = spec.rollout
    rank_info = spec.rank_info
    arguments: dict[str, Any] = {
        "model": spec.model.path,
        "trust_remote_code": spec.model.trust_remote_code,
        "load_format": "dummy",  # weights come from the trainer
        "dtype": str(spec.dtype).removeprefix("torch."),
        "seed": spec.seed,
        "max_model_len": spec.max_length,
        "tensor_parallel_size": rollout.tensor_model_parallel_size,
        "logprobs_mode": "processed_logprobs",
        "generation_config": "vllm",  # ignore sampling defaults in the model folder
        "skip_tokenizer_init": True,
        "enable_prefix_caching": True,
        "mm_device_do_normalize": False,  # the processor has done it
        "mm_processor_cache_gb": 0,
        "skip_mm_profiling": True,
    }
    limits = ("max_num_seqs", "max_num_batched_tokens")  # vLLM's defaults depend on the GPU
    arguments |= {name: limit for name in limits if (limit := getattr(rollout, name)) is not None}
    if rank_info.device == "cpu":
        arguments |= {
            "enforce_eager": True,
            "max_num_seqs": rows_at_a_time(rollout, "cpu"),
            "kv_cache_memory_bytes": _allowed_bytes(spec),
            # Chunked prefill rewinds a request's generator, which CPU generators do not support.
            "enable_chunked_prefill": False,
            "max_num_batched_tokens": max(
                rollout.max_num_batched_tokens or _TOKENS_PER_PASS, spec.max_length
            ),
        }
    else:
        arguments |= {
            "enforce_eager": rollout.enforce_eager,
            "gpu_memory_utilization": spec.memory_fraction,
            "enable_sleep_mode": rollout.free_cache_engine,
            "enable_return_routed_experts": spec.routing is not None,
            # Each rank sees one GPU under Ray, and vLLM would look for the others.
            "disable_custom_all_reduce": rollout.tensor_model_parallel_size > 1,
        }
    if spec.model.lora_rank > 0:
        from rlctl.runtime.rollout.vllm_engine.adapters import adapter_arguments

        arguments |= adapter_arguments(spec)
    if spec.model.override_config:
        arguments["hf_overrides"] = dict(spec.model.override_config)
    if rank_info.world_size > 1:
        arguments["distributed_executor_backend"] = _executor(spec)
    return arguments


def _arguments_of_model(spec: EngineSpec) -> dict[str, Any]:
    """Return the arguments that depend on the model's config.json.

    Raises ConfigError if vLLM would compute other log-probs than the trainer.
    """
    config = load_config(spec.model, "policy")
    found: dict[str, Any] = {}
    if hasattr(config, "vision_config"):
        from rlctl.runtime.rollout.vllm_engine.engine_images import tower_arguments

        found = tower_arguments(config, spec.rollout.tensor_model_parallel_size)
    raise_problems(unlike_transformers(config, spec.rank_info.device == "cpu"))
    if config.model_type in _WIDER_WINDOWS:
        window = {"sliding_window": config.sliding_window - 1}
        found["hf_overrides"] = dict(spec.model.override_config) | window
    if spec.rank_info.device == "cpu" and has_states(config):
        found["enable_prefix_caching"] = False  # with states it requires chunked prefill
    return found


def _allowed_bytes(spec: EngineSpec) -> int:
    """Return the limit of the KV cache on a CPU, in bytes; see `size_cache`.

    `gpu_memory_utilization` is the fraction of free memory that the caches of all ranks may use.
    """
    import psutil

    available = psutil.virtual_memory().available
    return int(available * spec.memory_fraction / spec.rank_info.world_size)


def _executor(spec: EngineSpec) -> type:
    """Return vLLM's executor class for ranks that exist already, in their process group.

    Consecutive ranks share an engine. On CPUs they exchange tensors in shared memory if all of them
    have the same name for it.
    """
    from vllm.v1.executor.uniproc_executor import ExecutorWithExternalLauncher

    name = [os.urandom(8).hex()]
    dist.broadcast_object_list(name, src=0)
    rank_info = spec.rank_info
    boot = Path("/proc/sys/kernel/random/boot_id")
    if rank_info.device == "cpu" and boot.exists():
        name[0] += f"-{boot.read_text(encoding='utf-8').strip()}-{os.stat(_SHARED_MEMORY).st_dev}"

    class ActorRanksExecutor(ExecutorWithExternalLauncher):
        def _distributed_args(self) -> tuple[str, int, int]:
            return f"tcp://rlctl:{name[0]}", rank_info.rank, 0

    return ActorRanksExecutor


def _unlink_shared_memory() -> None:
    """Unlink the shared memory of an engine's ranks once all have opened it.

    It is then freed with its processes, however they end.
    """
    from vllm.distributed.parallel_state import get_tp_group

    dist.barrier()
    ring: Any = get_tp_group().mq_broadcaster.buffer  # pyright: ignore[reportOptionalMemberAccess]
    if ring is not None and ring.is_creator:  # None: the ranks are on several nodes
        ring.shared_memory.unlink()
        ring.is_creator = False
    if group := os.environ.get("VLLM_DIST_IDENT"):  # set on a CPU
        for file in _SHARED_MEMORY.glob(f"{group}-*"):
            file.unlink(missing_ok=True)


@contextmanager
def _quiet(spec: EngineSpec) -> Iterator[None]:
    """Keep vLLM's output from the terminal; print it if the block raises.

    In a process with a log file it goes there at once, and so do stacks and NCCL's warnings of a
    process that is killed. If VLLM_LOGGING_LEVEL asks for more, nothing is kept from the terminal.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with nullcontext() if shows_output(spec.rank_info.log_path) else _captured():
            yield


@contextmanager
def _captured() -> Iterator[None]:
    """Capture all output of the process, and print it only if the block raises."""
    sys.stdout.flush()
    sys.stderr.flush()
    kept = [os.dup(1), os.dup(2)]
    with tempfile.TemporaryFile() as log:
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
