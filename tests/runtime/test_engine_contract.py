"""Contract of rollout engines, checked for every installed one (entry points `rlctl.engines`).

An engine takes seconds to build, so most tests share one of each kind, built around a separate
policy. Weights that are loaded while responses are open need an engine with a model of its own:
`hf` keeps the keys and values of earlier tokens, vLLM computes them again.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from rlctl.errors import ConfigError, MissingExtraError, RlctlError
from rlctl.plugins import load, names
from rlctl.runtime.base.batch import Ragged
from rlctl.runtime.model.attention import use_rlctl_attention
from rlctl.runtime.model.causal_lm import PolicyModel
from rlctl.runtime.model.routing import OWN, Routers, routing_shape
from rlctl.runtime.model.sequences import Sequences
from rlctl.runtime.rollout.engine import (
    EngineSpec,
    Responses,
    RolloutEngine,
    random_streams,
)
from rlctl.runtime.rollout.exchange import InFlightEngine
from rlctl.runtime.rollout.hf import HFEngine
from rlctl.runtime.rollout.requests import Completion, Decoding, Request, Slice, next_key
from rlctl.runtime.rollout.sampling_params import SamplingConfig
from rlctl.runtime.rollout.weight_sync import Bucket
from rlctl.runtime.workers.rollout import RolloutSpec, RolloutWorker
from tests.generation import (
    STOP,
    assert_most_probable,
    engine_spec,
    full_forward,
    prompts,
    references,
    sampling,
    with_kept_cache,
)
from tests.models import mixture_model, tiny_model
from tests.runtime.test_weights import Arrived
from tests.tolerance import assert_as_exact, in_float64

MAX_LENGTH = 192
CHOOSES = {"auto", "vllm_server", "sglang"}  # delegates to one of the others, or needs a server
MARKS = {"vllm": pytest.mark.extra("vllm")}
# Prompts whose responses are open when an engine loads weights.
LENGTHS = (9, 1, 40)
TO_END = Slice(None)


@dataclass(frozen=True)
class Kind:
    """Installed engine that runs on a CPU."""

    name: str
    folder: Path

    def spec(self, **changes: Any) -> EngineSpec:
        name = f"actor_rollout_ref.rollout.name={self.name}"
        spec = engine_spec(self.folder, name, max_length=MAX_LENGTH)
        return replace(spec, rollout=spec.rollout.model_copy(update=changes))

    def build(
        self, model: PreTrainedModel, policy: PreTrainedModel | None, **changes: Any
    ) -> RolloutEngine:
        """Build an engine for `model`; without a `policy` its weights are not initialized."""
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
    """Engine with tied embeddings around a policy in this process."""
    policy = tiny_model(hidden_size=128, head_dim=32)
    engine = kind.build(policy, policy)
    engine.load_weights(weights(policy))
    yield Shared(engine, policy)
    engine.close()


def weights(policy: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    return ((name, value.detach()) for name, value in policy.named_parameters())


def plain_copy(policy: PreTrainedModel) -> PreTrainedModel:
    """Return a copy of the policy with transformers' attention."""
    plain = copy.deepcopy(policy).eval()
    plain.set_attn_implementation("sdpa")
    return plain


def assert_agree(
    responses: Responses, prompt_ids: Ragged, policy: PreTrainedModel, temperature: float = 1.0
) -> None:
    """Compare log-probs with a full forward of the current policy."""
    second, exact = references(plain_copy(policy), prompt_ids, responses, temperature)
    assert_as_exact(responses.log_probs.values, second, exact)


def own_experts(policy: PreTrainedModel, prompt: Tensor, response: Tensor) -> Tensor:
    """Return the experts that the trainer's model chooses for all tokens but the last."""
    hf = copy.deepcopy(policy)
    use_rlctl_attention(hf)
    packed = Sequences.from_ragged(Ragged.from_rows([prompt]), Ragged.from_rows([response]))
    packed = packed.recorded(Routers.of(hf).shape.dtype)
    with torch.no_grad():
        PolicyModel(hf, 1.0)(packed)
    return packed.own_routing()[:-1]


