"""What a rollout engine is: prompts in, sampled answers with their log-probs out, under weights that the trainer hands over."""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass
from typing import Protocol, Self, TypeVar, runtime_checkable

import torch
from torch import Tensor
from transformers import PreTrainedModel

from rlctl.errors import ConfigError, Problem, raise_problems
from rlctl.recipes import schema
from rlctl.runtime.batch import Ragged
from rlctl.runtime.budget import OomRetry
from rlctl.runtime.rank_info import RankInfo

E = TypeVar("E")


def _print_halving(halving: OomRetry) -> None:
    print(f"warning: {halving}", file=sys.stderr, flush=True)


@dataclass(frozen=True)
class EngineSpec:
    """What an engine is made of."""

    model: schema.Model
    rollout: schema.Rollout
    dtype: torch.dtype  # of computation
    rank_info: RankInfo
    max_length: int  # the most tokens of a prompt and its answer together
    seed: int
    concurrent: bool = False  # `generate` is called from several threads
    on_oom: Callable[[OomRetry], None] = (
        _print_halving  # is told when memory has room for fewer rows at a time
    )


@dataclass(frozen=True, eq=False)
class SamplingParams:
    """How answers are sampled.

    `temperature` 0 is greedy decoding; `top_p` and `top_k` then have no effect. `top_k` ≤ 0 and `top_p` 1 restrict nothing; where both
    do, `top_p` is a share of the `top_k` that are left.
    """

    temperature: float
    top_p: float
    top_k: int
    max_tokens: int | Tensor  # of an answer, ≥ 1; a Tensor (B·n,) int64 has one number a row
    stop_token_ids: tuple[int, ...]
    seed: int | Tensor  # a Tensor (B·n,) int64 has one random stream a row
    n: int  # answers a prompt

    def __post_init__(self) -> None:
        wrong = {
            "temperature": self.temperature < 0,
            "top_p": not 0 < self.top_p <= 1,
            "n": self.n < 1,
            "max_tokens": bool((torch.as_tensor(self.max_tokens) < 1).any()),
        }
        if any(wrong.values()):
            raise ValueError(
                f"out of range: {', '.join(f'{name}={getattr(self, name)}' for name, bad in wrong.items() if bad)}"
            )

    def row_seeds(self, num_rows: int) -> Tensor:
        """The random stream of each of the B·n rows, (B·n,) int64, none negative."""
        return (
            self.seed
            if isinstance(self.seed, Tensor)
            else random_streams(self.seed, torch.arange(num_rows))
        )


def random_streams(seed: int, rows: Tensor) -> Tensor:
    """A seed for each of `rows` (B,), which are row numbers of a whole batch: (B,) int64, none negative.

    It hangs on `seed` and the row's number alone, so an answer is the same whichever engine of how many gives it. The bits are mixed as by
    SplitMix64 (Steele, Lea & Flood 2014), because generators take neighbouring seeds for neighbouring streams.
    """
    x = rows.to(torch.int64) * -7046029254386353131 + (
        seed & (2**63 - 1)
    )  # 0x9E3779B97F4A7C15; products wrap around
    for shift, factor in (
        (30, -4658895280553007687),
        (27, -7723592293110705685),
    ):  # 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
        x = (x ^ ((x >> shift) & (2 ** (64 - shift) - 1))) * factor
    return (x ^ ((x >> 31) & (2**33 - 1))) & (2**63 - 1)


@dataclass(frozen=True, eq=False)
class Responses:
    """B·n answers on the CPU; the n answers of a prompt stand side by side."""

    response_ids: Ragged  # (B·n rows) int64, with the stop token if there was one
    log_probs: Ragged  # (B·n rows) float32
    finish: list[
        str
    ]  # B·n: "stop" = wrote a stop token, "length" = reached max_tokens or the end of the context


