"""LoRA: results equal peft's; only adapters train and are saved; engines get what they lack.

With QLoRA the base is in 4 bits, and engine and export have the weights that it stands for.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from transformers import AutoModelForCausalLM

from rlctl.errors import ConfigError
from rlctl.recipes.compose import compose
from rlctl.runtime.algorithms.base import Needs
from rlctl.runtime.base.batch import Prompts, Ragged
from rlctl.runtime.base.rank_info import RankInfo
from rlctl.runtime.model.adapter_names import merged_parameters, without_adapters
from rlctl.runtime.model.causal_lm import PolicyModel
from rlctl.runtime.model.load import load_model
from rlctl.runtime.model.lora import add_adapters
from rlctl.runtime.model.sequences import Sequences
from rlctl.runtime.planning.devices import Devices
from rlctl.runtime.planning.role_models import check_adapters
from rlctl.runtime.rollout.engine_weights import AdapterSync, EngineWeights, Selection
from rlctl.runtime.workers.actor import ActorWorker
from rlctl.runtime.workers.background import await_written, begin_writing
from tests.distributed.ranks import rank_info
from tests.miniatures import miniature
from tests.models import write_tiny_model
from tests.tolerance import assert_all_as_exact, assert_as_exact, in_float64
from tests.workers import LOSS, actor_of, experience, update

LORA = ["actor_rollout_ref.model.lora_rank=4", "actor_rollout_ref.model.lora_alpha=8"]


def config(model: Path | str, *more: str) -> Any:
    return compose("ppo", [f"actor_rollout_ref.model.path={model}", *LOSS, *LORA, *more]).config


def actor(where: RankInfo, model: Path | str, *more: str) -> ActorWorker:
    worker = actor_of(where, config(model, *more))
    worker.start_engine()
    return worker


def log_probs_of(hf: Any) -> torch.Tensor:
    return PolicyModel(hf, 1.0)(sequences()).log_probs


def sequences() -> Sequences:
    batch = experience()
    return Sequences.from_ragged(batch.prompt_ids, batch.response_ids)


def row_by_row(hf: Any) -> torch.Tensor:
    """Return the log-probs (T,) that a model computes for each row alone."""
    batch, found = experience(), list[torch.Tensor]()
    for prompt, response in zip(batch.prompt_ids.rows(), batch.response_ids.rows(), strict=True):
        logits = hf(torch.cat([prompt, response])[None]).logits[0]
        log_probs = logits.log_softmax(-1)[len(prompt) - 1 : -1]
        found.append(log_probs.gather(1, response[:, None])[:, 0])
    return torch.cat(found)


def gradients_of(hf: Any) -> dict[str, torch.Tensor]:
    """Return the gradients of the trained parameters."""
    return {name: each.grad for name, each in hf.named_parameters() if each.requires_grad}


@pytest.mark.parametrize("kind", [{}, {"use_rslora": True}, {"use_dora": True}])
def test_log_probs_and_gradients_are_those_of_peft(model: Path, kind: dict[str, Any]) -> None:
    more = [f"actor_rollout_ref.model.{name}=true" for name in kind]
    spec = config(model, *more).actor_rollout_ref.model
    injected = load_model(spec, "policy", torch.float32, 0)
    base = load_model(spec, "policy", torch.float32, 0)
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
    names = ([name for name, _ in each.named_parameters()] for each in (injected, reference))
    mine, theirs = (sum("lora_" in name for name in each) for each in names)
    assert mine == theirs > 0

    log_probs, exact_reference = log_probs_of(injected), in_float64(reference)
    expected, exact = row_by_row(reference), row_by_row(exact_reference)
    assert_as_exact(log_probs, expected, exact)
    for each in (log_probs, expected, exact):
        each.sum().backward()
    for name, parameter in injected.named_parameters():
        assert parameter.requires_grad == ("lora_" in name)
    found = {f"base_model.model.{name}": grad for name, grad in gradients_of(injected).items()}
    assert_all_as_exact(found, gradients_of(reference), gradients_of(exact_reference))

    with torch.no_grad():
        with without_adapters(injected):
            assert torch.equal(log_probs_of(injected), log_probs_of(base))
        plain = load_model(spec, "policy", torch.float32, 0)
        assert dict(plain.named_parameters()).keys() == dict(merged_parameters(injected)).keys()
        plain.load_state_dict(dict(merged_parameters(injected)), strict=False)
        assert_as_exact(log_probs_of(plain), log_probs, exact)


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
    with torch.no_grad():
        before, after = log_probs_of(plain), log_probs_of(hf)
        exact = log_probs_of(in_float64(hf))
        plain.load_state_dict(dict(merged_parameters(hf)), strict=False)
        merged = log_probs_of(plain)
    assert (before - after).abs().max() > 1e-3
    assert_as_exact(merged, after, exact)


def test_unknown_or_nonlinear_target_modules_are_an_error(model: Path) -> None:
    for target, message in (("q_prj", "q_prj"), ("embed_tokens", "linear layers")):
        targets = f"actor_rollout_ref.model.target_modules=[{target}]"
        spec = config(model, targets).actor_rollout_ref.model
        with pytest.raises(ConfigError, match=message):
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


FOUR_BIT = "actor_rollout_ref.model.load_in_4bit=true"


@pytest.mark.extra("qlora")
def test_adapters_train_on_a_base_in_4_bits(tmp_path: Path) -> None:
    """Update, sync the engine, save, resume and export."""
    model = write_tiny_model(tmp_path / "model", hidden_size=64, head_dim=16)
    worker = actor(rank_info(), model, FOUR_BIT)
    stored = {str(each.dtype) for each in worker.policy.parameters()}
    assert stored == {"torch.uint8", "torch.float32"}
    batch = experience()
    untrained = worker.compute_log_probs(batch).log_probs.values
    plain = actor(rank_info(), model).compute_log_probs(batch).log_probs.values
    assert (untrained - plain).abs().max() > 1e-3  # 4 bits are not 32
    update(worker, lr=1e-2)
    folder = tmp_path / "state"
    folder.mkdir()
    begin_writing(folder)
    worker.save(folder / "actor", folder / "huggingface")
    update(worker, lr=1e-2)
    await_written([folder / "actor"], timeout_s=60)
    again = actor(rank_info(), model, FOUR_BIT)
    again.load(folder / "actor")
    exported = AutoModelForCausalLM.from_pretrained(folder / "huggingface")
    saved = dict(exported.named_parameters())
    assert not hasattr(exported.config, "quantization_config")
    for name, value in again.engine_weights.parameters(Selection.ALL):
        assert torch.equal(saved[name], value)
    update(again, lr=1e-2)
    trained = worker.compute_log_probs(batch).log_probs.values
    assert torch.equal(again.compute_log_probs(batch).log_probs.values, trained)
    assert (trained - untrained).abs().max() > 1e-2
    assert torch.equal(worker.compute_log_probs(batch, "base").log_probs.values, untrained)
    worker.update_weights()
    prompts = Ragged(torch.tensor([5, 6, 7, 8, 9]), torch.tensor([2, 3]))
    rollouts = worker.generate_sequences(Prompts(prompts, torch.arange(2), [None, None]), seed=3)  # type: ignore[list-item]
    found = worker.compute_log_probs(rollouts).log_probs.values
    assert (rollouts.rollout_log_probs.values - found).abs().max() < 1e-4


@pytest.mark.extra("qlora")
def test_a_base_in_4_bits_that_cannot_run_is_refused_before_the_start(tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "model")
    one, two = (Devices("cpu", 1, number) for number in (1, 2))
    check_adapters(config(model, FOUR_BIT), one, Needs.NOTHING)
    with pytest.raises(ConfigError, match="is not sharded, and there are 2 ranks"):
        check_adapters(config(model, FOUR_BIT), two, Needs.NOTHING)
    with pytest.raises(ConfigError, match="needs weights to quantize"):
        check_adapters(
            config(model, FOUR_BIT, "actor_rollout_ref.model.init=random"), one, Needs.NOTHING
        )
    critic = ["critic.model.lora_rank=4", "critic.model.load_in_4bit=true"]
    with pytest.raises(ConfigError, match="is for policies"):
        check_adapters(config(model, *critic), one, Needs.CRITIC)
    whole = compose("ppo", [FOUR_BIT]).config.actor_rollout_ref.model
    assert not whole.is_4bit  # without adapters