@pytest.mark.extra("vllm")
def test_weights_and_experts_of_mixtures(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Comes first: vLLM makes groups for experts only with the first model of a process."""
    kind = Kind("vllm", tmp_path_factory.mktemp("mixtral"))
    old, new = mixture_model("mixtral", seed=2), mixture_model("mixtral", seed=3)
    prompt_ids = prompts(9, 1, 140, 17)  # responses to the long one share a block of the cache
    mixture_model("mixtral").save_pretrained(kind.folder)
    spec = replace(kind.spec(), routing=routing_shape(old))
    engine = load("engines", kind.name).from_spec(spec, None)
    stacks: dict[str, bool] = {}
    load_stack = type(engine.stacks).load
    monkeypatch.setattr(
        type(engine.stacks),
        "load",
        lambda self, name, value: stacks.setdefault(name, load_stack(self, name, value)),
    )
    try:
        engine.load_weights(weights(old))
        assert all(stacks[name] for name in stacks if ".experts." in name)
        assert sum(stacks.values()) == 2 * old.config.num_hidden_layers
        found = engine.generate(prompt_ids, sampling())
        assert_agree(found, prompt_ids, old)
        for row, (experts, response) in enumerate(
            zip(found.routing.rows(), found.response_ids.rows(), strict=True)
        ):
            expected = own_experts(old, prompt_ids.rows()[row // 3], response)
            assert torch.equal(experts[:-1], expected)
            assert (experts[-1] == OWN).all()
        asked = requests(*LENGTHS, max_tokens=(12, 14))
        contexts = {each.key: each.context_ids for each in asked}
        engine.submit(asked)
        for _ in range(5):
            assert not engine.step()
        progress = engine.progress()
        engine.load_weights(weights(new))
        done = [each for _ in range(20) for each in engine.step()]
        assert len(done) == len(progress) == 2 * len(LENGTHS)
        for each in done:  # computed tokens keep their experts
            context, experts = contexts[each.key], each.routing
            computed = len(context) + progress[each.key, each.index] - 1
            before, after = (own_experts(hf, context, each.response_ids) for hf in (old, new))
            assert not torch.equal(before[:computed], after[:computed])
            assert torch.equal(experts[:computed], before[:computed])
            assert torch.equal(experts[computed:-1], after[computed:])
    finally:
        engine.close()


@pytest.mark.parametrize("temperature", [1.0, 0.6, 0.0])
def test_log_probs_cover_the_entire_vocabulary(shared: Shared, temperature: float) -> None:
    prompt_ids = prompts(9, 1, 40)
    # 130 tokens exceed the first capacity of hf's cache; responses end at many different steps.
    responses = shared.generate(
        prompt_ids, temperature=temperature, max_tokens=130, top_k=40, top_p=0.95
    )
    assert responses.response_ids.lengths.max() == 130
    assert_agree(responses, prompt_ids, shared.policy, temperature or 1.0)


@pytest.mark.parametrize("temperature", [0.6, 0.0])
def test_the_most_probable_tokens(shared: Shared, temperature: float) -> None:
    assert_most_probable(plain_copy(shared.policy), shared.engine, temperature)


def test_greedy_decoding_matches_a_naive_loop(shared: Shared) -> None:
    prompt_ids, plain = prompts(9, 1, 40), plain_copy(shared.policy)
    responses = shared.generate(prompt_ids, temperature=0.0, n=1, max_tokens=12, stop_token_ids=())
    for prompt, response in zip(prompt_ids.rows(), responses.response_ids.rows(), strict=True):
        ids = prompt
        with torch.no_grad():
            for _ in range(12):
                ids = torch.cat([ids, plain(ids[None]).logits[0, -1:].argmax(-1)])
        assert response.tolist() == ids[len(prompt) :].tolist()


def test_stop_tokens_end_a_response_and_are_included(shared: Shared) -> None:
    stops = (STOP, 5, 6, 7, 8)
    responses = shared.generate(prompts(4, 7, 2), stop_token_ids=stops, n=8, max_tokens=8)
    assert set(responses.finish) == {"stop", "length"}
    for response, finish in zip(responses.response_ids.rows(), responses.finish, strict=True):
        assert not set(response[:-1].tolist()) & set(stops)
        assert finish == ("stop" if int(response[-1]) in stops else "length")
        assert finish == "stop" or len(response) == 8


def test_seed_determines_responses(shared: Shared) -> None:
    first, again, other = (shared.generate(prompts(4, 7), seed=seed) for seed in (1, 1, 2))
    assert torch.equal(first.response_ids.values, again.response_ids.values)
    assert first.response_ids.values.tolist() != other.response_ids.values.tolist()
    one, two, three = (row.tolist() for row in first.response_ids.rows()[:3])
    assert one != two != three


def test_random_stream_of_a_row_is_independent_of_the_batch(shared: Shared) -> None:
    prompt_ids, streams = prompts(9, 1, 40, 17), random_streams(5, torch.arange(8))
    whole = shared.generate(prompt_ids, n=2, seed=streams)
    part = shared.generate(prompt_ids.select(torch.tensor([2, 1])), n=2, seed=streams[[4, 5, 2, 3]])
    rows = whole.response_ids.rows()
    assert [row.tolist() for row in part.response_ids.rows()] == [
        rows[i].tolist() for i in (4, 5, 2, 3)
    ]


def allowed(probs: Tensor, top_k: int, top_p: float) -> Tensor:
    """Restrict `probs` (V,) by top-k, then top-p, token by token: (V,)."""
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
def test_tokens_follow_their_distribution(
    shared: Shared, top_k: int, top_p: float, temperature: float
) -> None:
    prompt_ids, num = prompts(5), 1500
    responses = shared.generate(
        prompt_ids,
        n=num,
        max_tokens=1,
        stop_token_ids=(),
        top_k=top_k,
        top_p=top_p,
        temperature=temperature,
    )
    with torch.no_grad():
        plain = plain_copy(shared.policy)
        probs = (plain(prompt_ids.values[None]).logits[0, -1] / temperature).softmax(-1)
    expected = allowed(probs, top_k, top_p)
    observed = torch.bincount(responses.response_ids.values, minlength=64) / num
    deviation = 4 * (expected * (1 - expected) / num).sqrt() + 1e-9 + 1 / num * (expected > 0)
    assert ((observed - expected).abs() <= deviation).all(), (observed, expected)


def test_response_ends_with_the_context(shared: Shared) -> None:
    responses = shared.generate(
        prompts(MAX_LENGTH - 5, MAX_LENGTH - 1, 4), n=2, max_tokens=10, stop_token_ids=()
    )
    assert responses.response_ids.lengths.tolist() == [5, 5, 1, 1, 10, 10]
    assert responses.finish == ["length"] * 6


def test_prompt_without_space_for_a_response_is_an_error(shared: Shared) -> None:
    with pytest.raises(
        ConfigError,
        match=rf"prompt 1 of the batch has {MAX_LENGTH} tokens; 1 to {MAX_LENGTH - 1} leave space",
    ) as caught:
        shared.generate(prompts(15, MAX_LENGTH, MAX_LENGTH + 9))
    assert len(caught.value.problems) == 2
    with pytest.raises(ConfigError, match="prompt 0 of the batch has 0 tokens"):
        shared.generate(prompts(0, 5))
    assert len(shared.generate(prompts(4)).response_ids) == 3  # still usable


def change(policy: PreTrainedModel, seed: int) -> None:
    """Change every parameter in place, like an optimizer."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)


def test_weight_sync_drops_caches(shared: Shared) -> None:
    prompt_ids = prompts(150, 9)  # long enough for prefix caching
    before = shared.generate(prompt_ids)
    change(shared.policy, seed=1)
    shared.engine.load_weights(weights(shared.policy))
    after = shared.generate(prompt_ids)
    assert_agree(after, prompt_ids, shared.policy)
    assert after.response_ids.values.tolist() != before.response_ids.values.tolist()


def test_sleep_and_wake(shared: Shared) -> None:
    prompt_ids = prompts(9, 30)
    before = shared.generate(prompt_ids)
    for _ in range(2):
        if shared.engine.sleep():
            shared.engine.wake()
            shared.engine.load_weights(weights(shared.policy))
        shared.engine.wake()
        assert torch.equal(
            shared.generate(prompt_ids).response_ids.values, before.response_ids.values
        )


def test_weights_by_name_without_a_policy(kind: Kind) -> None:
    """Uses batches that exceed one wave, and replaces weights twice."""
    first, policy = (tiny_model("qwen3", seed, tie_word_embeddings=False) for seed in (1, 2))
    prompt_ids = prompts(9, 1, 40, 17)
    engine = kind.build(first, None, max_num_seqs=4)
    try:
        for _ in range(2):
            change(policy, seed=3)
            engine.load_weights(weights(policy))
            assert_agree(engine.generate(prompt_ids, sampling()), prompt_ids, policy)
    finally:
        engine.close()


def test_out_of_range_params_are_named() -> None:
    with pytest.raises(ValueError, match=r"top_p=1\.5, n=0"):
        sampling(top_p=1.5, n=0)
    with pytest.raises(ValueError, match="max_tokens"):
        sampling(max_tokens=torch.tensor([3, 0]))


def changed(seed: int) -> PreTrainedModel:
    model = tiny_model(hidden_size=128, head_dim=32).eval()
    change(model, seed)
    return model


def buckets(model: PreTrainedModel) -> list[Bucket]:
    """Return the weights of `model` in buckets of a few parameters each."""
    found = [(name, value.detach()) for name, value in model.named_parameters()]
    return [
        Bucket.from_tensors(number, found[start : start + 5], torch.float32)
        for number, start in enumerate(range(0, len(found), 5))
    ]


def requests(*lengths: int, max_tokens: tuple[int, ...] = (24, 30)) -> list[Request]:
    """Return requests whose prompts have `lengths`; their responses only end at the limit."""
    decoding = Decoding(1.0, 1.0, -1, ())
    seeds = tuple(range(len(max_tokens)))
    return [
        Request(next_key(), ids, decoding, max_tokens, tuple(100 * i + seed for seed in seeds))
        for i, ids in enumerate(prompts(*lengths).rows())
    ]


@dataclass
class Run:
    """Responses of a worker to some requests, by the request's place and the index."""

    worker: RolloutWorker
    asked: list[Request] = field(default_factory=list)
    found: dict[tuple[int, int], Completion] = field(default_factory=dict)

    def exchange(self, new: list[Request], limit: Slice, cancelled: tuple[int, ...] = ()) -> None:
        self.asked += new
        places = {each.key: place for place, each in enumerate(self.asked)}
        for each in self.worker.exchange(new, limit, cancelled):
            row = places[each.key], each.index
            assert row not in self.found
            self.found[row] = each
            assert sum(count for _, count in each.spans) == len(each.response_ids)

    def progress(self) -> dict[tuple[int, int], int]:
        assert isinstance(self.worker.engine, InFlightEngine)
        places = {each.key: place for place, each in enumerate(self.asked)}
        return {(places[k], i): count for (k, i), count in self.worker.engine.progress().items()}


@pytest.fixture(scope="module")
def worker(kind: Kind) -> Iterator[RolloutWorker]:
    """Worker with an engine of its own, which other tests may leave with any weights."""
    changed(0).save_pretrained(kind.folder)
    spec = kind.spec(max_num_seqs=16)
    sampling = SamplingConfig(spec.rollout, MAX_LENGTH // 2, ())
    built = RolloutWorker(
        spec.rank_info, RolloutSpec(spec.model, sampling, MAX_LENGTH // 2, seed=0)
    )
    if not isinstance(built.engine, InFlightEngine):
        built.close()
        pytest.skip(f"{kind.name} cannot load weights in mid-response")
    yield built
    built.close()


def test_responses_continue_under_the_new_weights(worker: RolloutWorker) -> None:
    old, new = changed(1), changed(2)
    exact_old, exact_new = in_float64(old), in_float64(new)
    worker.load_weights(Arrived(buckets(old), 3))
    alone = Run(worker)
    alone.exchange(requests(*LENGTHS), TO_END)
    worker.load_weights(Arrived(buckets(old), 3))
    run = Run(worker)
    run.exchange(requests(*LENGTHS), Slice(7))
    progress = run.progress()
    assert len(progress) == 2 * len(LENGTHS)
    assert min(progress.values()) >= 5
    worker.load_weights(Arrived(buckets(new), 5))
    run.exchange(requests(17, max_tokens=(12,)), TO_END)
    assert len(run.found) == len(progress) + 1, "no response is lost"
    assert worker.engine.num_open == 0
    for row, num_old in progress.items():
        before, response = alone.found[row], run.found[row]
        ids, log_probs = response.response_ids, response.log_probs
        assert before.spans == ((3, len(ids)),)
        assert response.spans == ((3, num_old), (5, len(ids) - num_old))
        assert torch.equal(ids[:num_old], before.response_ids[:num_old])
        assert torch.equal(log_probs[:num_old], before.log_probs[:num_old])
        assert not torch.equal(ids, before.response_ids)
        prompt = run.asked[row[0]].context_ids
        if isinstance(worker.engine, HFEngine):
            second = with_kept_cache(old, new, prompt, ids, num_old)
            exact = with_kept_cache(exact_old, exact_new, prompt, ids, num_old)
        else:
            second, exact = (
                full_forward(model, prompt, ids, 1.0)[num_old:] for model in (new, exact_new)
            )
        assert_as_exact(log_probs[num_old:], second, exact)
    last = run.found[len(LENGTHS), 0]
    assert last.spans == ((5, 12),)
    second, exact = (
        full_forward(model, run.asked[-1].context_ids, last.response_ids, 1.0)
        for model in (new, exact_new)
    )
    assert_as_exact(last.log_probs, second, exact)


def test_several_loads_and_a_cancelled_request(worker: RolloutWorker) -> None:
    """The third version is replaced before it has written a token."""
    run = Run(worker)
    worker.load_weights(Arrived(buckets(changed(1)), 1))
    run.exchange(requests(*LENGTHS), Slice(4))
    first = run.progress()
    worker.load_weights(Arrived(buckets(changed(2)), 2))
    run.exchange([], Slice(6), (run.asked[1].key,))
    second = run.progress()
    assert {place for place, _ in second} == {0, 2}
    worker.load_weights(Arrived(buckets(changed(3)), 3))
    worker.load_weights(Arrived(buckets(changed(4)), 4))
    run.exchange([], TO_END)
    assert run.found.keys() == second.keys()
    for row, response in run.found.items():
        total = len(response.response_ids)
        assert response.spans == (
            (1, first[row]),
            (2, second[row] - first[row]),
            (4, total - second[row]),
        )
        assert response.version == 4
    assert not worker.versions._spans


def test_a_corrupted_bucket_is_named(worker: RolloutWorker) -> None:
    first, *rest = buckets(changed(1))
    broken = copy.deepcopy(first)
    broken.data[0] ^= 1
    with pytest.raises(RlctlError, match="bucket 0 was sent with checksum"):
        worker.load_weights(Arrived([broken, *rest], 9))
