"""Arguments of the Python API as overrides: mappings, names, loggers."""

from __future__ import annotations

import numpy as np
import pytest

import rlctl
from rlctl.recipes.compose import compose
from rlctl.recipes.python_values import override_texts

WORDS = ["", "null", "True", "1e-3", "a b", 'say "x"', "back\\", "[1]", "{a: b}", "a,b", "é=ü", "~"]


def test_a_mapping_is_composed_as_texts_are() -> None:
    texts = [
        "trainer.total_training_steps=3",
        "actor_rollout_ref.actor.optim.lr=2e-06",
        "trainer.val_before_train=false",
        "data.val_files=null",
        "data.train_files=[quickstart]",
        "reward.params={gsm8k: {method: flexible}}",
    ]
    values = {
        "trainer": {"total_training_steps": 3, "val_before_train": False},
        "actor_rollout_ref.actor": {"optim": {"lr": np.float64(2e-6)}},
        "data.val_files": None,
        "data.train_files": ("quickstart",),
        "reward.params": {"gsm8k": {"method": "flexible"}},
    }
    assert rlctl.compose("ppo", values).container == compose("ppo", texts).container


@pytest.mark.parametrize("word", WORDS)
def test_any_text_arrives_unchanged(word: str) -> None:
    described = rlctl.compose("ppo", {"trainer.tracking.description": f"x{word}"})
    assert described.config.trainer.tracking.description == f"x{word}"
    tags = rlctl.compose("ppo", {"trainer.tracking.tags": ["a", f"x{word}"]})
    assert list(tags.config.trainer.tracking.tags) == ["a", f"x{word}"]


def test_name_and_loggers_are_overrides() -> None:
    texts = override_texts(["trainer.seed=2"], name="it's 1", logger=["wandb", "my_module:Mine"])
    trainer = rlctl.compose("ppo", texts).config.trainer
    assert (trainer.seed, trainer.experiment_name) == (2, "it's 1")
    assert list(trainer.logger) == ["console", "wandb", "my_module:Mine"]


def test_a_value_without_text_is_refused() -> None:
    with pytest.raises(rlctl.UsageError, match="a value of type object is no setting"):
        rlctl.compose("ppo", {"trainer.seed": object()})


def test_arguments_of_a_composed_recipe_are_refused() -> None:
    composed = rlctl.compose("ppo")
    with pytest.raises(rlctl.UsageError, match="a composed recipe takes no overrides"):
        rlctl.train(composed, name="other")
