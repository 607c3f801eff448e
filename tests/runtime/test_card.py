"""Model cards: contents, and texts that try to be markup."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import markdown
import pytest
import yaml

from rlctl.recipes.roles import ACTOR
from rlctl.runs.labels import Labels
from rlctl.runs.run import Run, read_run
from rlctl.runs.run_dir import RunDir
from rlctl.runtime.checkpoint.card import MAX_POINTS, model_card

METRIC = "val-core/openai/gsm8k/acc/mean@1"
HOSTILE = "<img src=x onerror=alert(1)> | [x](javascript:alert(1)) `a` **b** _c_ &lt; ``` $$d$$"
SECRET = "sk-" + "a1" * 20


def run_in(folder: Path, name: str, settings: dict[str, Any], rows: list[dict[str, float]]) -> Run:
    made = RunDir.create(folder, "p", name, "grpo")
    made.write_config("algorithm: {name: ppo, adv_estimator: grpo}\n", {})
    origins = {
        key: [
            {"level": 1, "value": None, "where": "base"},
            {"level": 2, "value": value, "where": "x"},
        ]
        for key, value in settings.items()
    }
    (made.path / "origins.json").write_text(json.dumps(origins))
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    (made.path / "metrics.jsonl").write_text(lines)
    return read_run(made.path)


def split(card: str) -> tuple[dict[str, Any], str]:
    """Return the metadata and the text of a card."""
    _, front, text = card.split("---\n", 2)
    return yaml.safe_load(front), text


def test_a_card_has_metadata_results_and_a_curve(tmp_path: Path) -> None:
    rows = [{"step": step, METRIC: step / 100, "critic/score/mean": 0.5} for step in range(41)]
    settings = {"actor_rollout_ref.model.path": "Qwen/Qwen2.5-0.5B", "trainer.seed": 3}
    run = run_in(tmp_path, "r", settings, rows)
    front, text = split(model_card(run, 30, ACTOR, "merged"))
    assert front["base_model"] == "Qwen/Qwen2.5-0.5B"
    assert front["library_name"] == "transformers"
    (entry,) = front["model-index"]
    (result,) = entry["results"]
    assert result["dataset"]["name"] == "openai/gsm8k"
    assert result["metrics"] == [{"type": "accuracy", "name": METRIC, "value": 0.3}]
    assert "| this model (validated at step 30) | 30.0 % |" in text
    assert "| best of the run (step 40) | 40.0 % |" in text
    assert "| algorithm | ppo |\n| advantages | grpo |" in text
    assert "| trainer.seed | 3 |" in text
    curve = text.partition("## Curve\n\n")[2].partition("\n\n")[0].splitlines()
    assert len(curve) == 2 + MAX_POINTS
    assert curve[2].startswith("| 0 | 0.0 % | 0.5 |")
    assert curve[-1].startswith("| 30 |")
    front, _ = split(model_card(run, 30, ACTOR, "adapter"))
    assert front["library_name"] == "peft"


def test_a_run_without_validation_has_no_index(tmp_path: Path) -> None:
    front, text = split(model_card(run_in(tmp_path, "r", {}, []), 1, ACTOR, "merged"))
    assert "model-index" not in front
    assert "base_model" not in front
    assert "The run was not validated." in text
    assert "## Curve" not in text


@pytest.mark.parametrize("hostile", [HOSTILE, "a: b\n---\n# c", "x\x1b[2J\u202ey"])
def test_texts_of_a_run_are_shown_and_never_rendered(tmp_path: Path, hostile: str) -> None:
    metric = f"val-core/{hostile.replace(chr(10), ' ')}/acc/mean@1"
    settings = {
        "trainer.api_key": SECRET,
        hostile: hostile,
        "actor_rollout_ref.model.path": hostile,
    }
    name = hostile.replace("/", "_").replace("\n", " ") if hostile.isprintable() else "r"
    run = run_in(tmp_path, name, settings, [{"step": 1, metric: 0.5}, {"step": 2, metric: 0.25}])
    assert run.record is not None
    record = replace(
        run.record, recipe=hostile, data={hostile: hostile}, command=["rlctl", hostile, SECRET]
    )
    run = replace(run, record=record, labels=Labels((hostile,), f"{hostile} {SECRET}"))
    card = model_card(run, 2, ACTOR, "merged")
    assert SECRET not in card
    assert not re.search("[\x00-\x09\x0b-\x1f\u202e]", card)
    front, text = split(card)
    assert front["model-index"][0]["results"][0]["metrics"][0]["value"] == 0.25
    assert "base_model" not in front
    html = markdown.markdown(text, extensions=["tables", "fenced_code"])
    outside = re.sub(r"<pre>.*?</pre>", "", html, flags=re.DOTALL)
    tags = set(re.findall(r"<(\w+)", html))
    assert tags == {"h1", "h2", "p", "table", "thead", "tbody", "tr", "th", "td", "pre", "code"}
    assert outside.count("<code>") == 1  # `license:` in the last section
    for line in text.splitlines():
        if line.startswith("| "):
            assert line.count("|") in (3, 4)
