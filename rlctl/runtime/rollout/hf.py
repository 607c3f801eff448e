"""The engine `hf`: answers sampled from the training model itself, by its own Hugging Face modules.

Where the policy lies whole in this process no copy of it is made, so an answer is always the current policy's; nothing else is held
between calls. Prompts are prefilled once for their n answers, only answers that still grow are computed, and the head runs on last
positions only.
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
    response_limits,
)
from rlctl.runtime.rollout.kv_cache import KVCache, Prefill
from rlctl.runtime.rollout.sampling import sample

_PREFILL_TOKENS = 8192  # a forward pass over prompts is at most about this long: more saves no time and costs memory


class _Step(NamedTuple):
    """One token of some of the answers."""

    rows: Tensor  # numbers among all B·n answers, on the CPU
    tokens: Tensor
    log_probs: Tensor


class HFEngine:
    """Batched sampling from `model`, whose parameters are looked up at each call and used in place.

    The model is switched to rlctl's attention (`use_rlctl_attention`). Of a model under FSDP2 the parameters must be unsharded during
    `generate`, and stay so between its forward passes.

    Args:
        model: any causal language model with transformers' attention interface and plain causal attention.
        max_num_seqs: answers generated at a time; more come in waves of about equally long prompts, whose answers are only split where
            they are more. None: all at once. Where memory does not suffice, it is halved and the wave begins anew.
        max_length: a bound of prompt and answer together, besides the model's context. None: the context alone.
        owned: the model is the engine's own copy, which `load_weights` fills.
        on_halving: is told of less at a time.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        max_num_seqs: int | None,
        max_length: int | None = None,
        *,
        owned: bool = False,
        on_oom: Callable[[OomRetry], None] = print,
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
        """See `RolloutEngine.check`."""
        del device, num_ranks
        problems = []
        if rollout.tensor_model_parallel_size > 1:
            what = "actor_rollout_ref.rollout.tensor_model_parallel_size is set, but the engine hf runs on one rank"
            problems.append(
                Problem(what, hint="set it to 1, or actor_rollout_ref.rollout.name=vllm")
            )
        if rollout.engine_kwargs:
            problems.append(
                Problem(
                    "actor_rollout_ref.rollout.engine_kwargs is set, but the engine hf takes none",
                    hint="leave it {}",
                )
            )
        if rollout.mode == "async":
            what = "actor_rollout_ref.rollout.mode=async is set, but the engine hf answers one batch after the other"
            problems.append(
                Problem(what, hint="leave it sync, or actor_rollout_ref.rollout.name=vllm")
            )
        raise_problems(problems)

    @classmethod
    def from_spec(cls, spec: EngineSpec, policy: PreTrainedModel | None) -> Self:
        """See `RolloutEngine.from_spec`. Without a policy the engine keeps a model of its own."""
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
        """See `RolloutEngine.load_weights`. A model that the engine shares has them already."""
        if self.owned:
            own = dict(self.model.named_parameters())
            for name, value in weights:
                own[name].data.copy_(value)

    def sleep(self) -> bool:
        """Between calls nothing is held but the model."""
        return False

    def wake(self) -> None:
        """Nothing was given away."""

    def close(self) -> None:
        """There is nothing to end."""

    @torch.no_grad()  # not inference_mode: what a module keeps from a forward pass must stay usable in training
    def generate(self, prompt_ids: Ragged, sampling: SamplingParams) -> Responses:
        """See `RolloutEngine.generate`. Random numbers belong to a row and a position: the size of waves does not change them."""
        prompt_ids = prompt_ids.to("cpu")
        num_rows = len(prompt_ids) * sampling.n
        limits = response_limits(prompt_ids.lengths, sampling, self.max_length)
        if num_rows == 0:
            empty = torch.empty(0, dtype=torch.int64)
            return Responses(Ragged(empty, empty), Ragged(empty.float(), empty), [])
        uniforms = None
        if sampling.temperature > 0:
            uniforms = _uniforms(sampling.row_seeds(num_rows), int(limits.max()))
        # long prompts first, so that too little memory shows at once
        left = (
            prompt_ids.lengths.argsort(descending=True, stable=True)[:, None] * sampling.n
            + torch.arange(sampling.n)
        ).flatten()
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
                # not in the handler: the error holds the frames that hold the memory
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
        """The answers `rows` (numbers among all B·n; those to a prompt stand side by side), token by token.

        What decides who goes on is on the CPU; of a step's work on the device, only who stopped is waited for.
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
            alive = (tokens[:, None] != stops).all(1).cpu() & (limits[rows] > step + 1)
            if not alive.all():
                kept = cache.keep(alive)
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
        """Run the prompts through the model into `cache`; the logits behind their last tokens: (G, V)."""
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
        """Logits (·, V) of the tokens (T,) at `keep`; 0 is all of them."""
        output = self.model(
            input_ids=tokens[None],
            position_ids=positions[None],
            packing=attention,
            use_cache=False,
            logits_to_keep=keep,
        )
        return output.logits[0]


def _uniforms(seeds: Tensor, max_tokens: int) -> Tensor:
    """A number in [0, 1) for each position and row, from the row's own stream: (max_tokens, R). A longer row begins as a shorter one."""
    uniforms, generator = torch.empty(len(seeds), max_tokens), torch.Generator()
    for row, seed in zip(uniforms, seeds.tolist(), strict=True):
        row.uniform_(generator=generator.manual_seed(seed))
    return uniforms.T.contiguous()


def _by_row(steps: list[_Step], num_rows: int) -> tuple[Ragged, Ragged]:
    """Tokens and log-probs of each row, on the CPU. The steps of a row are in order already."""
    rows = torch.cat([step.rows for step in steps])
    order, lengths = rows.argsort(stable=True), torch.bincount(rows, minlength=num_rows)
    tokens = torch.cat([step.tokens for step in steps]).cpu()
    log_probs = torch.cat([step.log_probs for step in steps]).cpu()
    return Ragged(tokens[order], lengths), Ragged(log_probs[order], lengths)


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Without dropout; afterwards every module is in the mode it was in."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True
