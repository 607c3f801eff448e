"""A miniature of Qwen3.5 learns the quickstart's task by GRPO, with `hf` and with vLLM.

As the quickstart's model, it is first trained on solutions that often omit the last equation.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from transformers import CONFIG_MAPPING

from rlctl.quickstart import NAME, real_path
from tests.e2e.command import metrics, rlctl
from tools.make_model import SFT

pytestmark = pytest.mark.soak
SIZES = {
    **{"vocab_size": 512, "hidden_size": 96, "intermediate_size": 256, "num_hidden_layers": 4},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 24},
    **{"linear_key_head_dim": 24, "linear_value_head_dim": 24},
    **{"linear_num_key_heads": 2, "linear_num_value_heads": 2},
    **{"max_position_embeddings": 1024, "tie_word_embeddings": True, "initializer_range": 0.05},
    **{"eos_token_id": 1, "pad_token_id": 0, "bos_token_id": None},
}
# Settings of the two parts of supervised training, which together take some minutes.
FIRST = {"actor_rollout_ref.model.init": "random"}
SECOND = {"trainer.seed": 5, "actor_rollout_ref.actor.optim.lr": 2e-3}


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a model, `model`, and of problems with one or two steps."""
    root = tmp_path_factory.mktemp("hybrid")
    shutil.copytree(real_path(NAME), root / "blank", ignore=lambda *_: ["model.safetensors"])
    CONFIG_MAPPING["qwen3_5_text"](**SIZES).save_pretrained(root / "blank")
    sizes = ("--train", 30_000, "--val", 256, "--level", 1, "--careless", 0.7)
    rlctl("prep", "arithmetic", "--out", root, "--seed", 2, *sizes, cwd=root)
    start = pretrain(root, "first", 400, FIRST | {"actor_rollout_ref.model.path": root / "blank"})
    model = pretrain(root, "second", 450, SECOND | {"actor_rollout_ref.model.path": start})
    return model.rename(root / "model").parent


def pretrain(root: Path, name: str, num_steps: int, changes: dict[str, object]) -> Path:
    """Train on solutions, and return the folder of the model."""
    steps = ("trainer.total_training_steps", "trainer.test_freq", "trainer.save_freq")
    batches = ("data.train_batch_size", "actor_rollout_ref.actor.ppo_mini_batch_size")
    settings = SFT | dict.fromkeys(steps, num_steps) | dict.fromkeys(batches, 32) | changes
    overrides = [f"{key}={value}" for key, value in settings.items()]
    options = ("--recipe", "sft", "--inline", "--name", name)
    rlctl("train", "sft", *options, *overrides, *files(root), cwd=root)
    return root / f"runs/quickstart/{name}/checkpoints/step_{num_steps:06d}/huggingface"


def files(root: Path) -> list[str]:
    return [f"data.{part}_files={root / part}.parquet" for part in ("train", "val")]


@pytest.mark.parametrize("engine", ["hf", pytest.param("vllm", marks=pytest.mark.extra("vllm"))])
def test_a_miniature_of_qwen3_5_learns_the_quickstart(engine: str, pretrained: Path) -> None:
    rlctl(
        *("train", "grpo", "--recipe", "grpo", "--inline", "--name", engine, *files(pretrained)),
        *(f"actor_rollout_ref.model.path={pretrained / 'model'}", "trainer.num_threads=1"),
        *(f"actor_rollout_ref.rollout.name={engine}", "trainer.total_training_steps=40"),
        *("trainer.test_freq=20", "trainer.save_freq=-1"),
        cwd=pretrained,
    )
    steps = metrics(pretrained / "runs" / "quickstart" / engine)
    accuracy = [step[name] for step in steps for name in step if name.startswith("val-core/")]
    assert accuracy[-1] > accuracy[0] + 0.1
    assert max(step.get("training/rollout_probs_diff_max", 0.0) for step in steps) <= 1e-3
