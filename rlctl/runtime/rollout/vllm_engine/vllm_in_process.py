"""Engine `vllm`: vLLM 0.31 or 0.32 inside the actor's worker process, on a CPU or a GPU.

If the policy is unsharded on a CPU, vLLM shares its parameters and weight sync costs nothing.
Otherwise weights are streamed into vLLM one parameter at a time. With `tensor_model_parallel_size`
t, t consecutive ranks share an engine: it samples the prompts of all t ranks together, and each
rank keeps the responses to its prompts.

The hybrid engine follows HybridFlow, arXiv 2409.19256, section 5. The branches for CUDA have run
with vLLM's worker for GPUs on a simulated one (tests/fake_gpu.py), and never on a GPU.
"""

# pyright: reportMissingImports=false, reportMissingModuleSource=false
# (an extra: types are checked where it is installed)
from __future__ import annotations

import logging
from collections.abc import Collection, Generator, Iterable, Sequence
from dataclasses import replace
from itertools import chain
from typing import TYPE_CHECKING, Any, Self, cast

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from rlctl.errors import Problem, raise_problems
from rlctl.plugins import Unused
from rlctl.recipes import schema
from rlctl.runtime.base.batch import Ragged
from rlctl.runtime.base.ops import any_algorithms
from rlctl.runtime.model.load import empty_model, load_config
from rlctl.runtime.rollout.engine import (
    EngineSpec,
    Responses,
    SamplingParams,
    generate_by_requests,
)
from rlctl.runtime.rollout.engine_startup import run_startup
from rlctl.runtime.rollout.engine_weights import AdapterSync
from rlctl.runtime.rollout.requests import Completion, Request
from rlctl.runtime.rollout.vllm_engine.log_probs import report_full_log_probs
from rlctl.runtime.rollout.vllm_engine.versions import check_installed, unlike_transformers
from rlctl.runtime.rollout.vllm_engine.vllm_requests import RankPrompts, to_completion, vllm_params
from rlctl.runtime.rollout.vllm_engine.vllm_startup import prepare, start
from rlctl.runtime.rollout.vllm_engine.weights import (
    ExpertStacks,
    as_in_files,
    converted_model,
    model_runner,
    reload,
    share_parameters,
    worker_of,
)

if TYPE_CHECKING:
    from vllm import LLM, RequestOutput

    from rlctl.runtime.rollout.vllm_engine.adapters import AdapterSlot
    from rlctl.runtime.rollout.vllm_engine.engine_images import EngineImages
    from rlctl.runtime.rollout.vllm_engine.routed_experts import RoutedExperts


_log = logging.getLogger(__name__)


