"""The engine `vllm`: vLLM 0.32.0 inside the actor's worker process, on a CPU or a GPU.

On a CPU, where the policy lies whole in the process, vLLM's parameters are the policy's: handing over weights costs nothing. Otherwise the
weights are streamed into it one at a time. With `tensor_model_parallel_size` t, t consecutive ranks share an engine: each is given its own
prompts, they answer the prompts of all t together, and each keeps the answers to its own.

In a pool of its own with `rollout.mode=async`, calls of `generate` from several threads are answered together.

Source of the hybrid engine: HybridFlow, arXiv 2409.19256, section 5. The branches for CUDA follow vLLM's interface and have not been run.
"""

# pyright: reportMissingImports=false, reportMissingModuleSource=false
# (an extra: types are checked where it is installed)
from __future__ import annotations

import sys
from collections.abc import Generator, Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Self, cast

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PreTrainedModel

from rlctl.errors import Problem, raise_problems
from rlctl.recipes import schema
from rlctl.runtime.batch import Ragged
from rlctl.runtime.rollout.engine import (
    EngineSpec,
    Responses,
    SamplingParams,
    finish_reasons,
    response_limits,
    run_startup,
)
from rlctl.runtime.rollout.vllm.loop import VLLMLoop
from rlctl.runtime.rollout.vllm.model import model_runner, report_whole_distribution, share
from rlctl.runtime.rollout.vllm.startup import prepare, start
from rlctl.runtime.rollout.vllm.versions import check_installed

if TYPE_CHECKING:
    from vllm import LLM, RequestOutput
    from vllm import SamplingParams as VLLMSamplingParams
    from vllm.logprobs import FlatLogprobs


@dataclass(frozen=True, eq=False)
class _Asked:
    """What one rank wants answered: B prompts, and of each of the B·n rows the most tokens and the random stream."""

    prompt_ids: Ragged
    max_tokens: Tensor
    seeds: Tensor


