"""Packed rows give transformers' own log-probs, or the start is refused, for many architectures."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModel, AutoModelForCausalLM, PreTrainedModel

from rlctl.errors import ConfigError
from rlctl.recipes.compose import compose
from rlctl.recipes.schema import Config
from rlctl.runtime.base.batch import Ragged
from rlctl.runtime.model import attention, causal_lm
from rlctl.runtime.model.activations import save_activation_memory
from rlctl.runtime.model.attention import Packing, use_rlctl_attention
from rlctl.runtime.model.causal_lm import PolicyModel, ValueModel
from rlctl.runtime.model.mapped import RankStorage
from rlctl.runtime.model.padded_rows import has_padded_rows, use_padded_rows
from rlctl.runtime.model.probe import check_model, check_packing, first_layers
from rlctl.runtime.model.routing import Routers
from rlctl.runtime.model.sequences import Sequences
from rlctl.runtime.workers.base import ModelWorker
from rlctl.runtime.workers.reference import ReferenceSpec, ReferenceWorker
from tests.distributed.ranks import rank_info
from tests.models import model_of, tiny_model, write_tiny_model
from tests.tolerance import assert_as_exact, in_float64
from tests.workers import actor_of, critic_of

EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
# Heads that scale or cap the logits come first; test_model_types.py has every type.
RIGHT: dict[str, dict[str, Any]] = {
    "granite": {"logits_scaling": 8.0, "attention_multiplier": 0.2, "residual_multiplier": 0.5},
    "granitemoe": {"logits_scaling": 8.0, **EXPERTS},
    "cohere": {"logit_scale": 0.25},
    "gemma2": {
        "head_dim": 8,
        "attn_logit_softcapping": 5.0,
        "final_logit_softcapping": 5.0,
        "layer_types": ["full_attention"] * 2,
    },
    "gpt2": {},
    "gpt_neox": {},
    "opt": {"ffn_dim": 64, "word_embed_proj_dim": 32},
    "mixtral": EXPERTS,
    "qwen3_moe": {
        "head_dim": 8,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
    },
}
# Models that class or config shows to need padded rows.
PADDED: dict[str, dict[str, Any]] = {
    "bloom": {"n_layer": 2, "n_head": 4},
    "mpt": {"d_model": 32, "n_heads": 4, "n_layers": 2},
    "falcon": {"alibi": True},
    "rwkv": {"attention_hidden_size": 32},
}
# Models that only the probe shows to need them: they do not use the interface.
CAUGHT = ("stablelm", "nemotron", "doge")


def miniature(kind: str, auto: Any = AutoModelForCausalLM, **fields: Any) -> PreTrainedModel:
    """Build a model of two layers with random norms and biases."""
    return model_of(kind, fields, auto=auto)


def prepared(model: PreTrainedModel) -> PreTrainedModel:
    use_rlctl_attention(model)
    return model


def rows() -> list[Tensor]:
    draw = torch.Generator().manual_seed(1)
    return [torch.randint(3, 64, (length,), generator=draw) for length in (9, 2, 30, 14)]


def packed(given: list[Tensor]) -> Sequences:
    prompts = Ragged.from_rows([row[:1] for row in given])
    return Sequences.from_ragged(prompts, Ragged.from_rows([row[1:] for row in given]))


def gradient_of(model: PreTrainedModel, log_probs: Tensor) -> Tensor:
    """Return the gradient of the sum of log-probs, flat, and remove it from the model."""
    log_probs.sum().backward()
    found = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    model.zero_grad()
    return found


def row_by_row(model: PreTrainedModel, given: list[Tensor]) -> Tensor:
    """Return the log-probs (T,) that transformers computes for each row alone."""
    parts = [
        model(row[None]).logits[0, :-1].log_softmax(-1).gather(1, row[1:, None]) for row in given
    ]
    return torch.cat(parts).squeeze(1)


@pytest.mark.parametrize("kind", RIGHT)
def test_log_probs_are_those_of_the_whole_model(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = miniature(kind, **RIGHT[kind])
    exact_model = in_float64(model)
    expected, exact = (row_by_row(each, rows()) for each in (model, exact_model))
    exact_gradient = gradient_of(exact_model, exact)
    policy = PolicyModel(prepared(model), 1.0)
    check_packing(policy)
    found = policy(packed(rows()), with_entropy=True, with_squares=True)
    assert_as_exact(found.log_probs, expected, exact)
    gradient = gradient_of(model, found.log_probs)
    monkeypatch.setattr(causal_lm, "MAX_LOGITS", 5 * 64)  # chunks of 5 positions
    chunks = policy(packed(rows()), with_entropy=True, with_squares=True)
    assert found.entropy is not None
    assert chunks.entropy is not None
    torch.testing.assert_close(chunks.log_probs, found.log_probs)
    torch.testing.assert_close(chunks.entropy, found.entropy)
    again = gradient_of(model, chunks.log_probs)
    assert_as_exact(again, gradient, exact_gradient)


def test_models_that_are_not_causal_are_refused_by_their_class() -> None:
    with pytest.raises(ConfigError, match="bert is no causal language model"):
        use_rlctl_attention(miniature("bert"))


@pytest.mark.parametrize("kind", CAUGHT)
def test_probe_pads_models_that_do_not_use_the_interface(kind: str) -> None:
    policy = PolicyModel(prepared(miniature(kind)), 1.0)
    with pytest.raises(ConfigError, match=f"models of type {kind} .* without `packing`"):
        check_packing(policy)
    check_model(policy, None)
    assert has_padded_rows(policy.hf)


def test_probe_refuses_padded_rows_of_models_that_are_not_causal() -> None:
    hf = miniature("bert")
    use_padded_rows(hf)
    with pytest.raises(ConfigError, match=r"models of type bert .* computed wrongly"):
        check_model(PolicyModel(hf, 1.0), None)


def leak_rows(patch: pytest.MonkeyPatch) -> None:
    """Let the rows of the probe attend to the rows before them."""
    whole = Packing.from_lengths(torch.tensor([7 + 36 + 4]), "cpu")
    patch.setattr(Packing, "attend", partial(Packing.attend, whole))


@pytest.mark.parametrize("kind", ["policy", "backbone"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_probe_refuses_a_leak_in_any_precision(
    kind: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    auto = AutoModelForCausalLM if kind == "policy" else AutoModel
    hf = prepared(miniature("llama", auto))
    nn.Module.to(hf, dtype=dtype)
    model = PolicyModel(hf, 0.7) if kind == "policy" else ValueModel(hf)
    check_packing(model)
    leak_rows(monkeypatch)
    with pytest.raises(ConfigError, match="computed wrongly on packed rows"):
        check_packing(model)


def test_experts_of_padded_rows_are_not_replayed() -> None:
    settings = {"num_local_experts": 4, "num_experts_per_tok": 2}
    hf = prepared(miniature("mixtral", **settings))
    Routers(hf)
    use_padded_rows(hf)
    with pytest.raises(ConfigError, match="router replay does not support models of type mixtral"):
        Routers(hf)


def test_models_that_cannot_compute_layers_again_say_so() -> None:
    hf = miniature("rwkv", **PADDED["rwkv"])
    hf.supports_gradient_checkpointing = False
    settings = compose("grpo", ["actor_rollout_ref.model.enable_gradient_checkpointing=true"])
    with pytest.raises(ConfigError, match="models of type rwkv cannot compute their layers again"):
        save_activation_memory(hf, settings.config.actor_rollout_ref.model)


def test_probe_changes_nothing() -> None:
    model = tiny_model("qwen2")
    policy = PolicyModel(prepared(model), 1.0)
    before, state = {k: v.clone() for k, v in model.state_dict().items()}, torch.get_rng_state()
    check_packing(policy)
    assert torch.equal(torch.get_rng_state(), state)
    assert model.config._attn_implementation == attention.NAME
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


def config_of(folder: Path, recipe: str) -> Config:
    path = f"actor_rollout_ref.model.path={write_tiny_model(folder)}"
    return compose(recipe, [path, "actor_rollout_ref.rollout.temperature=0.5"]).config


def reference(folder: Path) -> ReferenceWorker:
    part = config_of(folder, "ppo").actor_rollout_ref
    return ReferenceWorker(rank_info(), ReferenceSpec(part.model, part.ref, 1.0, 0))


WORKERS: dict[str, Callable[[Path], ModelWorker]] = {
    "ppo": lambda folder: actor_of(rank_info(), config_of(folder, "ppo")),
    "sft": lambda folder: actor_of(rank_info(), config_of(folder, "sft")),
    "reference": reference,
    "critic": lambda folder: critic_of(rank_info(), config_of(folder, "ppo")),
}


@pytest.mark.parametrize("build", WORKERS.values(), ids=list(WORKERS))
def test_every_worker_is_probed(
    build: Callable[[Path], ModelWorker], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    leak_rows(monkeypatch)
    assert has_padded_rows(build(tmp_path).learner.model.hf)


@pytest.mark.parametrize(("recipe", "expected"), [("sft", 1.0), ("ppo", 0.5)])
def test_sft_trains_at_temperature_1(recipe: str, expected: float, tmp_path: Path) -> None:
    """The temperature of the rollout is that of sampled responses, which SFT does not have."""
    worker = actor_of(rank_info(), config_of(tmp_path, recipe))
    assert worker.policy.temperature == expected


def test_the_probe_copies_a_layer_of_each_kind_in_the_dtype_of_passes() -> None:
    kinds = ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"]
    hf = tiny_model(num_hidden_layers=4, use_sliding_window=True, layer_types=kinds)
    model = PolicyModel(hf, 1.0)
    copied = first_layers(model, RankStorage("cpu", torch.float32, torch.bfloat16))
    assert len(copied.hf.get_decoder().layers) == 3, "the third is the first of its kind"
    assert {parameter.dtype for parameter in copied.parameters()} == {torch.bfloat16}
    assert len(hf.get_decoder().layers) == 4
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
