"""Experts of tokens: the engine and the trainer record the same, and training replays a record."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rlctl.runtime.base.batch import Ragged
from rlctl.runtime.base.metrics import Mean
from rlctl.runtime.model.attention import use_rlctl_attention
from rlctl.runtime.model.causal_lm import PolicyModel
from rlctl.runtime.model.padded_rows import use_own_attention
from rlctl.runtime.model.routing import OWN, SUPPORTED, RoutingShape
from rlctl.runtime.model.sequences import Sequences, prompt_numbers
from rlctl.runtime.rollout.engine import Responses
from rlctl.runtime.rollout.hf import HFEngine, Steps
from rlctl.runtime.rollout.recorded_rows import RecordedRows
from rlctl.runtime.rollout.requests import Completion
from tests.generation import prompts, references, sampling
from tests.miniatures import miniature
from tests.models import MIXTURES, mixture_model
from tests.skips import sampled
from tests.tolerance import assert_all_as_exact, assert_as_exact, in_float64

SAMPLE = {"glm4_moe", "minimax_m2"}  # groups of experts, and a router with two inputs
NORMALIZED = {"qwen3_moe": True, "mixtral": True, "olmoe": False}


def sequences(prompt_ids: Ragged, found: Responses, routing: Ragged | None) -> Sequences:
    """Pack three responses to each prompt, which is computed once."""
    own = prompt_ids.select(torch.arange(len(prompt_ids)).repeat_interleave(3))
    numbers = prompt_numbers(own, routing)
    packed = Sequences.from_ragged(own, found.response_ids, None, numbers, routing)
    assert len(packed.ids) < len(own.values) + len(found.response_ids.values)
    return packed


def gradients(policy: PolicyModel, packed: Sequences) -> tuple[Tensor, dict[str, Tensor]]:
    policy.zero_grad()
    log_probs = policy(packed).log_probs
    log_probs.sum().backward()
    grads = {name: each.grad.clone() for name, each in policy.named_parameters()}  # pyright: ignore[reportOptionalMemberAccess]
    return log_probs.detach(), grads


def choose(model: nn.Module, given: Tensor, normalized: bool) -> None:
    """Let each router choose `given` (T, L, K), by a formula of its own."""

    def forward(router: Any, experts: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = F.linear(hidden.reshape(-1, hidden.shape[-1]), router.weight)
        probs = logits.exp() / logits.exp().sum(-1, keepdim=True)
        chosen = torch.stack([probs[range(len(probs)), each] for each in experts.T], 1)
        return logits, chosen / chosen.sum(-1, keepdim=True) if normalized else chosen, experts

    routers = [each for each in model.modules() if type(each).__name__.endswith("TopKRouter")]
    for layer, router in enumerate(routers):
        experts = given[:, layer].long()
        router.forward = lambda hidden, r=router, e=experts: forward(r, e, hidden)


@pytest.mark.parametrize("kind", MIXTURES)
def test_recorded_experts_are_replayed(kind: str) -> None:
    """The own choice gives the same bits as no replay; another one an independent result."""
    hf, prompt_ids = mixture_model(kind), prompts(9, 1, 40)
    plain, untouched = copy.deepcopy(hf), copy.deepcopy(hf)
    use_rlctl_attention(plain)
    engine = HFEngine(hf, max_num_seqs=4, steps=Steps(rows=RecordedRows))  # several join and leave
    found = engine.generate(prompt_ids, sampling(max_tokens=12))
    routing = found.routing
    assert routing.values.dtype == torch.int8
    assert routing.lengths.tolist() == [
        int(prompt_ids.lengths[i // 3] + n) for i, n in enumerate(found.response_ids.lengths)
    ]
    for row in routing.rows():  # only the last token has no record
        assert (row[:-1] != OWN).all()
        assert (row[-1] == OWN).all()
    hf.gradient_checkpointing_enable({"use_reentrant": False})
    hf.train()
    policy = PolicyModel(hf, 1.0)
    packed = sequences(prompt_ids, found, routing)
    log_probs, grads = gradients(policy, packed)
    num_choices = 2 * 2 * len(packed.targets)  # 2 layers, 2 experts of a token
    assert packed.routing.agreement(packed.predictors) == {
        "training/router_agreement": Mean(num_choices, num_choices)
    }
    expected, expected_grads = gradients(policy, sequences(prompt_ids, found, None))
    assert torch.equal(log_probs, expected)
    assert all(torch.equal(grads[name], each) for name, each in expected_grads.items())
    second, exact = references(untouched, prompt_ids, found)
    for each in (log_probs, found.log_probs.values):
        assert_as_exact(each, second, exact)

    draw = torch.Generator().manual_seed(5)
    other = torch.rand(*routing.values.shape[:2], 4, generator=draw).argsort(-1)[..., :2]
    other = other.to(torch.int8)
    starts = routing.offsets[:-1].tolist()
    for row, start in enumerate(starts):  # rows of a group share the prompt's
        length, first = int(prompt_ids.lengths[row // 3]), starts[row // 3 * 3]
        other[start : start + length] = other[first : first + length]
    packed = sequences(prompt_ids, found, routing.like(other))
    log_probs, grads = gradients(policy, packed)
    assert packed.routing.given is not None
    apart = (plain, in_float64(plain))
    for model in apart:
        choose(model, packed.routing.given, NORMALIZED[kind])
    (own, own_grads), (exact, exact_grads) = (
        gradients(PolicyModel(model, 1.0), sequences(prompt_ids, found, None)) for model in apart
    )
    assert_as_exact(log_probs, own, exact)
    assert (log_probs - expected).abs().max() > 0.1
    assert_all_as_exact(grads, own_grads, exact_grads)
    assert all(each.norm() > 0 for name, each in own_grads.items() if "gate" in name)


@pytest.mark.parametrize("kind", sampled(SUPPORTED, SAMPLE))
def test_experts_get_the_replayed_choice(kind: str, tmp_path: Path) -> None:
    """For each type of router: the engine's record gives the same bits, another one is used."""
    hf, prompt_ids = miniature(kind, tmp_path), prompts(9, 1, 40)
    untouched = copy.deepcopy(hf)
    use_own_attention(untouched, "eager")
    engine = HFEngine(hf, max_num_seqs=4, steps=Steps(rows=RecordedRows))
    found = engine.generate(prompt_ids, sampling(max_tokens=6))
    policy, received = PolicyModel(hf, 1.0), list[Tensor]()
    for module in hf.modules():
        if type(module).__name__.endswith("Experts"):
            module.register_forward_pre_hook(lambda _, args: received.append(args[1]))
    expected = policy(sequences(prompt_ids, found, None)).log_probs
    received.clear()
    packed = sequences(prompt_ids, found, found.routing)
    assert torch.equal(policy(packed).log_probs, expected)
    agreement = packed.routing.agreement(packed.predictors)["training/router_agreement"]
    assert isinstance(agreement, Mean)
    assert agreement.total == agreement.count > 0
    second, exact = references(untouched, prompt_ids, found)
    for each in (expected, found.log_probs.values):
        assert_as_exact(each, second, exact)

    received.clear()
    rows = [(3 - row).where(row != OWN, row) for row in found.routing.rows()]  # of 4 experts
    packed = sequences(prompt_ids, found, Ragged.from_rows(rows))
    assert not torch.equal(policy(packed).log_probs, expected)
    for layer, experts in enumerate(received):
        given = packed.routing.given[:, layer].long()
        assert torch.equal(experts.where(given != OWN, given), given)


@pytest.mark.plugin("agents")
def test_a_turn_adds_the_experts_of_the_tokens_that_it_computed() -> None:
    """A token that ends a turn, and a reply, are computed with the next turn."""
    from rlctl.plugins.agents.tokens import Tokens

    shape = RoutingShape(layers=1, top_k=1, dtype=torch.int8)
    tokens = Tokens([7, 8])

    def turn(number: int, experts: list[int]) -> None:
        ids = torch.tensor([5, 6])
        routing = torch.tensor(experts, dtype=torch.int8).view(-1, 1, 1)
        found = Completion(number, 0, ids, torch.zeros(2), "stop", routing=routing)
        tokens.append_turn(tokens.context(), found, number)

    assert tokens.whole_routing(shape).flatten().tolist() == [OWN, OWN]
    turn(0, [0, 1, 2, OWN])
    tokens.append_reply([9], 0)
    assert tokens.whole_routing(shape).flatten().tolist() == [0, 1, 2, OWN, OWN]
    turn(1, [3, OWN, OWN, 1, 2, 3, OWN])  # the first token was computed again
    tokens.append_reply([9], 1)
    assert tokens.whole_routing(shape).flatten().tolist() == [0, 1, 2, 1, 2, 3, OWN, OWN]
