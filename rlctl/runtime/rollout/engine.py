"""Rollout engines: protocol and types for sampling responses with synced weights."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, Self

import torch
from torch import Tensor
from transformers import PreTrainedModel

from rlctl.errors import ConfigError, Problem, raise_problems
from rlctl.recipes import schema
from rlctl.runtime.base.batch import Ragged
from rlctl.runtime.base.budget import OomRetry
from rlctl.runtime.base.rank_info import RankInfo
from rlctl.runtime.rollout.requests import Completion, Decoding, Request, next_key

if TYPE_CHECKING:
    from rlctl.runtime.base.image_processor import Images
    from rlctl.runtime.model.routing import RoutingShape

_log = logging.getLogger(__name__)


def log_oom_retry(retry: OomRetry) -> None:
    """Log a reduced batch size as a warning."""
    _log.warning("%s", retry)


@dataclass(frozen=True)
class EngineSpec:
    """Arguments that every engine is built from."""

    model: schema.Model
    rollout: schema.Rollout
    dtype: torch.dtype  # of computation
    rank_info: RankInfo
    max_length: int  # limit of prompt and response tokens together
    seed: int
    number: int | None = None  # of the engine in a separate pool; None: one per rank
    on_oom: Callable[[OomRetry], None] = log_oom_retry  # called when the batch size is reduced
    routing: RoutingShape | None = None  # of the experts to record, for engines that record them

    @property
    def memory_fraction(self) -> float:
        """Fraction of the device's memory for the engine; more where nothing else is on a GPU."""
        alone = self.number is not None and self.rank_info.device == "cuda"
        return self.rollout.memory_fraction(alone)


@dataclass(frozen=True, eq=False)
class SamplingParams(Decoding):
    """Sampling parameters of one call of `generate`."""

    max_tokens: int | Tensor  # response tokens, ≥ 1; a Tensor (B·n,) int64 sets a limit per row
    seed: int | Tensor  # a Tensor (B·n,) int64 sets one random stream per row
    n: int  # responses per prompt
    images: Sequence[Images] = ()  # of each of B prompts; none: no prompt has any

    def _out_of_range(self) -> dict[str, bool]:
        too_short = bool((torch.as_tensor(self.max_tokens) < 1).any())
        return super()._out_of_range() | {"n": self.n < 1, "max_tokens": too_short}

    def decoding(self) -> Decoding:
        """Return the parameters that requests of this call have in common."""
        return Decoding(self.temperature, self.top_p, self.top_k, self.stop_token_ids)

    def row_seeds(self, num_rows: int) -> Tensor:
        """Return the seed of each of the `num_rows` = B·n rows: (B·n,) int64, none negative."""
        if isinstance(self.seed, Tensor):
            return self.seed
        return random_streams(self.seed, torch.arange(num_rows))


def random_streams(seed: int, rows: Tensor) -> Tensor:
    """Derive one seed per row from `seed` and row indices of the batch: (B,) -> (B,) int64 ≥ 0.

    Responses therefore do not depend on which engine samples a row, or on the number of engines.
    Bits are mixed as in SplitMix64 (Steele, Lea & Flood 2014), because generators produce
    correlated streams from neighbouring seeds.
    """
    # 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9 and 0x94D049BB133111EB as int64; products wrap around.
    x = rows.to(torch.int64) * -7046029254386353131 + (seed & (2**63 - 1))
    for shift, factor in ((30, -4658895280553007687), (27, -7723592293110705685)):
        x = (x ^ ((x >> shift) & (2 ** (64 - shift) - 1))) * factor
    return (x ^ ((x >> 31) & (2**33 - 1))) & (2**63 - 1)


def random_stream(seed: int, row: int) -> int:
    """Return the seed of one row: see `random_streams`."""
    x = (row * 0x9E3779B97F4A7C15 + (seed & (2**63 - 1))) % 2**64
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        x = (x ^ (x >> shift)) * factor % 2**64
    return (x ^ (x >> 31)) & (2**63 - 1)


@dataclass(frozen=True, eq=False)
class Responses:
    """B·n responses on the CPU; the n responses of a prompt are adjacent."""

    response_ids: Ragged  # (B·n rows) int64, including the stop token, if any
    log_probs: Ragged  # (B·n rows) float32
    finish: list[str]  # B·n: "stop" = stop token, "length" = limit or end of the context
    routing: Ragged | None = None  # (B·n rows of prompt and response): see `Completion`

    def select(self, rows: Tensor) -> Responses:
        """Return the responses at `rows` (N,) int64."""
        return Responses(
            self.response_ids.select(rows),
            self.log_probs.select(rows),
            [self.finish[row] for row in rows.tolist()],
            None if self.routing is None else self.routing.select(rows),
        )


