"""A model whose code is in its folder trains if `trust_remote_code` allows it."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from rlctl.__main__ import main
from rlctl.runtime.rollout.hf import HFEngine
from tests import own_code
from tests.e2e.command import metrics
from tests.generation import engine_spec, prompts, references, sampling
from tests.models import tiny_tokenizer
from tests.tolerance import assert_as_exact

TRUST = "actor_rollout_ref.model.trust_remote_code"
FILES = ("configuration_own.py", "modeling_own.py")


@pytest.fixture
def own_model(tmp_path: Path) -> Path:
    """Return a folder with a model of a type that transformers does not have."""
    folder, tokenizer = tmp_path / "own", tiny_tokenizer()
    tokenizer.save_pretrained(folder)
    for name in FILES:
        shutil.copy(Path(own_code.__path__[0]) / name, folder)
    classes = {
        "AutoConfig": "configuration_own.OwnConfig",
        "AutoModelForCausalLM": "modeling_own.OwnForCausalLM",
    }
    fields = {"model_type": "own_lm", "vocab_size": len(tokenizer), "eos_token_id": 2}
    (folder / "config.json").write_text(json.dumps(fields | {"auto_map": classes}))
    return folder


def test_code_of_the_folder_runs_only_if_it_is_trusted(
    own_model: Path,
    settings: list[str],
    here: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (here / "length.py").write_text(
        "def score(data_source, solution_str, ground_truth, extra_info):\n"
        "    return float(len(set(solution_str)))\n"
    )
    command = [
        *("train", "grpo", "--inline", "--name", "own", *settings),
        *(f"actor_rollout_ref.model.path={own_model}", "actor_rollout_ref.model.init=random"),
        *("actor_rollout_ref.rollout.name=hf", "actor_rollout_ref.rollout.n=4"),
        f"reward.custom_reward_function.path={here}/length.py",
        *("reward.custom_reward_function.name=score", "trainer.save_freq=2"),
    ]
    assert main(command) == 3
    said = capsys.readouterr().err
    assert f"error: the model '{own_model}' needs Python code of its own" in said
    assert f"at: {TRUST}" in said
    assert not [name for name in sys.modules if name.endswith("configuration_own")]
    assert not (here / "runs").exists()

    assert main([*command, f"{TRUST}=true"]) == 0
    run = here / "runs/quickstart/own"
    steps = metrics(run)
    assert all(step["training/rollout_probs_diff_max"] <= 1e-4 for step in steps[-2:])
    assert all(step["actor/grad_norm"] > 0 for step in steps[-2:])
    assert main(["export", "own", "exported"]) == 0
    trained = AutoModelForCausalLM.from_pretrained(here / "exported", trust_remote_code=True)
    assert type(trained).__name__ == "OwnForCausalLM"
    assert {path.name for path in (here / "exported").glob("*.py")} == set(FILES)
    assert trained(torch.tensor([[3, 4]])).logits.isfinite().all()


def test_an_engine_with_its_own_copy_decodes_as_the_model(own_model: Path) -> None:
    """Only a probe finds that packed rows change the model."""
    words = (f"{TRUST}=true", "actor_rollout_ref.model.init=random")
    engine = HFEngine.from_spec(engine_spec(own_model, *words), None)
    prompt_ids = prompts(5, 9, 5)
    found = engine.generate(prompt_ids, sampling(n=2, max_tokens=6))
    assert_as_exact(found.log_probs.values, *references(engine.model, prompt_ids, found))
