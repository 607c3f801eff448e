"""Engine `hf`: no token is computed twice; sampling; requests that join, leave and continue."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from rlctl.runtime.base.budget import OomRetry
from rlctl.runtime.model.attention import Packing, use_rlctl_attention
from rlctl.runtime.rollout import running
from rlctl.runtime.rollout.decode_check import check_decoding
from rlctl.runtime.rollout.engine import SamplingParams
from rlctl.runtime.rollout.exchange import WeightVersions, exchange
from rlctl.runtime.rollout.fused import Passes
from rlctl.runtime.rollout.hf import HFEngine
from rlctl.runtime.rollout.requests import Completion, Decoding, Request, Slice
from rlctl.runtime.rollout.running import RunningRows
from rlctl.runtime.rollout.sampling import sample
from tests.generation import full_forward, prompts, references, sampling
from tests.models import tiny_model
from tests.tolerance import assert_as_exact, in_float64


def test_waves_match_one_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that was never written has no effect."""
    lengths = torch.linspace(3, 40, 15).long()[torch.randperm(15, generator=torch.Generator())]
    prompt_ids = prompts(9, 1, 40, 17, 3)
    params = sampling(max_tokens=lengths, stop_token_ids=())
    whole = HFEngine(tiny_model(), None).generate(prompt_ids, params)
    empty = torch.Tensor.new_empty
    monkeypatch.setattr(
        torch.Tensor,
        "new_empty",
        lambda like, *size: empty(like, *size).fill_(
            torch.nan if like.is_floating_point() else 2**40
        ),
    )
    waves = HFEngine(tiny_model(), 6).generate(prompt_ids, params)
    assert torch.equal(whole.response_ids.values, waves.response_ids.values)
    _, exact = references(tiny_model(), prompt_ids, whole)
    assert_as_exact(waves.log_probs.values, whole.log_probs.values, exact)


@pytest.fixture
def tokens_seen() -> Callable[[PreTrainedModel], list[int]]:
    def watch(model: PreTrainedModel) -> list[int]:
        seen: list[int] = []
        use_rlctl_attention(model)
        check_decoding(Passes(model))  # a model is checked once
        model.get_input_embeddings().register_forward_hook(
            lambda _, inputs, __: seen.append(inputs[0].numel())
        )
        return seen

    return watch


def test_prompts_are_prefilled_once_and_finished_rows_are_skipped(
    tokens_seen: Callable[[PreTrainedModel], list[int]],
) -> None:
    model, limits = tiny_model(), torch.tensor([3, 9, 1, 5, 5, 2])
    seen = tokens_seen(model)
    HFEngine(model, None).generate(prompts(4, 7), sampling(max_tokens=limits, stop_token_ids=()))
    assert seen[0] == 4 + 7
    assert seen[1:] == [int((limits > step).sum()) for step in range(1, 9)]


def test_long_prefills_are_split_between_prompts(
    monkeypatch: pytest.MonkeyPatch, tokens_seen: Callable[[PreTrainedModel], list[int]]
) -> None:
    prompt_ids, params = prompts(9, 1, 40, 17, 3), sampling()
    whole = HFEngine(tiny_model(), None).generate(prompt_ids, params)
    monkeypatch.setattr(running, "_PREFILL_TOKENS", 16)
    model = tiny_model()
    seen = tokens_seen(model)
    cut = HFEngine(model, None).generate(prompt_ids, params)
    assert seen[:3] == [40, 17, 9 + 3 + 1]
    assert torch.equal(whole.response_ids.values, cut.response_ids.values)