class RolloutEngine(Protocol):
    """Samples answers from the policy whose weights it was handed last.

    An engine is made awake. Whoever owns it calls `load_weights` before the first `generate` and whenever the policy has changed.
    """

    @classmethod
    def check(cls, rollout: schema.Rollout, device: str, num_ranks: int) -> None:
        """What can be said before anything starts: that the engine is installed and can do what `rollout` asks for on `num_ranks` processes
        with a `device` ("cpu" or "cuda") each. Light: imports no engine.

        Raises:
            ConfigError: it cannot. MissingExtraError: it is not installed; the hint says how to.
        """
        ...

    @classmethod
    def from_spec(cls, spec: EngineSpec, policy: PreTrainedModel | None) -> Self:
        """Build the engine on `spec.place`, without reading weights from disk where it can be avoided.

        `policy` is the training model, if it lies whole in this process and in `spec.dtype`: the engine may use it as it is, or let its own
        parameters be the policy's. None: there is no such model here, and all weights come by `load_weights`.

        Raises:
            ConfigError: the engine cannot do what `spec` asks for. MissingExtraError, ResourceError: it is not there, or does not fit.
        """
        ...

    def generate(self, prompt_ids: Ragged, sampling: SamplingParams) -> Responses:
        """`sampling.n` answers to each of the B prompts.

        `log_probs` are those of the sampled tokens under `log_softmax(logits / temperature)` over the *whole* vocabulary (temperature 1
        for greedy decoding), which is what the trainer computes: `top_k` and `top_p` restrict what is sampled, not what is reported.
        A row's random numbers are those of its stream (`sampling.row_seeds`), whatever else is in the batch: the same seed gives the same
        tokens on the same kind of device, but for rounding where other rows are computed beside it.

        With `spec.concurrent` it is called from several threads, whose prompts are best answered together, and nothing else meanwhile. An
        engine that cannot do that refuses `rollout.mode=async` in `check`.

        Raises:
            ConfigError: a prompt is empty or fills the model's context, so that there is no answer to it.
        """
        ...

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Take up the policy's present weights: each parameter whole, under its name in the transformers model; tied ones come once.

        `weights` makes them one at a time, so that there never is a second copy of the model on the device; a tensor is only valid until
        the next one is asked for. Unless the engine was given a `policy`, it goes through all of them, because making one may be a
        collective call; an engine that shares the policy's tensors may leave them. What was cached under the old weights is dropped.
        """
        ...

    def sleep(self) -> bool:
        """Give memory back while training runs. True if the weights went too, so that they must be loaded again after `wake`."""
        ...

    def wake(self) -> None:
        """Take back what `sleep` gave away. Nothing to do for an engine that is awake."""
        ...

    def close(self) -> None:
        """End the engine: memory, threads and processes of its own are gone."""
        ...


@runtime_checkable
class PhasedStartup(Protocol):
    """An engine class whose start takes so long that one wants to know what it is at."""

    @classmethod
    def startup_phases(
        cls, spec: EngineSpec, policy: PreTrainedModel | None
    ) -> Generator[str, None, RolloutEngine]:
        """As `RolloutEngine.from_spec`, in parts: before each it says what comes next."""
        ...


def start_in_phases(
    engine: type[RolloutEngine], spec: EngineSpec, policy: PreTrainedModel | None
) -> Generator[str, None, RolloutEngine]:
    """Make `engine`, in its phases where it has any."""
    if isinstance(engine, PhasedStartup):
        return (yield from engine.startup_phases(spec, policy))
    return engine.from_spec(spec, policy)


def run_startup(phases: Generator[str, None, E]) -> E:
    """What comes of it, without a break."""
    while True:
        try:
            next(phases)
        except StopIteration as made:
            return made.value


def response_limits(
    prompt_lengths: Tensor, sampling: SamplingParams, context_length: int
) -> Tensor:
    """The most tokens that each of the B·n answers may have, so that prompt and answer fit into `context_length` tokens: (B·n,).

    An answer is cut there (finish "length"). A prompt that leaves no room for an answer is an error and not an empty answer: data is
    filtered by length before training starts, and an answer of no tokens would go through it unseen.
    """
    problems = [
        Problem(
            f"prompt {row} of the batch has {length} tokens; 1 to {context_length - 1} leave room for an answer in the model's context",
            hint="filter the data by data.max_prompt_length" if length else None,
        )
        for row, length in enumerate(prompt_lengths.tolist())
        if not 0 < length < context_length
    ]
    raise_problems(problems, ConfigError)
    room = (context_length - prompt_lengths).repeat_interleave(sampling.n)
    return torch.minimum(room, torch.as_tensor(sampling.max_tokens, dtype=torch.int64))


def finish_reasons(response_ids: Ragged, stop_token_ids: tuple[int, ...]) -> list[str]:
    """ "stop" where an answer ends with a stop token, otherwise "length"."""
    last = response_ids.values[response_ids.offsets[1:] - 1]
    stopped = torch.isin(last, torch.tensor(stop_token_ids, dtype=torch.int64))
    return ["stop" if stop else "length" for stop in stopped.tolist()]
