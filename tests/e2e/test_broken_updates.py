"""Updates that are skipped: what the run keeps of them, and their replay."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

from rlctl.runtime.workers.broken_update import fingerprint
from tests.e2e import command
from tests.e2e.command import rlctl
from tests.e2e.killed_runs import events
from tests.plugin_folders import is_there
from tests.settings import given

HUGE = (
    "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
    "    return 3e38 * (-1) ** len(solution_str)\n"
)


def replayed(name: object, folder: Path) -> dict[str, Any]:
    return json.loads(rlctl("debug", name, "--replay", "--json", cwd=folder).stdout)


def test_a_learning_rate_that_breaks_the_weights(settings: list[str], tmp_path: Path) -> None:
    """The second update of step 1 is the first to see the weights of the first update."""
    words = [*settings, *given(n=2, steps=3, lr=1e30, val=None), "trainer.mismatch.halt=null"]
    run = command.train("grpo", "broken", "--inline", *words, cwd=tmp_path)
    skipped = events(run, "skipped_update")
    bundles = sorted((run / "broken_updates").iterdir())
    assert [event["step"] for event in skipped] == [1, 2, 3]
    assert len(bundles) == 3  # of five updates
    assert skipped[0]["bundles"] == ["broken_updates/step_000001-actor-0"]
    assert bundles[0].name == "step_000001-actor-0"
    kinds = {path.suffix for path in (run / "broken_updates").rglob("*") if path.is_file()}
    assert kinds == {".json", ".safetensors"}  # nothing to unpickle
    assert not list(run.rglob("*.pt"))
    shown = json.loads(rlctl("show", "broken", "--json", cwd=tmp_path).stdout)
    assert shown["broken_updates"] == [f"broken_updates/{path.name}" for path in bundles]
    assert "rlctl debug broken --replay" in rlctl("show", "broken", cwd=tmp_path).stdout

    if is_there("console"):
        check_replay(run, bundles)


def check_replay(run: Path, bundles: list[Path]) -> None:
    """Check that the replay of the first bundle finds what the run has recorded."""
    folder = run.parents[2]
    found = replayed("broken", folder)
    recorded, replay = found["recorded"], found["replay"]
    assert (recorded["step"], recorded["role"], recorded["updates_before"]) == (1, "actor", 1)
    assert (replay["weights"], replay["fits"]) == ("the bundle", True)
    assert replay["found"]["first"] == recorded["first"]
    assert replay["found"]["layers"] == recorded["layers"]
    assert recorded["first"]["not_finite"] > 0
    text = rlctl("debug", bundles[0], "--replay", cwd=folder).stdout
    assert f"in the run:    first not finite: {recorded['first']['where']}" in text

    config = yaml.safe_load((run / "config.yaml").read_text())  # as of a run on a mesh
    config["actor_rollout_ref"]["actor"]["fsdp_config"]["tensor_model_parallel_size"] = 2
    (run / "config.yaml").write_text(yaml.safe_dump(config, sort_keys=False))
    assert replayed("broken", folder)["replay"] == replay


@pytest.mark.plugin("console")
def test_log_probs_that_break_before_the_update(settings: list[str], tmp_path: Path) -> None:
    words = [*settings, *given(n=2, steps=3, lr=1e30, val=None)]
    command.train("grpo", "before", "--inline", *words, cwd=tmp_path, code=1)
    bundles = sorted((tmp_path / "runs/quickstart/before/broken_updates").iterdir())
    assert any("lr" not in json.loads((each / "facts.json").read_text()) for each in bundles)
    for bundle in bundles:
        found = replayed(bundle, tmp_path)
        assert found["replay"]["found"]["first"] == found["recorded"]["first"]


@pytest.mark.plugin("console")
def test_a_reward_that_is_too_large(settings: list[str], tmp_path: Path) -> None:
    """Without weights in the bundle, those of the checkpoint or the model with the digest serve."""
    (tmp_path / "huge.py").write_text(HUGE)
    words = [*settings, *given(n=2, steps=1, save=1, reward="huge.py", reward_processes=1)]
    words += ["algorithm.norm_adv_by_std_in_grpo=false", *given(val=None)]
    run = command.train("grpo", "huge", "--inline", *words, cwd=tmp_path, fork=True)
    processes = {name for name in command.metrics(run)[-1] if "process_memory" in name}
    assert {name.rpartition("/")[2] for name in processes} == {"controller", "sandbox"}
    bundle = min((run / "broken_updates").iterdir())
    (bundle / "weights.safetensors").unlink()
    found = replayed("huge", tmp_path)["replay"]
    assert (found["weights"], found["fits"]) == ("the initial model", True)
    assert found["found"]["first"]["where"] in ("batch", "gradient", "gradient of weights")

    # Weights that no model and no checkpoint has.
    facts = json.loads((bundle / "facts.json").read_text())
    (bundle / "facts.json").write_text(json.dumps(facts | {"weights": "0" * 16}))
    done = rlctl("debug", "huge", "--replay", cwd=tmp_path)
    assert "weights of the initial model" in done.stdout
    assert "these are not the weights of the run at that moment" in done.stderr


@pytest.mark.plugin("console")
def test_a_bundle_that_is_missing_or_damaged(settings: list[str], tmp_path: Path) -> None:
    run = command.train("grpo", "good", "--inline", *settings, *given(steps=1, n=2), cwd=tmp_path)
    error = rlctl("debug", "good", "--replay", cwd=tmp_path, code=4).stderr
    assert "this run has no broken update" in error
    bundle = run / "broken_updates" / "step_000001-actor-0"
    bundle.mkdir(parents=True)
    (bundle / "facts.json").write_text("{")
    assert "facts.json" in rlctl("debug", "good", "--replay", cwd=tmp_path, code=3).stderr
    shutil.rmtree(bundle)


def test_the_fingerprint_tells_weights_apart(tmp_path: Path) -> None:
    weights = {"a": torch.randn(5, 7), "b": torch.randn(3).bfloat16()}
    save_file(weights, tmp_path / "weights.safetensors")
    same = load_file(tmp_path / "weights.safetensors")
    assert fingerprint(same.items()) == fingerprint(weights.items())
    same["a"][4, 6] = torch.nextafter(same["a"][4, 6], torch.tensor(9.0))
    assert fingerprint(same.items()) != fingerprint(weights.items())