def test_model_mode_is_restored_and_gradients_flow() -> None:
    model = tiny_model()
    model.model.layers[0].eval()
    modes = [module.training for module in model.modules()]
    engine = HFEngine(model, None)
    before = engine.generate(prompts(4, 7), sampling(temperature=0.0))
    assert [module.training for module in model.modules()] == modes
    weight = next(model.parameters())
    assert weight.requires_grad
    packing = Packing.from_lengths(torch.tensor([6]), "cpu")
    ids = torch.arange(6)[None]
    loss = (
        model(
            input_ids=ids, position_ids=packing.position_ids[None], packing=packing, use_cache=False
        )
        .logits.logsumexp(-1)
        .sum()
    )
    loss.backward()
    assert all(
        parameter.grad is not None and parameter.grad.isfinite().all()
        for parameter in model.parameters()
    )
    with torch.no_grad():
        weight.add_(torch.randn(weight.shape, generator=torch.Generator().manual_seed(0)))
    after = engine.generate(prompts(4, 7), sampling(temperature=0.0))  # of the current policy
    fresh = HFEngine(copy.deepcopy(model), None).generate(prompts(4, 7), sampling(temperature=0.0))
    assert after.response_ids.values.tolist() != before.response_ids.values.tolist()
    assert torch.equal(after.response_ids.values, fresh.response_ids.values)


LARGEST = 1 - 2**-24  # of the numbers that torch.rand gives


def params(top_k: int = 0, top_p: float = 1.0, temperature: float = 1.0) -> SamplingParams:
    return SamplingParams(temperature, top_p, top_k, max_tokens=1, stop_token_ids=(), seed=0, n=1)


