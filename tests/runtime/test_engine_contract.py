"""What every rollout engine promises, held against each one that is installed here: entry points of `rlctl.engines`.

An engine takes seconds to build, so most tests share one of each kind, built around a policy of its own.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from rlctl.errors import ConfigError, MissingExtraError
from rlctl.plugins import load, names
from rlctl.recipes.compose import compose
from rlctl.runtime.batch import Ragged
from rlctl.runtime.rank_info import RankInfo
from rlctl.runtime.rollout.engine import (
    EngineSpec,
    Responses,
    RolloutEngine,
    SamplingParams,
    random_streams,
)
from tests.models import Arch, tiny_model

STOP, MAX_LENGTH = 2, 192
CHOOSES = {"auto"}  # answers with one of the others
MARKS = {"vllm": pytest.mark.vllm}


@dataclass(frozen=True)
class Kind:
    """An engine that is installed and runs on a CPU."""

    name: str
    folder: Path

    def spec(self, **changes: Any) -> EngineSpec:
        settings = [
            f"actor_rollout_ref.model.path={self.folder}",
            "data.train_files=none.parquet",
            f"actor_rollout_ref.rollout.name={self.name}",
        ]
        rollout = compose("ppo_trainer", settings).config.actor_rollout_ref
        rank_info = RankInfo(0, 1, "cpu", 1, 60.0, False, None)
        return EngineSpec(
            rollout.model,
            rollout.rollout.model_copy(update=changes),
            torch.float32,
            rank_info,
            MAX_LENGTH,
            seed=0,
        )

    def build(
        self, model: PreTrainedModel, policy: PreTrainedModel | None, **changes: Any
    ) -> RolloutEngine:
        """An engine of `model`'s shape; its weights are at first whatever they are, unless there is a `policy`."""
        model.save_pretrained(self.folder)
        return load("engines", self.name).from_spec(self.spec(**changes), policy)


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(name, marks=MARKS.get(name, ()))
        for name in names("engines")
        if name not in CHOOSES
    ],
)
def kind(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Kind:
    kind = Kind(request.param, tmp_path_factory.mktemp(request.param))
    try:
        load("engines", kind.name).check(kind.spec().rollout, "cpu", 1)
    except MissingExtraError as error:
        pytest.skip(str(error.problems[0].message))
    except ConfigError as error:
        pytest.fail(str(error))
    return kind


@dataclass(frozen=True)
class Shared:
    engine: RolloutEngine
    policy: PreTrainedModel

    def generate(self, prompts: Ragged, **changes: Any) -> Responses:
        return self.engine.generate(prompts, sampling(**changes))


@pytest.fixture(scope="module")
def shared(kind: Kind) -> Iterator[Shared]:
    """An engine with tied embeddings around a policy in this process."""
    policy = tiny_model(hidden_size=128, head_dim=32)
    engine = kind.build(policy, policy)
    engine.load_weights(weights(policy))
    yield Shared(engine, policy)
    engine.close()


def weights(policy: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    return ((name, value.detach()) for name, value in policy.named_parameters())


def prompts(*lengths: int) -> Ragged:
    generator = torch.Generator().manual_seed(1)
    return Ragged(
        torch.randint(3, 64, (sum(lengths),), generator=generator),
        torch.tensor(lengths, dtype=torch.int64),
    )


def sampling(**changes: Any) -> SamplingParams:
    settings = {
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": -1,
        "max_tokens": 30,
        "stop_token_ids": (STOP,),
        "seed": 3,
        "n": 3,
    }
    return SamplingParams(**(settings | changes))


def full_forward(
    policy: PreTrainedModel, prompt: Tensor, response: Tensor, temperature: float
) -> Tensor:
    """Log-probs (len(response),) by transformers alone."""
    with torch.no_grad():
        logits = policy(torch.cat([prompt, response])[None]).logits[0, len(prompt) - 1 : -1]
    return (logits / temperature).log_softmax(-1).gather(1, response[:, None]).squeeze(1)


def assert_agree(
    answers: Responses, asked: Ragged, policy: PreTrainedModel, temperature: float = 1.0
) -> None:
    """The log-probs are those of a full forward of the policy as it is now, in transformers' own attention."""
    plain = copy.deepcopy(policy).eval()
    plain.set_attn_implementation("sdpa")
    n = len(answers.response_ids) // len(asked)
    for row, (response, log_probs) in enumerate(
        zip(answers.response_ids.rows(), answers.log_probs.rows(), strict=True)
    ):
        expected = full_forward(plain, asked.rows()[row // n], response, temperature)
        torch.testing.assert_close(
            log_probs, expected, atol=1e-4, rtol=0
        )  # of numbers down to -20, in float32


@pytest.mark.parametrize("temperature", [1.0, 0.6, 0.0])
def test_log_probs_are_those_of_the_policy_over_the_whole_vocabulary(
    shared: Shared, temperature: float
) -> None:
    asked = prompts(9, 1, 40)
    # 130 tokens are more than the cache of `hf` has place for at first, and the answers end at many different steps
    answers = shared.generate(asked, temperature=temperature, max_tokens=130, top_k=40, top_p=0.95)
    assert answers.response_ids.lengths.max() == 130
    assert_agree(answers, asked, shared.policy, temperature or 1.0)


def test_greedy_is_the_naive_loop(shared: Shared) -> None:
    asked, plain = prompts(9, 1, 40), copy.deepcopy(shared.policy).eval()
    plain.set_attn_implementation("sdpa")
    answers = shared.generate(asked, temperature=0.0, n=1, max_tokens=12, stop_token_ids=())
    for prompt, response in zip(asked.rows(), answers.response_ids.rows(), strict=True):
        ids = prompt
        with torch.no_grad():
            for _ in range(12):
                ids = torch.cat([ids, plain(ids[None]).logits[0, -1:].argmax(-1)])
        assert response.tolist() == ids[len(prompt) :].tolist()


def test_stop_tokens_end_an_answer_and_belong_to_it(shared: Shared) -> None:
    stops = (STOP, 5, 6, 7, 8)
    answers = shared.generate(prompts(4, 7, 2), stop_token_ids=stops, n=8, max_tokens=20)
    assert set(answers.finish) == {"stop", "length"}
    for response, finish in zip(answers.response_ids.rows(), answers.finish, strict=True):
        assert not set(response[:-1].tolist()) & set(stops)
        assert finish == ("stop" if int(response[-1]) in stops else "length")
        assert finish == "stop" or len(response) == 20


def test_each_row_has_its_own_max_tokens(shared: Shared) -> None:
    limits = torch.tensor([3, 9, 1, 5, 5, 2])
    answers = shared.generate(prompts(4, 7), max_tokens=limits, stop_token_ids=())
    assert answers.response_ids.lengths.tolist() == limits.tolist()
    assert answers.finish == ["length"] * 6


def test_the_seed_decides(shared: Shared) -> None:
    first, again, other = (shared.generate(prompts(4, 7), seed=seed) for seed in (1, 1, 2))
    assert torch.equal(first.response_ids.values, again.response_ids.values)
    assert first.response_ids.values.tolist() != other.response_ids.values.tolist()
    one, two, three = (row.tolist() for row in first.response_ids.rows()[:3])
    assert one != two != three


def test_a_row_draws_from_its_own_stream_whatever_stands_beside_it(shared: Shared) -> None:
    asked, streams = prompts(9, 1, 40, 17), random_streams(5, torch.arange(8))
    whole = shared.generate(asked, n=2, seed=streams)
    part = shared.generate(asked.select(torch.tensor([2, 1])), n=2, seed=streams[[4, 5, 2, 3]])
    rows = whole.response_ids.rows()
    assert [row.tolist() for row in part.response_ids.rows()] == [
        rows[i].tolist() for i in (4, 5, 2, 3)
    ]


def allowed(probs: Tensor, top_k: int, top_p: float) -> Tensor:
    """The distribution (V,) that top-k, then top-p leave of `probs` (V,), token by token."""
    left, held = torch.zeros_like(probs), 0.0
    order = probs.argsort(descending=True).tolist()[: top_k if top_k > 0 else None]
    mass = float(probs[order].sum())
    for token in order:
        if held < top_p * mass:
            left[token] = probs[token]
        held += float(probs[token])
    return left / left.sum()


@pytest.mark.parametrize(
    ("top_k", "top_p", "temperature"), [(-1, 1.0, 1.0), (9, 0.75, 1.3), (1, 1.0, 1.0)]
)
def test_tokens_have_their_distribution(
    shared: Shared, top_k: int, top_p: float, temperature: float
) -> None:
    asked, num = prompts(5), 1500
    answers = shared.generate(
        asked,
        n=num,
        max_tokens=1,
        stop_token_ids=(),
        top_k=top_k,
        top_p=top_p,
        temperature=temperature,
    )
    with torch.no_grad():
        plain = copy.deepcopy(shared.policy).eval()
        plain.set_attn_implementation("sdpa")
        probs = (plain(asked.values[None]).logits[0, -1] / temperature).softmax(-1)
    expected = allowed(probs, top_k, top_p)
    observed = torch.bincount(answers.response_ids.values, minlength=64) / num
    deviation = 4 * (expected * (1 - expected) / num).sqrt() + 1e-9 + 1 / num * (expected > 0)
    assert ((observed - expected).abs() <= deviation).all(), (observed, expected)


def test_an_answer_is_cut_where_the_context_ends(shared: Shared) -> None:
    answers = shared.generate(
        prompts(MAX_LENGTH - 5, MAX_LENGTH - 1, 4), n=2, max_tokens=10, stop_token_ids=()
    )
    assert answers.response_ids.lengths.tolist() == [5, 5, 1, 1, 10, 10]
    assert answers.finish == ["length"] * 6


def test_a_prompt_without_room_for_an_answer_is_an_error(shared: Shared) -> None:
    with pytest.raises(
        ConfigError,
        match=rf"prompt 1 of the batch has {MAX_LENGTH} tokens; 1 to {MAX_LENGTH - 1} leave space",
    ) as caught:
        shared.generate(prompts(15, MAX_LENGTH, MAX_LENGTH + 9))
    assert len(caught.value.problems) == 2
    with pytest.raises(ConfigError, match="prompt 0 of the batch has 0 tokens"):
        shared.generate(prompts(0, 5))
    assert len(shared.generate(prompts(4)).response_ids) == 3  # and goes on


def test_no_prompts_no_answers(shared: Shared) -> None:
    answers = shared.generate(prompts())
    assert len(answers.response_ids) == len(answers.log_probs) == len(answers.finish) == 0


def change(policy: PreTrainedModel, seed: int) -> None:
    """As an optimizer does: every parameter, in place."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)


def test_changed_weights_are_taken_up_and_nothing_cached_stays(shared: Shared) -> None:
    asked = prompts(150, 9)  # long enough to be cached in blocks
    before = shared.generate(asked)
    change(shared.policy, seed=1)
    shared.engine.load_weights(weights(shared.policy))
    after = shared.generate(asked)
    assert_agree(after, asked, shared.policy)
    assert after.response_ids.values.tolist() != before.response_ids.values.tolist()


def test_asleep_and_awake_again(shared: Shared) -> None:
    asked = prompts(9, 30)
    before = shared.generate(asked)
    for _ in range(2):
        if shared.engine.sleep():
            shared.engine.wake()
            shared.engine.load_weights(weights(shared.policy))
        shared.engine.wake()
        assert torch.equal(shared.generate(asked).response_ids.values, before.response_ids.values)


@pytest.mark.parametrize(("arch", "tied"), [("llama", False), ("qwen3", True)])
def test_without_a_policy_the_weights_come_by_name(kind: Kind, arch: Arch, tied: bool) -> None:
    """In batches that do not fit in one wave, and with weights replaced twice."""
    policy, asked = tiny_model(arch, seed=2, tie_word_embeddings=tied), prompts(9, 1, 40, 17)
    engine = kind.build(tiny_model(arch, seed=1, tie_word_embeddings=tied), None, max_num_seqs=4)
    try:
        for _ in range(2):
            change(policy, seed=3)
            engine.load_weights(weights(policy))
            assert_agree(engine.generate(asked, sampling()), asked, policy)
    finally:
        engine.close()


def test_bad_params_are_named() -> None:
    with pytest.raises(ValueError, match=r"top_p=1\.5, n=0"):
        sampling(top_p=1.5, n=0)
    with pytest.raises(ValueError, match="max_tokens"):
        sampling(max_tokens=torch.tensor([3, 0]))
