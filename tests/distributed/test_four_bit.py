"""QLoRA: adapters on a base in 4 bits; engine and export have the weights that it stands for."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from rlctl.errors import ConfigError
from rlctl.recipes.compose import compose
from rlctl.runtime.algorithms.base import Needs
from rlctl.runtime.batch import Prompts, Ragged
from rlctl.runtime.model.engine_weights import Selection
from rlctl.runtime.model.four_bit import is_4bit
from rlctl.runtime.planning.devices import Devices
from rlctl.runtime.planning.role_models import check_adapters
from rlctl.runtime.workers.background import await_written, begin_writing
from tests.distributed.ranks import rank_info
from tests.distributed.test_lora import actor, config
from tests.models import write_tiny_model
from tests.workers import experience, update

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
    assert not is_4bit(whole)  # without adapters