class RolloutEngine(Protocol):
    """Sampler of responses from the policy, under the weights loaded last.

    An engine is awake after construction. Its owner calls `load_weights` before the first
    `generate` and after every change of the policy.
    """

    @classmethod
    def check(cls, rollout: schema.Rollout, device: str, num_ranks: int) -> None:
        """Validate the config on `num_ranks` processes with a `device` ("cpu" or "cuda") each.

        Called before anything starts; must not import the engine's library.

        Raises:
            ConfigError: the engine does not support what `rollout` asks for.
            MissingExtraError: the library is not installed; the hint gives the command.
        """
        ...

    @classmethod
    def from_spec(cls, spec: EngineSpec, policy: PreTrainedModel | None) -> Self:
        """Build the engine on `spec.rank_info`'s device, if possible without reading weights.

        `policy` is the training model if it is unsharded in this process and in `spec.dtype`: the
        engine may use it directly or share its parameters. It has adapters only if the engine
        takes adapters. None: `load_weights` provides them.

        Raises:
            ConfigError: the engine does not support what `spec` asks for.
            MissingExtraError: the library is not installed.
            ResourceError: memory does not suffice.
        """
        ...

    def generate(self, prompt_ids: Ragged, sampling: SamplingParams) -> Responses:
        """Sample `sampling.n` responses to each of B prompts.

        `log_probs` are those of the sampled tokens under `log_softmax(logits / temperature)` over
        the entire vocabulary (temperature 1 for greedy decoding), as computed by the trainer:
        `top_k` and `top_p` restrict sampling, not the reported log-probs.

        Each row uses another random stream (`sampling.row_seeds`), independent of the rest of the
        batch: the same seed gives the same tokens on the same kind of device, except for rounding
        differences between batch compositions.

        Raises:
            ConfigError: a prompt is empty or fills the model's context.
        """
        ...

    @property
    def num_open(self) -> int:
        """Number of responses that were submitted and are not finished."""
        ...

    def submit(self, requests: Sequence[Request]) -> None:
        """Queue requests; their responses join those in progress at the next `step`.

        Raises:
            ConfigError: a context is empty or fills the model's context.
        """
        ...

    def step(self) -> list[Completion]:
        """Advance all open responses, usually by one token; return those that finished.

        The tokens of a response depend on its context and its random stream, except for rounding
        differences between batch compositions. After an error, no response is open.
        """
        ...

    def cancel(self, keys: Collection[int]) -> None:
        """Drop all responses of the requests with these keys; those that are not open are ignored.

        Their places are free for other requests at the next `step`.
        """
        ...

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Load the policy's current weights: full parameters by their name in transformers.

        Each has its full shape (N, ...); tied ones come once. After the first call, a `PartialSync`
        may get a part of them, and adapters by peft's names after all others. `weights` yields one
        parameter at a time, so there is no second copy of the model on the device; a tensor is
        valid until the next one is requested. The iterator may involve collectives and must be
        exhausted, unless
        the engine was built with a `policy`, whose tensors it shares. Caches computed with the old
        weights are dropped.
        """
        ...

    def sleep(self) -> bool:
        """Release memory during training; True if weights must be reloaded after `wake`."""
        ...

    def wake(self) -> None:
        """Reacquire the memory that `sleep` released; no-op for an engine that is awake."""
        ...

    def close(self) -> None:
        """Shut down: free memory and end the engine's threads and processes."""
        ...


def to_requests(prompt_ids: Ragged, sampling: SamplingParams, context_length: int) -> list[Request]:
    """Return one request with n responses for each of B prompts (ragged), in their order.

    Raises ConfigError as `response_limits` does.
    """
    prompt_ids = prompt_ids.to("cpu")
    n = sampling.n
    decoding = sampling.decoding()
    limits = response_limits(prompt_ids.lengths, sampling, context_length).tolist()
    seeds = sampling.row_seeds(len(limits)).tolist()
    images = sampling.images or [()] * len(prompt_ids)
    return [
        Request(
            key=next_key(),
            context_ids=ids,
            decoding=decoding,
            max_tokens=tuple(limits[i * n : (i + 1) * n]),
            seeds=tuple(seeds[i * n : (i + 1) * n]),
            images=of_prompt,
        )
        for i, (ids, of_prompt) in enumerate(zip(prompt_ids.rows(), images, strict=True))
    ]


def in_order(requests: Sequence[Request], completions: Iterable[Completion]) -> list[Completion]:
    """Order the completions of `requests`: request by request, and by their index."""
    by_row = {(completion.key, completion.index): completion for completion in completions}
    return [by_row[request.key, i] for request in requests for i in range(len(request.seeds))]


def to_responses(rows: Sequence[Completion]) -> Responses:
    """Return the tokens of `rows`, in their order."""
    routing = [row.routing for row in rows if row.routing is not None]
    return Responses(
        Ragged.from_rows([row.response_ids for row in rows], torch.int64),
        Ragged.from_rows([row.log_probs for row in rows], torch.float32),
        [row.finish for row in rows],
        Ragged.from_rows(routing) if routing else None,
    )


def generate_by_requests(
    engine: RolloutEngine, prompt_ids: Ragged, sampling: SamplingParams, context_length: int
) -> Responses:
    """Implement `RolloutEngine.generate` for prompts (ragged) by `submit` and `step`.

    The engine must be idle. Long prompts come first, so that memory runs out early if it does.
    """
    requests = to_requests(prompt_ids, sampling, context_length)
    engine.submit(sorted(requests, key=lambda request: -len(request.context_ids)))
    completions: list[Completion] = []
    while engine.num_open:
        completions += engine.step()
    return to_responses(in_order(requests, completions))


def response_limits(
    prompt_lengths: Tensor, sampling: SamplingParams, context_length: int
) -> Tensor:
    """Return the token limit of each response: prompt_lengths (B,) -> (B·n,) int64.

    Prompt and response together fit into `context_length` tokens. Raises ConfigError for an empty
    prompt or one that leaves no space: data is filtered by length before training, and an empty
    response would go through training unnoticed.
    """
    problems = [
        Problem(
            f"prompt {row} of the batch has {length} tokens; "
            f"1 to {context_length - 1} leave space for a response in the model's context",
            hint="set data.max_prompt_length to filter the data" if length else None,
        )
        for row, length in enumerate(prompt_lengths.tolist())
        if not 0 < length < context_length
    ]
    raise_problems(problems, ConfigError)
    space = (context_length - prompt_lengths).repeat_interleave(sampling.n)
    return torch.minimum(space, torch.as_tensor(sampling.max_tokens, dtype=torch.int64))
