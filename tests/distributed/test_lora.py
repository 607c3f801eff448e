"""LoRA: results equal peft's; only adapters train and are saved; engines get what they lack."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from transformers import AutoModelForCausalLM

from rlctl.errors import ConfigError
from rlctl.recipes.compose import compose
from rlctl.runtime.model.causal_lm import PolicyModel
from rlctl.runtime.model.engine_weights import AdapterSync, EngineWeights, Selection
from rlctl.runtime.model.load import load_model
from rlctl.runtime.model.lora import add_adapters, merged_parameters, without_adapters
from rlctl.runtime.model.sequences import Sequences
from rlctl.runtime.rank_info import RankInfo
from rlctl.runtime.workers.actor import ActorWorker
from tests.miniatures import miniature
from tests.workers import LOSS, actor_of, experience

LORA = ["actor_rollout_ref.model.lora_rank=4", "actor_rollout_ref.model.lora_alpha=8"]


def config(model: Path | str, *more: str) -> Any:
    return compose("ppo", [f"actor_rollout_ref.model.path={model}", *LOSS, *LORA, *more]).config


def actor(where: RankInfo, model: Path | str, *more: str) -> ActorWorker:
    worker = actor_of(where, config(model, *more))
    worker.start_engine()
    return worker


def sequences() -> Sequences:
    batch = experience()
    return Sequences.from_ragged(batch.prompt_ids, batch.response_ids)


@pytest.mark.parametrize("kind", [{}, {"use_rslora": True}, {"use_dora": True}])
def test_log_probs_and_gradients_are_those_of_peft(model: Path, kind: dict[str, Any]) -> None:
    more = [f"actor_rollout_ref.model.{name}=true" for name in kind]
    spec = config(model, *more).actor_rollout_ref.model
    injected = load_model(spec, "policy", torch.float32, 0)
    base = PolicyModel(load_model(spec, "policy", torch.float32, 0), 1.0)
    add_adapters(injected, spec, seed=0)
    reference = peft.get_peft_model(
        AutoModelForCausalLM.from_pretrained(model),
        peft.LoraConfig(
            r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM", **kind
        ),
    )
    torch.manual_seed(1)
    for name, parameter in injected.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, std=0.3, mean=float("magnitude" in name))
            reference.get_parameter(f"base_model.model.{name}").data.copy_(parameter)
    assert (
        sum("lora_" in name for name, _ in injected.named_parameters())
        == sum("lora_" in name for name, _ in reference.named_parameters())
        > 0
    )

    batch, packed = experience(), sequences()
    log_probs = PolicyModel(injected, 1.0)(packed, with_entropy=False).log_probs
    expected = []
    for prompt, response in zip(batch.prompt_ids.rows(), batch.response_ids.rows(), strict=True):
        logits = reference(torch.cat([prompt, response])[None]).logits[0].float()
        expected.append(
            logits.log_softmax(-1)[len(prompt) - 1 : -1].gather(1, response[:, None])[:, 0]
        )
    torch.testing.assert_close(log_probs, torch.cat(expected), rtol=1e-4, atol=1e-5)
    log_probs.sum().backward()
    torch.cat(expected).sum().backward()
    for name, parameter in injected.named_parameters():
        assert parameter.requires_grad == ("lora_" in name)
        if parameter.requires_grad:
            torch.testing.assert_close(
                parameter.grad,
                reference.get_parameter(f"base_model.model.{name}").grad,
                rtol=1e-3,
                atol=1e-4,
            )

    with torch.no_grad():
        with without_adapters(injected):
            assert torch.equal(
                PolicyModel(injected, 1.0)(packed, with_entropy=False).log_probs,
                base(packed, with_entropy=False).log_probs,
            )
        plain = load_model(spec, "policy", torch.float32, 0)
        assert dict(plain.named_parameters()).keys() == dict(merged_parameters(injected)).keys()
        plain.load_state_dict(dict(merged_parameters(injected)), strict=False)
        torch.testing.assert_close(
            PolicyModel(plain, 1.0)(packed, with_entropy=False).log_probs,
            log_probs,
            rtol=1e-4,
            atol=1e-4,
        )


@pytest.mark.parametrize("kind", ["qwen3_moe", "gpt_oss", "deepseek_v3", "qwen3_5_moe_text"])
def test_experts_are_refused_and_the_other_layers_are_exact(kind: str, tmp_path: Path) -> None:
    """The error names targets that train, and merge as peft adds them."""
    hf, plain = miniature(kind, tmp_path), miniature(kind, tmp_path)
    for targets in ("all-linear", "[gate_up_proj]", "[q_proj,down_proj]"):
        spec = config(tmp_path, f"actor_rollout_ref.model.target_modules={targets}")
        with pytest.raises(ConfigError, match=f"experts of models of type {kind}") as raised:
            add_adapters(hf, spec.actor_rollout_ref.model, seed=0)
    [problem] = raised.value.problems
    spec = config(tmp_path, f"actor_rollout_ref.model.{problem.hint}")
    add_adapters(hf, spec.actor_rollout_ref.model, seed=0)
    torch.manual_seed(1)
    for name, parameter in hf.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    assert any("lora_" in name for name, _ in hf.named_parameters())
    packed = sequences()
    with torch.no_grad():
        before, after = (PolicyModel(each, 1.0)(packed).log_probs for each in (plain, hf))
        plain.load_state_dict(dict(merged_parameters(hf)), strict=False)
        merged = PolicyModel(plain, 1.0)(packed).log_probs
    assert (before - after).abs().max() > 1e-3
    torch.testing.assert_close(merged, after, rtol=0, atol=1e-5)


def test_unknown_or_nonlinear_target_modules_are_an_error(model: Path) -> None:
    spec = config(model, "actor_rollout_ref.model.target_modules=[q_prj]").actor_rollout_ref.model
    with pytest.raises(ConfigError, match="q_prj"):
        add_adapters(load_model(spec, "policy", torch.float32, 0), spec, 0)
    spec = config(
        model, "actor_rollout_ref.model.target_modules=[embed_tokens]"
    ).actor_rollout_ref.model
    with pytest.raises(ConfigError, match="linear layers"):
        add_adapters(load_model(spec, "policy", torch.float32, 0), spec, 0)


@pytest.mark.parametrize("sync", list(AdapterSync))
def test_changing_and_frozen_weights_are_all(model: Path, sync: AdapterSync) -> None:
    """The frozen parameters do not change in training; without adapters there are none."""
    spec = config(model, "actor_rollout_ref.model.target_modules=[q_proj,up_proj]")
    hf = load_model(spec.actor_rollout_ref.model, "policy", torch.float32, 0)
    full = EngineWeights(hf, sync)
    assert not [*full.parameters(Selection.FROZEN)]
    names = {name for name, _ in full.parameters(Selection.ALL)}
    assert names == dict(hf.named_parameters()).keys()
    add_adapters(hf, spec.actor_rollout_ref.model, 0)
    weights = EngineWeights(hf, sync)
    before = {name: value.clone() for name, value in weights.parameters(Selection.ALL)}
    for name, parameter in hf.named_parameters():
        if "lora_B" in name:
            torch.nn.init.ones_(parameter)
    after = dict(weights.parameters(Selection.ALL))
    changing = {name for name, _ in weights.parameters(Selection.CHANGING)}
    frozen = {name for name, _ in weights.parameters(Selection.FROZEN)}
    assert changing | frozen == before.keys() == after.keys()
    assert not changing & frozen
    changed = {name for name in after if not torch.equal(after[name], before[name])}
    assert changed
    assert changed <= changing
    whole = sync is AdapterSync.WHOLE
    assert ("model.embed_tokens.weight" in frozen) is not whole
    adapters = {name for name in after if "lora_" in name}
    assert len(adapters) == (2 * 2 * 2 if sync is AdapterSync.ADAPTERS else 0)
    assert adapters == changing or not adapters
    if not weights.merges:
        rows = [*weights.rows(Selection.ALL, 0)]
        assert [name for name, *_ in rows] == [*after]
