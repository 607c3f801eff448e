"""Engine `hf`: sampling from the training model itself, through its Hugging Face modules.

If the policy is unsharded in this process, no copy is made: responses always come from the current
policy, and nothing else is held between calls. Prompts are prefilled once for their n responses,
only unfinished responses are computed, and the LM head runs on last positions only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import NamedTuple, Self

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from rlctl.errors import Problem, raise_problems
from rlctl.recipes import schema
from rlctl.runtime.batch import Ragged
from rlctl.runtime.budget import Budget, OomRetry, free_memory, is_oom
from rlctl.runtime.model.attention import Packing, TokenAttention, use_rlctl_attention
from rlctl.runtime.model.load import load_model
from rlctl.runtime.rollout.engine import (
    EngineSpec,
    Responses,
    SamplingParams,
    finish_reasons,
    log_oom_retry,
    response_limits,
)
from rlctl.runtime.rollout.kv_cache import KVCache, Prefill
from rlctl.runtime.rollout.sampling import sample

# Approximate limit of a forward pass over prompts: more tokens cost memory and save no time.
_PREFILL_TOKENS = 8192


class _Step(NamedTuple):
    """One token for each of R active responses."""

    rows: Tensor  # (R,) int64 on the CPU: indices into the B·n responses
    tokens: Tensor  # (R,) int64
    log_probs: Tensor  # (R,) float32


class HFEngine:
    """Engine that samples in batches from `model`, whose parameters are used in place.

    The model is switched to rlctl's attention (`use_rlctl_attention`). Under FSDP2, parameters must
    be unsharded for the duration of `generate`.

    Args:
        model: causal language model with transformers' attention interface and plain causal
            attention.
        max_num_seqs: limit of concurrent responses, None for no limit. More responses are sampled
            in waves of prompts of similar length; the responses to a prompt are split only if they
            exceed the limit. Halved, and the wave restarted, after an out-of-memory error.
        max_length: limit of prompt plus response, None for the model's context length.
        owned: the model is the engine's own copy, which `load_weights` fills.
        on_oom: called when the batch size is reduced.
    """

    @staticmethod
    def unused_keys(config: schema.Config) -> dict[str, str]:
        """Return the config keys that this engine does not use, with reasons."""
        del config
        keys = ("gpu_memory_utilization", "max_num_batched_tokens", "enforce_eager")
        reason = "it decodes with the actor's own model"
        return {f"actor_rollout_ref.rollout.{key}": reason for key in (*keys, "free_cache_engine")}

    def __init__(
        self,
        model: PreTrainedModel,
        max_num_seqs: int | None,
        max_length: int | None = None,
        *,
        owned: bool = False,
        on_oom: Callable[[OomRetry], None] = log_oom_retry,
    ) -> None:
        use_rlctl_attention(model)
        self.model = model
        self.on_oom = on_oom
        self.budget = Budget(
            "actor_rollout_ref.rollout.max_num_seqs", max_num_seqs or 2**31, "rows"
        )
        context_length = model.config.get_text_config(decoder=True).max_position_embeddings
        self.max_length = context_length if max_length is None else min(max_length, context_length)
        self.owned = owned

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
                )
            )
        if rollout.engine_kwargs:
            problems.append(
                Problem(
                    f"{section}.engine_kwargs is set, but the engine hf takes none",
                    hint="leave it {}",
                )
            )
        if rollout.mode == "async":
            problems.append(
                Problem(
                    f"{section}.mode=async is set, but the engine hf runs one batch at a time",
                    hint=f"set it to sync, or {section}.name=vllm",
                )
            )
        raise_problems(problems)

    @classmethod
    def from_spec(cls, spec: EngineSpec, policy: PreTrainedModel | None) -> Self:
        """Build the engine around `policy`, or around a separate model if it is None."""
        model = policy
        if model is None:
            model = load_model(spec.model, "policy", spec.dtype, spec.seed)
            nn.Module.to(model, spec.rank_info.device).requires_grad_(False)
        return cls(
            model,
            spec.rollout.max_num_seqs,
            spec.max_length,
            owned=policy is None,
            on_oom=spec.on_oom,
        )

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Copy the weights (N, ...) into an owned model; no-op if the trainer's model is used."""
        if self.owned:
            own = dict(self.model.named_parameters())
            for name, value in weights:
                own[name].data.copy_(value)

    def sleep(self) -> bool:
        """Do nothing: no memory except the model is held between calls."""
        return False

    def wake(self) -> None:
        """Do nothing: `sleep` releases nothing."""

    def close(self) -> None:
        """Do nothing: there are no processes to end."""

    # Not inference_mode: tensors that a module caches must stay usable in training.
    @torch.no_grad()
    def generate(self, prompt_ids: Ragged, sampling: SamplingParams) -> Responses:
        """Sample responses: see `RolloutEngine.generate`.

        Random numbers depend on row and position only, not on the size of waves.
        """
        prompt_ids = prompt_ids.to("cpu")
        num_rows = len(prompt_ids) * sampling.n
        limits = response_limits(prompt_ids.lengths, sampling, self.max_length)
        if num_rows == 0:
            empty = torch.empty(0, dtype=torch.int64)
            return Responses(Ragged(empty, empty), Ragged(empty.float(), empty), [])
        uniforms = None
        if sampling.temperature > 0:
            uniforms = _uniforms(sampling.row_seeds(num_rows), int(limits.max()))
        # Long prompts first, so that an out-of-memory error occurs early.
        order = prompt_ids.lengths.argsort(descending=True, stable=True)
        left = (order[:, None] * sampling.n + torch.arange(sampling.n)).flatten()
        steps: list[_Step] = []
        with _evaluating(self.model):
            while len(left):
                size = self.budget.size
                wave = left[: size // sampling.n * sampling.n or size]
                try:
                    steps += list(self._generate(wave, prompt_ids, limits, uniforms, sampling))
                    left = left[len(wave) :]
                    continue
                except RuntimeError as error:
                    if not is_oom(error):
                        raise
                    reason = str(error).splitlines()[0]
                # Outside of the handler: the error references the frames that hold the memory.
                lengths = prompt_ids.lengths[wave // sampling.n] + limits[wave]
                self.on_oom(self.budget.halve([lengths], failed=0, alone=True, reason=reason))
                free_memory(self.model.device.type)
        response_ids, log_probs = _by_row(steps, num_rows)
        return Responses(
            response_ids, log_probs, finish_reasons(response_ids, sampling.stop_token_ids)
        )

    def _generate(
        self,
        rows: Tensor,
        prompt_ids: Ragged,
        limits: Tensor,
        uniforms: Tensor | None,
        sampling: SamplingParams,
    ) -> Iterator[_Step]:
        """Sample the responses `rows` (R,) (indices into all B·n), token by token.

        `limits` (B·n,), `uniforms` (longest, B·n). Rows of a prompt are adjacent. Which rows are
        active is tracked on the CPU; per step, only the stop decision is waited for.
        """
        device = next(self.model.parameters()).device
        stops = torch.tensor(sampling.stop_token_ids, dtype=torch.int64, device=device)
        prompts, group_of_row = torch.unique_consecutive(rows // sampling.n, return_inverse=True)
        cache = KVCache(prompt_ids.lengths[prompts], group_of_row, int(limits[rows].max()))
        logits = self._prefill(cache, prompt_ids.select(prompts))[group_of_row.to(device)]
        positions = cache.prompt_lengths[group_of_row].to(device)
        for step in range(cache.max_tokens):
            draw = None if uniforms is None else uniforms[step, rows].to(device)
            tokens, log_probs = sample(logits, draw, sampling)
            yield _Step(rows, tokens, log_probs)
            active = (tokens[:, None] != stops).all(1).cpu() & (limits[rows] > step + 1)
            if not active.all():
                kept = cache.compact(active)
                if len(kept) == 0:
                    return
                rows, tokens, positions = (
                    rows[kept],
                    tokens[kept.to(device)],
                    positions[kept.to(device)],
                )
            logits = self._forward(tokens, positions + step, cache)
            cache.advance()

    def _prefill(self, cache: KVCache, prompt_ids: Ragged) -> Tensor:
        """Run G prompts through the model into `cache`; return the logits after each, (G, V)."""
        device = next(self.model.parameters()).device
        logits, first = [], 0
        chunk_of_prompt = (prompt_ids.offsets[1:] - 1).div(_PREFILL_TOKENS, rounding_mode="floor")
        sizes = torch.unique_consecutive(chunk_of_prompt, return_counts=True)[1]
        for numbers in torch.arange(len(prompt_ids)).split(sizes.tolist()):
            chunk = prompt_ids.select(numbers)
            packing = Packing.from_lengths(chunk.lengths, device)
            attention = Prefill(cache, packing, first)
            logits.append(
                self._forward(
                    chunk.values.to(device),
                    packing.position_ids,
                    attention,
                    keep=(chunk.offsets[1:] - 1).to(device),
                )
            )
            first += len(chunk)
        return torch.cat(logits)

    def _forward(
        self, tokens: Tensor, positions: Tensor, attention: TokenAttention, keep: Tensor | int = 0
    ) -> Tensor:
        """Return the logits (N, V) of the tokens (T,) at indices `keep` (N,); 0 keeps all T."""
        output = self.model(
            input_ids=tokens[None],
            position_ids=positions[None],
            packing=attention,
            use_cache=False,
            logits_to_keep=keep,
        )
        return output.logits[0]


def _uniforms(seeds: Tensor, max_tokens: int) -> Tensor:
    """Draw uniform numbers (max_tokens, R) in [0, 1), each row from its own seed (R,).

    A longer row begins with the numbers of a shorter one.
    """
    uniforms, generator = torch.empty(len(seeds), max_tokens), torch.Generator()
    for row, seed in zip(uniforms, seeds.tolist(), strict=True):
        row.uniform_(generator=generator.manual_seed(seed))
    return uniforms.T.contiguous()


def _by_row(steps: list[_Step], num_rows: int) -> tuple[Ragged, Ragged]:
    """Regroup steps into tokens and log-probs of `num_rows` rows each, on the CPU."""
    rows = torch.cat([step.rows for step in steps])
    order, lengths = rows.argsort(stable=True), torch.bincount(rows, minlength=num_rows)
    tokens = torch.cat([step.tokens for step in steps]).cpu()
    log_probs = torch.cat([step.log_probs for step in steps]).cpu()
    return Ragged(tokens[order], lengths), Ragged(log_probs[order], lengths)


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Disable dropout, and restore the mode of every module afterwards."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True