class VLLMEngine:
    """Implements `RolloutEngine`."""

    def __init__(
        self, llm: LLM, spec: EngineSpec, policy: PreTrainedModel | None, *, owns_group: bool
    ) -> None:
        self.llm = llm
        self.rank_info = spec.rank_info
        self.max_length = spec.max_length
        self.ranks_per_engine = spec.rollout.tensor_model_parallel_size
        self.sleeps = spec.rollout.free_cache_engine
        self.asleep = self.cache_is_away = False
        self.owns_group = owns_group
        runner = model_runner(llm)
        report_whole_distribution(runner)
        self.loop = VLLMLoop(llm, spec.rank_info.num_threads) if spec.concurrent else None
        shares = (
            policy is not None and spec.rank_info.device == "cpu" and self.ranks_per_engine == 1
        )
        self.shared = share(runner.get_model(), policy) if shares and policy is not None else None

    @classmethod
    def check(cls, rollout: schema.Rollout, device: str, num_ranks: int) -> None:
        """See `RolloutEngine.check`."""
        check_installed(device)
        size = rollout.tensor_model_parallel_size
        problems: list[Problem] = []
        if num_ranks % size:
            fitting = [k for k in range(1, num_ranks + 1) if num_ranks % k == 0]
            problems.append(
                Problem(
                    f"actor_rollout_ref.rollout.tensor_model_parallel_size={size} does not divide the actor's {num_ranks} ranks",
                    hint=f"one of {', '.join(map(str, fitting))}",
                )
            )
        if rollout.max_num_batched_tokens < rollout.max_num_seqs:
            problems.append(
                Problem(
                    f"actor_rollout_ref.rollout.max_num_batched_tokens={rollout.max_num_batched_tokens} has no room for a token of each of "
                    f"max_num_seqs={rollout.max_num_seqs} rows",
                    hint=f"actor_rollout_ref.rollout.max_num_batched_tokens={rollout.max_num_seqs}",
                )
            )
        raise_problems(problems)

    @classmethod
    def from_spec(cls, spec: EngineSpec, policy: PreTrainedModel | None) -> Self:
        """See `RolloutEngine.from_spec`."""
        return run_startup(cls.startup_phases(spec, policy))

    @classmethod
    def startup_phases(
        cls, spec: EngineSpec, policy: PreTrainedModel | None
    ) -> Generator[str, None, Self]:
        """See `PhasedStartup`."""
        owns_group = not dist.is_initialized()  # then vLLM makes one
        yield _noted("importing vLLM", spec)
        prepare(spec)
        yield _noted("building vLLM's engine and cache", spec)
        llm = start(spec)
        yield _noted("connecting vLLM's weights", spec)
        return cls(llm, spec, policy, owns_group=owns_group)

    def generate(self, prompt_ids: Ragged, sampling: SamplingParams) -> Responses:
        """See `RolloutEngine.generate`."""
        if self.cache_is_away:
            self.llm.wake_up(tags=["kv_cache"])
            self.cache_is_away = False
        num_rows = len(prompt_ids) * sampling.n
        limits = torch.as_tensor(sampling.max_tokens, dtype=torch.int64).expand(num_rows)
        asked = _Asked(prompt_ids.to("cpu"), limits, sampling.row_seeds(num_rows))
        together, first = self._join_ranks(asked)
        limits = response_limits(
            together.prompt_ids.lengths,
            replace(sampling, max_tokens=together.max_tokens),
            self.max_length,
        )
        prompts = [
            {"prompt_token_ids": ids.tolist()}
            for ids in together.prompt_ids.rows()
            for _ in range(sampling.n)
        ]
        params = _vllm_params(sampling, limits.tolist(), together.seeds.tolist())
        outputs = self._answers(prompts, params) if prompts else []
        answers = [output.outputs[0] for output in outputs[first : first + num_rows]]
        response_ids = Ragged.from_rows([answer.token_ids for answer in answers], torch.int64)
        log_probs = Ragged.from_rows(
            [cast("FlatLogprobs", answer.logprobs).logprobs for answer in answers], torch.float32
        )
        return Responses(
            response_ids, log_probs, finish_reasons(response_ids, sampling.stop_token_ids)
        )

    def _answers(self, prompts: list[Any], params: list[VLLMSamplingParams]) -> list[RequestOutput]:
        return (
            self.loop.generate(prompts, params)
            if self.loop
            else self.llm.generate(prompts, params, use_tqdm=False)
        )

    def _join_ranks(self, asked: _Asked) -> tuple[_Asked, int]:
        """What all ranks of this engine are asked, in the order of ranks, and the number of this rank's first row."""
        if self.ranks_per_engine == 1:
            return asked, 0
        from vllm.distributed.parallel_state import get_tp_group

        group, everyone = get_tp_group(), [asked] * self.ranks_per_engine
        dist.all_gather_object(everyone, asked, group=group.cpu_group)
        first = sum(len(each.seeds) for each in everyone[: group.rank_in_group])
        prompts = Ragged(
            torch.cat([each.prompt_ids.values for each in everyone]),
            torch.cat([each.prompt_ids.lengths for each in everyone]),
        )
        return _Asked(
            prompts,
            torch.cat([each.max_tokens for each in everyone]),
            torch.cat([each.seeds for each in everyone]),
        ), first

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """See `RolloutEngine.load_weights`."""
        assert self.loop is None or self.loop.idle, (
            "new weights came while vLLM was answering under the old ones"
        )
        if self.shared is None:
            self.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": weights})
        else:
            for name, value in weights:
                rank_info = self.shared[name]
                if rank_info.data_ptr() != value.data_ptr():
                    rank_info.copy_(value)
        self.llm.reset_prefix_cache()

    def sleep(self) -> bool:
        """See `RolloutEngine.sleep`. Weights and caches are dropped: the trainer has the weights."""
        if not self.sleeps or self.asleep:
            return self.asleep
        if self.rank_info.device == "cpu":
            self.sleeps = False
            print(
                "vllm on a CPU keeps its memory while training runs: rollout.free_cache_engine has no effect",
                file=sys.stderr,
            )
            return False
        self.llm.sleep(level=2)
        self.asleep = self.cache_is_away = True
        return True

    def wake(self) -> None:
        """See `RolloutEngine.wake`. The caches come back with the first answer, when the weights have been handed over."""
        if self.asleep:
            self.llm.wake_up(tags=["weights"])
            self.asleep = False

    def close(self) -> None:
        """See `RolloutEngine.close`."""
        from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

        if self.loop:
            self.loop.close()
        self.llm.llm_engine.engine_core.shutdown()
        if self.owns_group:
            cleanup_dist_env_and_memory()


def _noted(phase: str, spec: EngineSpec) -> str:
    """A phase of starting, once it is in the worker's log, where there is one."""
    if spec.rank_info.log_path is not None:
        print(phase, file=sys.stderr, flush=True)
    return phase


def _vllm_params(
    sampling: SamplingParams, limits: list[int], seeds: list[int]
) -> list[VLLMSamplingParams]:
    """One for each row. Nothing but `stop_token_ids` and the limit ends an answer; no text is made of it."""
    from vllm import SamplingParams as VLLMSamplingParams

    return [
        VLLMSamplingParams(
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=max(sampling.top_k, 0),
            max_tokens=limit,
            seed=seed,
            stop_token_ids=list(sampling.stop_token_ids),
            ignore_eos=True,
            logprobs=0,  # of the sampled token alone
            flat_logprobs=True,
            detokenize=False,
        )
        for limit, seed in zip(limits, seeds, strict=True)
    ]
