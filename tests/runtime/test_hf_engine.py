"""The contract of a rollout engine, kept by `hf`. Another engine joins by an entry in ENGINES."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import PreTrainedModel

from rlctl.errors import ConfigError
from rlctl.recipes.compose import compose
from rlctl.runtime.batch import Ragged
from rlctl.runtime.model.attention import Packing
from rlctl.runtime.place import Place
from rlctl.runtime.rollout import hf
from rlctl.runtime.rollout.engine import EngineSpec, RolloutEngine, SamplingParams, random_streams
from rlctl.runtime.rollout.hf import HFEngine
from tests.models import ARCHS, Arch, tiny_model

MakeEngine = Callable[[PreTrainedModel, int | None], RolloutEngine]
ENGINES: dict[str, MakeEngine] = {"hf": HFEngine}
STOP = 2


@pytest.fixture(params=list(ENGINES))
def engine(request: pytest.FixtureRequest) -> MakeEngine:
    return ENGINES[request.param]


def prompts(*lengths: int, vocabulary: int = 64) -> Ragged:
    generator = torch.Generator().manual_seed(1)
    return Ragged(torch.randint(3, vocabulary, (sum(lengths),), generator=generator), torch.tensor(lengths))


def sampling(**changes: Any) -> SamplingParams:
    settings = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "max_tokens": 30, "stop_token_ids": (STOP,), "seed": 3, "n": 3}
    return SamplingParams(**(settings | changes))


def full_forward(model: PreTrainedModel, prompt: Tensor, response: Tensor, temperature: float) -> Tensor:
    """Log-probs (len(response),) by transformers alone."""
    with torch.no_grad():
        logits = model(torch.cat([prompt, response])[None]).logits[0, len(prompt) - 1 : -1]
    return (logits / temperature).log_softmax(-1).gather(1, response[:, None]).squeeze(1)


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("temperature", [1.0, 0.6, 0.0])
def test_log_probs_are_those_of_a_full_forward(engine: MakeEngine, arch: Arch, temperature: float) -> None:
    model = tiny_model(arch)
    reference = copy.deepcopy(model)
    asked = prompts(9, 1, 40)
    # 130 tokens are more than the cache has place for at first, and the answers end at many different steps
    answers = engine(model, None).generate(asked, sampling(temperature=temperature, max_tokens=130, top_k=40, top_p=0.95))
    assert answers.response_ids.lengths.max() == 130
    for row, (response, log_probs) in enumerate(zip(answers.response_ids.rows(), answers.log_probs.rows(), strict=True)):
        expected = full_forward(reference, asked.rows()[row // 3], response, temperature or 1.0)
        torch.testing.assert_close(log_probs, expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("arch", ARCHS)
def test_greedy_is_the_naive_loop(engine: MakeEngine, arch: Arch) -> None:
    model = tiny_model(arch)
    reference, asked = copy.deepcopy(model), prompts(9, 1, 40)
    answers = engine(model, None).generate(asked, sampling(temperature=0.0, n=1, max_tokens=12, stop_token_ids=()))
    for prompt, response in zip(asked.rows(), answers.response_ids.rows(), strict=True):
        ids = prompt
        with torch.no_grad():
            for _ in range(12):
                ids = torch.cat([ids, reference(ids[None]).logits[0, -1:].argmax(-1)])
        assert response.tolist() == ids[len(prompt) :].tolist()


def test_stop_tokens_end_an_answer_and_belong_to_it(engine: MakeEngine) -> None:
    stops = (STOP, 5, 6, 7, 8)
    answers = engine(tiny_model(), None).generate(prompts(4, 7, 2), sampling(stop_token_ids=stops, n=8, max_tokens=20))
    assert set(answers.finish) == {"stop", "length"}
    for response, finish in zip(answers.response_ids.rows(), answers.finish, strict=True):
        assert not set(response[:-1].tolist()) & set(stops)
        assert finish == ("stop" if int(response[-1]) in stops else "length")
        assert finish == "stop" or len(response) == 20


def test_each_row_has_its_own_max_tokens(engine: MakeEngine) -> None:
    limits = torch.tensor([3, 9, 1, 5, 5, 2])
    answers = engine(tiny_model(), None).generate(prompts(4, 7), sampling(max_tokens=limits, stop_token_ids=()))
    assert answers.response_ids.lengths.tolist() == limits.tolist()
    assert answers.finish == ["length"] * 6


def test_the_seed_decides(engine: MakeEngine) -> None:
    generate = engine(tiny_model(), None).generate
    first, again, other = (generate(prompts(4, 7), sampling(seed=seed)) for seed in (1, 1, 2))
    assert torch.equal(first.response_ids.values, again.response_ids.values)
    assert torch.equal(first.log_probs.values, again.log_probs.values)
    assert first.response_ids.values.tolist() != other.response_ids.values.tolist()
    one, two, three = (row.tolist() for row in first.response_ids.rows()[:3])
    assert one != two != three


def test_a_rows_answer_does_not_hang_on_its_batch(engine: MakeEngine) -> None:
    """Rows asked in two parts, with the streams they have in the whole batch, answer as in the whole batch."""
    asked, seeds = prompts(4, 7, 5), random_streams(7, torch.arange(9))
    generate = engine(tiny_model(), None).generate
    whole = generate(asked, sampling(seed=seeds))
    assert torch.equal(whole.response_ids.values, generate(asked, sampling(seed=7)).response_ids.values)
    parts = [generate(asked.select(torch.tensor(rows)), sampling(seed=part)) for rows, part in (([0], seeds[:3]), ([1, 2], seeds[3:]))]
    assert torch.equal(whole.response_ids.values, torch.cat([part.response_ids.values for part in parts]))
    assert len(set(random_streams(0, torch.arange(10_000)).tolist()) | set(random_streams(1, torch.arange(10_000)).tolist())) == 20_000


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("max_num_seqs", [1, 6, 7])
def test_waves_give_what_one_batch_gives(engine: MakeEngine, max_num_seqs: int, temperature: float) -> None:
    asked, params = prompts(9, 1, 40, 17, 3), sampling(temperature=temperature, seed=5)
    whole = engine(tiny_model(), None).generate(asked, params)
    waves = engine(tiny_model(), max_num_seqs).generate(asked, params)
    assert torch.equal(whole.response_ids.values, waves.response_ids.values)
    assert whole.finish == waves.finish
    torch.testing.assert_close(whole.log_probs.values, waves.log_probs.values, atol=1e-5, rtol=0)


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


@pytest.mark.parametrize(("top_k", "top_p", "temperature"), [(-1, 1.0, 1.0), (3, 1.0, 0.7), (-1, 0.8, 1.3), (4, 0.75, 1.0), (1, 1.0, 1.0)])
def test_tokens_have_their_distribution(engine: MakeEngine, top_k: int, top_p: float, temperature: float) -> None:
    model, num = tiny_model(vocab_size=8, initializer_range=0.1), 4000
    reference, asked = copy.deepcopy(model), prompts(5, 3, vocabulary=8)
    answers = engine(model, None).generate(
        asked, sampling(n=num, max_tokens=1, stop_token_ids=(), top_k=top_k, top_p=top_p, temperature=temperature)
    )
    for row, prompt in enumerate(asked.rows()):
        with torch.no_grad():
            probs = (reference(prompt[None]).logits[0, -1] / temperature).softmax(-1)
        expected = allowed(probs, top_k, top_p)
        tokens = answers.response_ids.values[row * num : (row + 1) * num]
        observed = torch.bincount(tokens, minlength=8) / num
        deviation = 4 * (expected * (1 - expected) / num).sqrt() + 1e-9
        assert ((observed - expected).abs() <= deviation).all(), (observed, expected)
        # what is reported is the whole distribution's
        torch.testing.assert_close(answers.log_probs.values[row * num : (row + 1) * num], probs.log()[tokens], atol=1e-5, rtol=0)


def test_an_answer_is_cut_where_the_context_ends(engine: MakeEngine) -> None:
    model = tiny_model(max_position_embeddings=20)
    answers = engine(model, None).generate(prompts(15, 19, 4), sampling(n=2, max_tokens=10, stop_token_ids=()))
    assert answers.response_ids.lengths.tolist() == [5, 5, 1, 1, 10, 10]
    assert answers.finish == ["length"] * 6


def test_a_prompt_without_room_for_an_answer_is_an_error(engine: MakeEngine) -> None:
    generate = engine(tiny_model(max_position_embeddings=20), None).generate
    with pytest.raises(ConfigError, match=r"prompt 1 of the batch has 20 tokens; 1 to 19 leave room") as caught:
        generate(prompts(15, 20, 30), sampling())
    assert len(caught.value.problems) == 2
    with pytest.raises(ConfigError, match="prompt 0 of the batch has 0 tokens"):
        generate(prompts(0, 5), sampling())


def test_no_prompts_no_answers(engine: MakeEngine) -> None:
    answers = engine(tiny_model(), None).generate(prompts(), sampling())
    assert len(answers.response_ids) == len(answers.log_probs) == len(answers.finish) == 0


def test_bad_params_are_named() -> None:
    with pytest.raises(ValueError, match=r"top_p=1\.5, n=0"):
        sampling(top_p=1.5, n=0)
    with pytest.raises(ValueError, match="max_tokens"):
        sampling(max_tokens=torch.tensor([3, 0]))


# What only `hf` promises: it is the training model itself, and it computes no token twice.


@pytest.fixture
def tokens_seen() -> Callable[[PreTrainedModel], list[int]]:
    def watch(model: PreTrainedModel) -> list[int]:
        seen: list[int] = []
        model.get_input_embeddings().register_forward_hook(lambda _, inputs, __: seen.append(inputs[0].numel()))
        return seen

    return watch


def test_a_prompt_is_prefilled_once_and_finished_rows_cost_nothing(tokens_seen: Callable[[PreTrainedModel], list[int]]) -> None:
    model, limits = tiny_model(), torch.tensor([3, 9, 1, 5, 5, 2])
    seen = tokens_seen(model)
    HFEngine(model, None).generate(prompts(4, 7), sampling(max_tokens=limits, stop_token_ids=()))
    assert seen[0] == 4 + 7
    assert seen[1:] == [int((limits > step).sum()) for step in range(1, 9)]


def test_long_prefills_are_cut_between_prompts(
    monkeypatch: pytest.MonkeyPatch, tokens_seen: Callable[[PreTrainedModel], list[int]]
) -> None:
    asked, params = prompts(9, 1, 40, 17, 3), sampling()
    whole = HFEngine(tiny_model(), None).generate(asked, params)
    monkeypatch.setattr(hf, "_PREFILL_TOKENS", 16)
    model = tiny_model()
    seen = tokens_seen(model)
    cut = HFEngine(model, None).generate(asked, params)
    assert seen[:3] == [9 + 1, 40, 17 + 3]
    assert torch.equal(whole.response_ids.values, cut.response_ids.values)


def test_the_model_is_left_as_it_was_and_can_learn() -> None:
    model = tiny_model()
    model.model.layers[0].eval()
    modes = [module.training for module in model.modules()]
    engine = HFEngine(model, None)
    before = engine.generate(prompts(4, 7), sampling(temperature=0.0))
    assert [module.training for module in model.modules()] == modes
    weight = next(model.parameters())
    assert weight.requires_grad
    packing = Packing.of(torch.tensor([6]), "cpu")
    ids = torch.arange(6)[None]
    loss = model(input_ids=ids, position_ids=packing.position_ids[None], packing=packing, use_cache=False).logits.logsumexp(-1).sum()
    loss.backward()
    assert all(parameter.grad is not None and parameter.grad.isfinite().all() for parameter in model.parameters())
    with torch.no_grad():
        weight.add_(torch.randn(weight.shape, generator=torch.Generator().manual_seed(0)))
    after = engine.generate(prompts(4, 7), sampling(temperature=0.0))  # of the policy as it is now
    fresh = HFEngine(copy.deepcopy(model), None).generate(prompts(4, 7), sampling(temperature=0.0))
    assert after.response_ids.values.tolist() != before.response_ids.values.tolist()
    assert torch.equal(after.response_ids.values, fresh.response_ids.values)


def test_an_error_leaves_the_mode_too(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("out of memory")

    model = tiny_model()
    engine = HFEngine(model, None)
    monkeypatch.setattr(hf, "sample", fail)
    with pytest.raises(RuntimeError, match="out of memory"):
        engine.generate(prompts(4), sampling())
    assert all(module.training for module in model.modules())


def test_under_fsdp2_with_parameters_unsharded(tmp_path: Path) -> None:
    expected = HFEngine(tiny_model(), None).generate(prompts(4, 7), sampling())
    model = tiny_model()
    engine = HFEngine(model, None)
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        sharded = [fully_shard(layer, mesh=mesh) for layer in model.model.layers] + [fully_shard(model, mesh=mesh)]
        for module in sharded:
            module.set_reshard_after_forward(False, recurse=False)
            module.unshard()
        answers = engine.generate(prompts(4, 7), sampling())
        for module in sharded:
            module.reshard()
    finally:
        dist.destroy_process_group()
    assert torch.equal(answers.response_ids.values, expected.response_ids.values)
    assert torch.equal(answers.log_probs.values, expected.log_probs.values)


def test_an_engine_without_the_policy_takes_its_weights_by_name(tmp_path: Path) -> None:
    tiny_model(seed=1).save_pretrained(tmp_path)
    config = compose("ppo_trainer", [f"actor_rollout_ref.model.path={tmp_path}", "data.train_files=a.parquet"]).config.actor_rollout_ref
    spec = EngineSpec(config.model, config.rollout, torch.float32, Place(0, 1, "cpu", 1, 60.0, False, None), max_length=64, seed=0)
    engine = HFEngine.from_spec(spec, None)
    policy = tiny_model(seed=2)
    engine.load_weights((name, value.detach()) for name, value in policy.named_parameters())
    expected = HFEngine(policy, None).generate(prompts(4, 7), sampling())
    assert torch.equal(engine.generate(prompts(4, 7), sampling()).log_probs.values, expected.log_probs.values)
    with pytest.raises(ConfigError, match="1 to 63 leave room"):
        engine.generate(prompts(64), sampling())