def test_tokens_of_probability_zero_are_never_sampled() -> None:
    for size in (5, 1000, 50_000, 100_001):
        logits = torch.randn(1, size, generator=torch.Generator().manual_seed(0))
        logits[:, 0] = logits[:, size // 2 :] = -torch.inf
        for uniform in (0.0, 0.5, LARGEST, 1.0):
            for top in (params(), params(top_k=size - 1), params(top_p=0.999)):
                token, log_prob = sample(logits, torch.tensor([uniform]), top)
                assert 0 < int(token) < size // 2
                assert log_prob.isfinite().all()


def test_blocks_are_sampled_as_all_tokens() -> None:
    draw = torch.Generator().manual_seed(0)
    logits = torch.randn(40, 2001, generator=draw)  # not a multiple of a block
    uniforms = torch.rand(40, generator=draw)
    blocked, _ = sample(logits, uniforms, params())
    alone = [
        int(sample(row[None], each[None], params())[0])
        for row, each in zip(logits, uniforms, strict=True)
    ]
    assert blocked.tolist() == alone
    assert blocked.unique().numel() > 30


def test_worked_samples() -> None:
    logits = torch.tensor([[0.1, 0.2, 0.3, 0.4]]).log().repeat(6, 1)
    uniforms = torch.tensor([0.0, 0.09, 0.11, 0.29, 0.59, 0.61])
    assert sample(logits, uniforms, params())[0].tolist() == [0, 0, 1, 1, 2, 3]
    # likeliest first: 0.4, 0.3 are left of 1, so token 3 is drawn below 4 / 7
    assert sample(logits, uniforms, params(top_k=2))[0].tolist() == [3, 3, 3, 3, 2, 2]
    assert sample(logits, uniforms, params(top_p=0.69))[0].tolist() == [3, 3, 3, 3, 2, 2]
    # 0.3 of the two that are left is within the first
    assert sample(logits, uniforms, params(top_k=2, top_p=0.3))[0].tolist() == [3] * 6
    torch.testing.assert_close(
        sample(logits, uniforms, params(top_k=2))[1],
        torch.tensor([0.4, 0.4, 0.4, 0.4, 0.3, 0.3]).log(),
    )


def test_half_precision_is_sampled_in_float32() -> None:
    logits = torch.randn(4, 1000, generator=torch.Generator().manual_seed(0)).bfloat16()
    for temperature in (1.0, 0.7):  # bfloat16 would round a quotient by up to 0.4 %
        token, log_prob = sample(
            logits, torch.tensor([0.1, 0.4, 0.7, 0.999]), params(temperature=temperature)
        )
        assert log_prob.dtype == torch.float32
        torch.testing.assert_close(
            log_prob,
            (logits.float() / temperature).log_softmax(-1).gather(1, token[:, None])[:, 0],
        )


STOP = 2
SAMPLED = Decoding(temperature=1.0, top_p=1.0, top_k=-1, stop_token_ids=(STOP,))


def context(length: int, seed: int = 0) -> Tensor:
    return torch.randint(3, 64, (length,), generator=torch.Generator().manual_seed(seed))


def request(key: int, ids: Tensor, max_tokens: int = 40, **settings: object) -> Request:
    return Request(
        **{
            "key": key,
            "context_ids": ids,
            "decoding": SAMPLED,
            "max_tokens": (max_tokens,),
            "seeds": (100 + key,),
            **settings,
        }  # type: ignore[arg-type]
    )


def drain(engine: HFEngine) -> dict[tuple[int, int], Completion]:
    done: dict[tuple[int, int], Completion] = {}
    while engine.num_open:
        done |= {(each.key, each.index): each for each in engine.step()}
    return done


def alone(each: Request) -> Completion:
    engine = HFEngine(tiny_model(), None)
    engine.submit([each])
    return drain(engine)[each.key, 0]


def assert_same(
    actual: Completion, expected: Completion, asked: Request, model: PreTrainedModel | None = None
) -> None:
    """Compare completions of a request; `model` is the policy, without it the usual one."""
    assert actual.response_ids.tolist() == expected.response_ids.tolist()
    assert actual.finish == expected.finish
    temperature = asked.decoding.temperature or 1.0
    exact = full_forward(
        in_float64(model or tiny_model()), asked.context_ids, expected.response_ids, temperature
    )
    assert_as_exact(actual.log_probs, expected.log_probs, exact)


@pytest.mark.parametrize("max_num_seqs", [None, 3])
def test_responses_do_not_depend_on_when_they_join(max_num_seqs: int | None) -> None:
    requests = [request(key, context(3 + 5 * key, key)) for key in range(7)]
    engine = HFEngine(tiny_model(), max_num_seqs)
    done: dict[int, Completion] = {}
    for each in requests:
        engine.submit([each])
        for _ in range(3):
            done |= {completion.key: completion for completion in engine.step()}
    done |= {key: completion for (key, _), completion in drain(engine).items()}
    assert len({len(completion.response_ids) for completion in done.values()}) > 1
    for each in requests:
        assert_same(done[each.key], alone(each), each)


def test_responses_with_different_decoding_share_a_batch() -> None:
    greedy = Decoding(0.0, 1.0, -1, (STOP, 7))
    requests = [
        request(0, context(9)),
        request(1, context(9), decoding=greedy),
        request(2, context(4), decoding=Decoding(0.7, 0.9, 20, (STOP,))),
    ]
    engine = HFEngine(tiny_model(), None)
    engine.submit(requests)
    done = drain(engine)
    for each in requests:
        assert_same(done[each.key, 0], alone(each), each)


def episode(
    engine: HFEngine, tool_tokens: Sequence[int], *, keep: bool
) -> list[tuple[Request, Completion]]:
    """Run one episode in which tool results of `tool_tokens` tokens follow the responses."""
    ids, turns = context(20), list[tuple[Request, Completion]]()
    for turn, size in enumerate([*tool_tokens, 0]):
        previous = turn - 1 if turn else None
        asked = request(turn, ids, max_tokens=12, previous=previous, keep=keep)
        engine.submit([asked])
        found = drain(engine)[turn, 0]
        turns.append((asked, found))
        ids = torch.cat([ids, found.response_ids, context(size, seed=turn)])
    return turns


def test_a_kept_cache_gives_the_same_turns_and_computes_new_tokens_only() -> None:
    model = tiny_model()
    seen: list[int] = []
    model.get_input_embeddings().register_forward_hook(
        lambda _, inputs, __: seen.append(inputs[0].numel())
    )
    tools = [5, 90, 1, 7]
    recomputed = episode(HFEngine(tiny_model(), None), tools, keep=False)
    engine = HFEngine(model, None)
    engine.submit([request(9, context(1))])  # an engine checks its model at its first request
    drain(engine)
    seen.clear()
    kept = episode(engine, tools, keep=True)
    for (asked, actual), (_, expected) in zip(kept, recomputed, strict=True):
        assert_same(actual, expected, asked)
    # Every token is computed once, except the last of the last response.
    total = 20 + sum(tools) + sum(len(turn.response_ids) for _, turn in kept)
    assert sum(seen) == total - 1


def test_new_weights_drop_kept_caches() -> None:
    model, plain = tiny_model(), tiny_model()
    engine = HFEngine(model, None)
    first = request(0, context(20), max_tokens=6, keep=True)
    engine.submit([first])
    ids = torch.cat([first.context_ids, drain(engine)[0, 0].response_ids, context(5, seed=3)])
    with torch.no_grad():
        for parameter in (*model.parameters(), *plain.parameters()):
            parameter.mul_(1.1)
    engine.load_weights(iter(()))
    engine.submit([request(1, ids, previous=0)])
    fresh = HFEngine(model, None)
    fresh.submit([request(1, ids)])
    assert_same(drain(engine)[1, 0], drain(fresh)[1, 0], request(1, ids), plain)


def test_an_error_closes_all_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model()
    engine = HFEngine(model, None)
    endless = Decoding(1.0, 1.0, -1, ())
    engine.submit([request(0, context(5), decoding=endless)])
    engine.step()
    with monkeypatch.context() as patch:
        patch.setattr(model.model.embed_tokens, "forward", lambda _: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            engine.step()
    assert engine.num_open == 0
    assert all(module.training for module in model.modules())
    engine.submit([request(1, context(5))])
    last = request(1, context(5))
    assert_same(drain(engine)[1, 0], alone(last), last)


@pytest.mark.parametrize("max_num_seqs", [None, 2])
def test_cancelled_requests_leave_and_others_continue(max_num_seqs: int | None) -> None:
    endless = Decoding(1.0, 1.0, -1, ())
    requests = [request(key, context(4 + key, key), decoding=endless) for key in range(4)]
    model = tiny_model()
    engine = HFEngine(model, max_num_seqs)
    engine.submit(requests)
    for _ in range(3):
        engine.step()
    engine.cancel([0, 2, 99])  # running, running or waiting, unknown
    assert engine.num_open == 2
    engine.submit([request(4, context(6))])
    done = drain(engine)
    assert sorted(key for key, _ in done) == [1, 3, 4]
    for each in (requests[1], requests[3], request(4, context(6))):
        assert_same(done[each.key, 0], alone(each), each)
    engine.submit(requests[:1])
    engine.step()
    engine.cancel([0])
    assert engine.num_open == 0
    assert all(module.training for module in model.modules())


def spans(
    versions: WeightVersions, key: int, num_tokens: int, index: int = 0
) -> tuple[tuple[int, int], ...]:
    """Finish a response; return the versions of its tokens."""
    ids = torch.zeros(num_tokens, dtype=torch.int64)
    completion = Completion(key, index, ids, torch.zeros(num_tokens), "stop")
    return versions.stamped([completion])[0].spans


def test_a_response_may_end_with_the_last_token_before_a_load() -> None:
    versions = WeightVersions()
    versions.switch(1, {(0, 0): 4})
    assert spans(versions, 0, 4) == ((0, 4),)


def test_responses_that_finish_before_memory_runs_out_are_complete(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first of three responses ends with the step whose next pass runs out of memory."""
    num_steps = 2

    def run(out_of_memory: bool) -> list[Completion]:
        versions, advance = WeightVersions(), RunningRows.advance

        def restart(retry: OomRetry) -> None:
            assert retry == OomRetry("actor_rollout_ref.rollout.max_num_seqs", 2, 1, "rows")
            versions.restart()

        engine = HFEngine(tiny_model(), None, on_oom=restart)
        limits = (num_steps + 1, 6, 6)
        request = Request(5, torch.arange(4), Decoding(1.0, 1.0, -1, ()), limits, (1, 2, 3))
        exchange(engine, [request], Slice(num_steps), (), versions)
        versions.switch(7, engine.progress())

        def fail_once(rows: RunningRows) -> None:
            monkeypatch.setattr(RunningRows, "advance", advance)
            raise torch.OutOfMemoryError("out of memory")

        if out_of_memory:
            monkeypatch.setattr(RunningRows, "advance", fail_once)
        done = exchange(engine, [], Slice(None), (), versions)
        return sorted(done, key=lambda each: each.index)

    plain, retried = run(False), run(True)
    assert [(each.key, each.index) for each in retried] == [(5, 0), (5, 1), (5, 2)]
    for before, after in zip(plain, retried, strict=True):
        assert torch.equal(before.response_ids, after.response_ids)
    assert retried[0].spans == plain[0].spans
    assert retried[1].spans == ((7, 6),), "it was restarted with the new weights"