class VLLMEngine:
    """Engine that runs vLLM in this process: see `RolloutEngine`."""

    records_routing = True
    reads_images = True
    no_images_of = ("gemma3",)  # `LOOKS_AHEAD`: its attention is causal on a CPU
    one_rank_routes = ("cuda",)  # there only the first of several ranks gets the chosen experts

    @staticmethod
    def adapter_sync(
        rollout: schema.Rollout, model: schema.Model, dtype: torch.dtype, device: str
    ) -> AdapterSync:
        """See `PartialSync`."""
        from rlctl.runtime.rollout.vllm_engine.adapters import vllm_adapter_sync

        return vllm_adapter_sync(rollout, model, dtype, device)

    @staticmethod
    def unused_keys(config: schema.Config) -> dict[str, Unused]:
        """Return the config keys that this engine does not use, with reasons."""
        keys = ("enforce_eager", "free_cache_engine") if config.trainer.device == "cpu" else ()
        unused = Unused("trainer.device is cpu", ("trainer.device",))
        return {f"actor_rollout_ref.rollout.{key}": unused for key in keys}

    def __init__(
        self, llm: LLM, spec: EngineSpec, policy: PreTrainedModel | None, *, owns_group: bool
    ) -> None:
        self.llm = llm
        self.rank_info = spec.rank_info
        self.owns_group = owns_group
        self.max_length = spec.max_length
        self.ranks_per_engine = spec.rollout.tensor_model_parallel_size
        self.sleeps = spec.rollout.free_cache_engine
        self.asleep = self.cache_released = False
        runner = model_runner(llm)
        report_full_log_probs(runner)
        self._open: dict[str, tuple[Request, int]] = {}  # vLLM's request id -> request, response
        self.images: EngineImages | None = None
        self.routing: RoutedExperts | None = None
        self.adapter: AdapterSlot | None = None
        self._add_features(spec, runner)
        self.shared: dict[str, Tensor] | None = None  # policy parameters that are views of vLLM's
        if policy is not None and spec.rank_info.device == "cpu" and self.ranks_per_engine == 1:
            self.shared = share_parameters(runner.get_model(), policy)
        self.uses_policy = self.shared is not None
        self.converted = None if self.shared else converted_model(empty_model(spec.model))
        self.stacks = ExpertStacks(runner.get_model(), self.converted)

    def _add_features(self, spec: EngineSpec, runner: Any) -> None:
        """Add images, routing and the adapter if the model or the configuration has them."""
        if hasattr(load_config(spec.model, "policy"), "vision_config"):
            from rlctl.runtime.rollout.vllm_engine.engine_images import EngineImages

            self.images = EngineImages(runner, spec.model)
        if spec.routing is not None:
            from rlctl.runtime.rollout.vllm_engine.routed_experts import RoutedExperts

            self.routing = RoutedExperts(runner, spec.routing, spec.rank_info.device == "cpu")
        if spec.model.lora_rank > 0:
            from rlctl.runtime.rollout.vllm_engine.adapters import AdapterSlot

            self.adapter = AdapterSlot.from_spec(spec, runner)

    @classmethod
    def check(cls, rollout: schema.Rollout, device: str, num_ranks: int) -> None:
        """Validate installation, tensor parallelism and batch sizes: see `RolloutEngine.check`."""
        check_installed(device)
        section = "actor_rollout_ref.rollout"
        size = rollout.tensor_model_parallel_size
        problems: list[Problem] = []
        if num_ranks % size:
            divisors = [k for k in range(1, num_ranks + 1) if num_ranks % k == 0]
            largest = max(k for k in divisors if k == 1 or k < size)
            problems.append(
                Problem(
                    f"{section}.tensor_model_parallel_size={size} does not divide the actor's "
                    f"{num_ranks} ranks",
                    hint=f"one of {', '.join(map(str, divisors))}",
                    fix=(
                        f"{section}.tensor_model_parallel_size",
                        f"{section}.tensor_model_parallel_size={largest}",
                    ),
                )
            )
        tokens = rollout.max_num_batched_tokens
        rows = rollout.max_num_seqs
        if tokens is not None and rows is not None and tokens < rows:
            problems.append(
                Problem(
                    f"{section}.max_num_batched_tokens={tokens} is less than one token for each of "
                    f"max_num_seqs={rows} rows",
                    hint=f"{section}.max_num_batched_tokens={rows}",
                )
            )
        raise_problems(problems)

    @classmethod
    def check_model(
        cls, config: PretrainedConfig, rollout: schema.Rollout, device: str
    ) -> list[Problem]:
        """Return why vLLM cannot generate with models of this config on `device`."""
        problems = unlike_transformers(config, device == "cpu")
        if hasattr(config, "vision_config"):
            from rlctl.runtime.rollout.vllm_engine.engine_images import undivided_tower

            problems += undivided_tower(config, rollout.tensor_model_parallel_size)
        return problems

    @classmethod
    def from_spec(cls, spec: EngineSpec, policy: PreTrainedModel | None) -> Self:
        """Build the engine: see `RolloutEngine.from_spec`."""
        return run_startup(cls.startup_phases(spec, policy))

    @classmethod
    def startup_phases(
        cls, spec: EngineSpec, policy: PreTrainedModel | None
    ) -> Generator[str, None, Self]:
        """Build the engine, yielding its startup phases: see `PhasedStartup`."""
        owns_group = not dist.is_initialized()  # otherwise vLLM creates one
        yield _log_phase("importing vLLM", spec)
        prepare(spec)
        yield _log_phase("building vLLM's engine and cache", spec)
        llm = start(spec)
        yield _log_phase("connecting vLLM's weights", spec)
        return cls(llm, spec, policy, owns_group=owns_group)

    def generate(self, prompt_ids: Ragged, sampling: SamplingParams) -> Responses:
        """Sample responses: see `RolloutEngine.generate`."""
        num_rows = len(prompt_ids) * sampling.n
        limits = torch.as_tensor(sampling.max_tokens, dtype=torch.int64).expand(num_rows)
        images = sampling.images or [()] * len(prompt_ids)
        prompts = RankPrompts(prompt_ids.to("cpu"), limits, sampling.row_seeds(num_rows), images)
        joined, first = prompts.join_ranks(self.ranks_per_engine)
        shared = replace(
            sampling, max_tokens=joined.max_tokens, seed=joined.seeds, images=joined.images
        )
        responses = generate_by_requests(self, joined.prompt_ids, shared, self.max_length)
        if len(responses.finish) == num_rows:
            return responses
        return responses.select(torch.arange(first, first + num_rows))

    @property
    def num_open(self) -> int:
        """See `RolloutEngine.num_open`."""
        return len(self._open)

    def submit(self, requests: Sequence[Request]) -> None:
        """Queue requests: see `RolloutEngine.submit`. vLLM's prefix cache shares their contexts."""
        if self.cache_released:
            self.llm.wake_up(tags=["kv_cache"])
            self.cache_released = False
        rows = [(request, index) for request in requests for index in range(len(request.seeds))]
        if rows:
            inputs = {request.key: self._input(request) for request in requests}
            prompts = [inputs[request.key] for request, _ in rows]
            params = [vllm_params(request, index) for request, index in rows]
            adapter = [self.adapter and self.adapter.request] * len(rows)
            names = self.llm._render_and_add_requests(prompts, params, lora_requests=adapter)
            # Outputs carry the id without its random suffix.
            keys = [name.partition("-")[0] for name in names]
            self._open |= dict(zip(keys, rows, strict=True))
            if self.routing is not None:
                self.routing.begin(names)

    def _input(self, request: Request) -> Any:
        """Return the context of a request as an input of vLLM's engine."""
        from vllm.inputs import tokens_input

        if request.images:
            assert self.images is not None, "rows with images are refused for models of text"
            return self.images.prompt(request)
        return tokens_input(request.context_ids.tolist())

    @any_algorithms()  # vLLM uses some that torch refuses with `trainer.deterministic`
    def step(self) -> list[Completion]:
        """Run one step of vLLM's scheduler: see `RolloutEngine.step`."""
        finished: list[Completion] = []
        try:
            outputs = cast("list[RequestOutput]", self.llm.llm_engine.step())
        except BaseException:
            self._open.clear()
            raise
        for output in outputs:
            if output.finished:
                request, index = self._open.pop(output.request_id)
                completion = to_completion(request, index, output)
                if self.routing is not None:
                    completion = self.routing.attach(completion, request, output)
                finished.append(completion)
        return finished

    def cancel(self, keys: Collection[int]) -> None:
        """See `RolloutEngine.cancel`."""
        names = [name for name, (request, _) in self._open.items() if request.key in keys]
        self.llm.llm_engine.abort_request(names)
        for name in names:
            del self._open[name]
        if self.routing is not None:
            self.routing.end(names)

    def progress(self) -> dict[tuple[int, int], int]:
        """See `InFlightEngine`."""
        found = {}
        for state in self.llm.llm_engine.output_processor.request_states.values():
            assert state.detokenizer is not None, "a request generates text"
            request, index = self._open[state.external_req_id]
            found[request.key, index] = state.detokenizer.num_output_tokens()
        return found

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Sync full weights (N, ...): see `RolloutEngine.load_weights`.

        The keys and values of open responses are computed again under the new weights.
        """
        adapter: dict[str, Tensor] = {}
        base = iter(weights)
        if self.adapter is not None:
            base = self.adapter.set_aside(base, adapter)
        if (first := next(base, None)) is not None:
            self._load_base(chain([first], base))
        if self.adapter is not None and adapter:
            self.adapter.load(adapter)
        if self.routing is not None:
            self.routing.keep(self._open, self.progress())
        self.llm.reset_prefix_cache(reset_running_requests=True)

    def _load_base(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        if self.shared is None:
            reload(worker_of(self.llm), as_in_files(self.converted, self.stacks, weights))
            self.llm.llm_engine.reset_encoder_cache()  # of images
            return
        for name, value in weights:
            view = self.shared[name]
            if view.data_ptr() != value.data_ptr():
                view.copy_(value)

    def sleep(self) -> bool:
        """Drop weights and KV cache (vLLM's sleep level 2); no-op on a CPU."""
        if not self.sleeps or self.asleep:
            return self.asleep
        if self.rank_info.device == "cpu":
            self.sleeps = False
            _log.warning("rollout.free_cache_engine has no effect: vllm cannot sleep on a CPU")
            return False
        self.llm.sleep(level=2)
        self.asleep = self.cache_released = True
        return True

    def wake(self) -> None:
        """Reacquire memory for weights; that of the KV cache follows with the next `generate`."""
        if self.asleep:
            self.llm.wake_up(tags=["weights"])
            self.asleep = False

    def close(self) -> None:
        """Shut vLLM down, and its process group if it created one."""
        from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

        self.llm.llm_engine.engine_core.shutdown()
        if self.owns_group:
            cleanup_dist_env_and_memory()


def _log_phase(phase: str, spec: EngineSpec) -> str:
    """Log a startup phase if the worker has a log file, and return it."""
    if spec.rank_info.log_path is not None:
        _log.info(phase)
    return phase
