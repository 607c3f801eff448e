"""Engine `hf`: sampling from the training model itself, through its Hugging Face modules.

If the policy is unsharded in this process, no copy is made: responses always come from the current
policy. Prompts are prefilled once for their n responses, only unfinished responses are computed,
and the LM head runs on last positions only. Requests join and leave between decoding steps
(continuous batching, Yu et al., OSDI 2022), which are CUDA graphs on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from rlctl.errors import Problem, raise_problems
from rlctl.recipes import schema
from rlctl.runtime.base.batch import Ragged
from rlctl.runtime.base.budget import Budget, OomRetry, free_memory, is_oom
from rlctl.runtime.model.attention import use_rlctl_attention
from rlctl.runtime.model.padded_rows import has_padded_rows
from rlctl.runtime.model.state_layers import has_mixers
from rlctl.runtime.rollout.decode_check import check_decoding, load_copy
from rlctl.runtime.rollout.engine import (
    EngineSpec,
    Responses,
    SamplingParams,
    generate_by_requests,
    log_oom_retry,
)
from rlctl.runtime.rollout.fused import Passes
from rlctl.runtime.rollout.hf_rows import Finished, ParkedCaches, Part, parts_of, rows_of
from rlctl.runtime.rollout.requests import Completion, Request
from rlctl.runtime.rollout.running import RunningRows
from rlctl.runtime.rollout.sampling_params import DEFAULT_ROWS
from rlctl.runtime.rollout.sync_contents import MERGES, merged_sync

if TYPE_CHECKING:
    from rlctl.runtime.rollout.graphs import Capturer, StaticDecoder


@dataclass(frozen=True)
class Steps:
    """Decoding steps: the kind of running `rows`, of which `RecordedRows` record experts.

    With a `capturer` they have fixed shapes and are recorded, unless the model has states. The
    records and the memory of the KV cache are kept when asleep if `keeps_cache`.
    """

    capturer: Capturer | None = None
    keeps_cache: bool = False
    rows: type[RunningRows] = RunningRows


class HFEngine:
    """Engine that samples in batches from `model`, whose parameters are used in place.

    Under FSDP2, parameters must be unsharded for the duration of `generate`.

    Args:
        model: causal language model with transformers' attention interface.
        max_num_seqs: limit of concurrent responses, None for no limit. More responses join as
            others finish. After an out-of-memory error it is halved and running ones restart.
        max_length: limit of prompt plus response, None for the model's context length.
        owned: the model is a copy for the engine, which `load_weights` fills.
        steps: how tokens are decoded.
        on_oom: called when the batch size is reduced.
    """

    adapter_sync = staticmethod(merged_sync)
    records_routing = True
    reads_images = True

    @staticmethod
    def unused_keys(config: schema.Config) -> dict[str, str]:
        """Return the config keys that this engine does not use, with reasons."""
        keys = ("gpu_memory_utilization", "max_num_batched_tokens")
        unused = dict.fromkeys(keys, "it decodes with the actor's model") | MERGES
        if config.trainer.device == "cpu":
            of_graphs = ("enforce_eager", "free_cache_engine")
            unused |= dict.fromkeys(of_graphs, "there are no CUDA graphs on a CPU")
        return {f"actor_rollout_ref.rollout.{key}": reason for key, reason in unused.items()}

    def __init__(
        self,
        model: PreTrainedModel,
        max_num_seqs: int | None,
        max_length: int | None = None,
        *,
        owned: bool = False,
        steps: Steps = Steps(),
        on_oom: Callable[[OomRetry], None] = log_oom_retry,
    ) -> None:
        use_rlctl_attention(model)
        self.model = model
        self.on_oom = on_oom
        self.budget = Budget(
            "actor_rollout_ref.rollout.max_num_seqs", max_num_seqs or 2**31, "rows"
        )
        context = getattr(model.config.get_text_config(), "max_position_embeddings", None) or 2**31
        self.max_length = context if max_length is None else min(max_length, context)
        self.owned = owned
        self.uses_policy = not owned
        self._waiting: list[Part] = []
        has_states = has_mixers(model) or has_padded_rows(model)  # which change with the rows
        self.static: StaticDecoder | None = None
        if steps.capturer is not None and not has_states:
            from rlctl.runtime.rollout.graphs import StaticDecoder

            self.static = StaticDecoder(model, steps.capturer)
        self._keeps_cache = steps.keeps_cache
        self._new_rows = steps.rows
        self._passes = Passes(model)
        self._running = steps.rows(self._passes, self.static)
        self._parked = ParkedCaches(2**30)  # bytes, between the turns of episodes
        self._training: list[nn.Module] | None = None  # modules to set back to training mode

    @classmethod
    def check(cls, rollout: schema.Rollout, device: str, num_ranks: int) -> None:
        """Refuse settings that `hf` does not support: see `RolloutEngine.check`."""
        del device, num_ranks
        section = "actor_rollout_ref.rollout"
        problems = []
        if rollout.tensor_model_parallel_size > 1:
            problems.append(
                Problem(
                    f"{section}.tensor_model_parallel_size is set, "
                    "but the engine hf runs on one rank",
                    hint=f"set it to 1, or {section}.name=vllm",
                    fix=(
                        f"{section}.tensor_model_parallel_size",
                        f"{section}.tensor_model_parallel_size=1",
                    ),
                )
            )
        if rollout.engine_kwargs:
            message = f"{section}.engine_kwargs is set, but the engine hf takes none"
            problems.append(Problem(message, hint="leave it {}"))
        raise_problems(problems)

    @classmethod
    def from_spec(cls, spec: EngineSpec, policy: PreTrainedModel | None) -> Self:
        """Build the engine around `policy`, or around a separate model if it is None."""
        model = load_copy(spec) if policy is None else policy
        steps = _steps(spec)
        max_num_seqs = spec.rollout.max_num_seqs or DEFAULT_ROWS
        owned = policy is None
        on_oom = spec.on_oom
        return cls(model, max_num_seqs, spec.max_length, owned=owned, steps=steps, on_oom=on_oom)

    def progress(self) -> dict[tuple[int, int], int]:
        """See `InFlightEngine`."""
        return self._running.progress()

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Copy the weights (N, ...) into an owned model, and drop kept caches.

        Open responses keep their keys and values. CUDA graphs read the same tensors.
        """
        self._parked.clear()
        if self.owned:
            from rlctl.runtime.rollout.page_sums import copy_values

            held = {**dict(self.model.named_parameters()), **dict(self.model.named_buffers())}
            for name, value in weights:
                copy_values(held[name].data, value)
        if self._training is not None:
            self._passes.refresh()

    def sleep(self) -> bool:
        """Drop kept caches, and unless `keeps_cache`, CUDA graphs and the memory of the cache."""
        self._parked.clear()
        if not self._keeps_cache and not self.num_open:
            self._forget_rows()
        return False

    def wake(self) -> None:
        """Do nothing: `sleep` releases nothing."""

    def close(self) -> None:
        """Do nothing: there are no processes to end."""

    def generate(self, prompt_ids: Ragged, sampling: SamplingParams) -> Responses:
        """Sample responses: see `RolloutEngine.generate`."""
        return generate_by_requests(self, prompt_ids, sampling, self.max_length)

    @property
    def num_open(self) -> int:
        """See `RolloutEngine.num_open`."""
        return len(self._running) + sum(len(part.indices) for part in self._waiting)

    def submit(self, requests: Sequence[Request]) -> None:
        """Queue requests: see `RolloutEngine.submit`."""
        self._waiting += [Part(each, tuple(range(len(each.seeds)))) for each in requests]

    def cancel(self, keys: Collection[int]) -> None:
        """See `RolloutEngine.cancel`."""
        self._waiting = [part for part in self._waiting if part.request.key not in keys]
        self._running.cancel(keys)
        if not self.num_open:
            self._end_batch()

    # Not inference_mode: tensors that a module caches must stay usable in training.
    @torch.no_grad()
    def step(self) -> list[Completion]:
        """Decode one token of every running response: see `RolloutEngine.step`.

        Waiting requests join before that, as far as `max_num_seqs` permits.
        """
        if not (self._running or self._waiting):
            return []
        if self._training is None:
            self._training = [module for module in self.model.modules() if module.training]
            self.model.eval()
            self._passes.refresh()
        try:
            check_decoding(self._passes)
            finished = self._step()
        except BaseException:
            self._waiting = []
            self._forget_rows()
            self._restore_mode()
            raise
        for row, completion, saved in finished:
            if saved is not None:
                self._parked.put(row.request, completion, saved)
        if not (self._running or self._waiting):
            self._end_batch()
        return [each.completion for each in finished]

    def _step(self) -> list[Finished]:
        """Run one step; after an out-of-memory error, drop caches and limit the rows."""
        joining = self._next_parts()
        finished: list[Finished] = []
        try:
            if joining:
                self._running.join(joining)
            finished = self._running.step()
            self._running.advance()
            return finished
        except RuntimeError as error:
            if not is_oom(error):
                raise
            reason = str(error).splitlines()[0]
        # Outside of the handler: the error references the frames that hold the memory.
        rows = list(dict.fromkeys(self._running.rows + rows_of(joining)))
        done = {each.row for each in finished}
        self._forget_rows()
        self._waiting = parts_of([row for row in rows if row not in done]) + self._waiting
        self._parked.clear()
        lengths = torch.tensor([len(row.request.context_ids) + row.max_tokens for row in rows])
        self.on_oom(self.budget.halve([lengths], failed=0, alone=True, reason=reason))
        free_memory(self.model.device.type)
        return finished

    def _next_parts(self) -> list[Part]:
        """Remove and return the waiting responses that join now.

        The responses to a prompt are split only if they exceed `max_num_seqs`. A few free slots
        stay empty until a quarter is free, because each prefill interrupts all running rows.
        """
        if not self._waiting:
            return []
        size = self.budget.size
        free = size - len(self._running)
        if self._running and free < min(self.num_open - len(self._running), size // 4):
            return []
        joining: list[Part] = []
        while self._waiting and free:
            part = self._waiting[0]
            if len(part.indices) > free:
                if self._running or joining:
                    break
                request, indices, _ = self._waiting.pop(0)
                self._waiting.insert(0, Part(request, indices[free:]))
                part = Part(request, indices[:free])
            else:
                self._waiting.pop(0)
            saved = None if part.request.images else self._parked.take(part.request)
            joining.append(part._replace(saved=saved))
            free -= len(part.indices)
        return joining

    def _end_batch(self) -> None:
        """Empty the cache of the last rows, and restore the mode of the model."""
        cache = self._running.cache.emptied() if self.static is not None else None
        self._passes = Passes(self.model)
        self._running = self._new_rows(self._passes, self.static, cache)
        self._restore_mode()

    def _forget_rows(self) -> None:
        """Free the running rows, their cache and the recorded steps."""
        self._running = self._new_rows(self._passes, self.static)
        if self.static is not None:
            self.static.clear()

    def _restore_mode(self) -> None:
        """Set the modules that were in training mode back to it."""
        for module in self._training or []:
            module.training = True
        self._training = None


def _steps(spec: EngineSpec) -> Steps:
    """Return the decoding steps of an engine: recorded on a GPU, or noting experts."""
    if spec.routing is not None:
        from rlctl.runtime.rollout.recorded_rows import RecordedRows

        return Steps(rows=RecordedRows)
    if spec.rank_info.device != "cuda" or spec.rollout.enforce_eager:
        return Steps()
    from rlctl.runtime.rollout.graphs import CudaGraphs

    return Steps(CudaGraphs(), keeps_cache=not spec.rollout.free_cache_engine)
