"""Folders of exports: what they may replace, and model cards, with texts that try to be markup."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import markdown
import pytest
import yaml

from rlctl.errors import ConfigError, ConflictError, NotFoundError, ResourceError
from rlctl.recipes.roles import ACTOR
from rlctl.runs.labels import Labels
from rlctl.runs.run import Run, read_run
from rlctl.runs.run_dir import RunDir
from rlctl.runtime.checkpoint.card import MAX_POINTS, model_card
from rlctl.runtime.checkpoint.export import MARKER, export
from rlctl.runtime.checkpoint.store import CheckpointStore
from tests.recorded import exportable
from tests.small_disk import small_disk

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


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return read_run(exportable(tmp_path / "runs").path)


def test_force_replaces_an_export(run: Run, tmp_path: Path) -> None:
    target = tmp_path / "model"
    target.mkdir()
    export(run, None, target)  # an empty folder is accepted
    with pytest.raises(ConflictError, match="already exists"):
        export(run, None, target)
    (target / "config.json").unlink()
    export(run, None, target, force=True)
    assert json.loads((target / MARKER).read_text())["run"] == "p/r"
    assert (target / "config.json").exists()


def test_force_keeps_a_folder_with_anything_else(run: Run, tmp_path: Path) -> None:
    thesis = tmp_path / "thesis"
    thesis.mkdir()
    (thesis / "chapter1.tex").write_text("years of work")
    with pytest.raises(ConflictError, match=f"is not an export: it has no {MARKER}") as caught:
        export(run, None, thesis, force=True)
    assert caught.value.exit_code == 5
    model = tmp_path / "model"
    export(run, None, model)
    (model / "notes").mkdir()
    (model / "notes" / "mine.txt").write_text("mine")
    with pytest.raises(ConflictError, match=r"it also has notes/mine\.txt"):
        export(run, None, model, force=True)
    file = tmp_path / "file"
    file.write_text("x")
    with pytest.raises(ConflictError, match="is a file"):
        export(run, None, file, force=True)
    assert (thesis / "chapter1.tex").exists()
    assert (model / "notes" / "mine.txt").exists()


def test_a_full_disk_is_one_line(run: Run, tmp_path: Path) -> None:
    policy = CheckpointStore(run.path / "checkpoints").policy(None)
    (policy / "model.safetensors").write_bytes(b"x" * 100_000)
    with small_disk(tmp_path / "disk", "size=64k") as disk:
        with pytest.raises(ResourceError) as caught:
            export(run, None, disk / "model")
        assert not list(disk.iterdir())
    assert [str(each) for each in caught.value.problems] == [
        f"cannot write {tmp_path}/disk/model/model.safetensors: No space left on device"
    ]


def test_the_current_folder_is_refused(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here" / "below").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "here" / "below")
    with pytest.raises(ConflictError, match="is the current folder"):
        export(run, None, Path(), force=True)
    with pytest.raises(ConflictError, match="is not an export"):
        export(run, None, Path(".."), force=True)


def test_a_missing_or_damaged_checkpoint_leaves_no_folder(run: Run, tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="of step 99"):
        export(run, 99, tmp_path / "never")
    policy = CheckpointStore(run.path / "checkpoints").policy(None)
    (policy / "config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"config\.json has"):
        export(run, None, tmp_path / "never")
    assert [path.name for path in tmp_path.iterdir()] == ["runs"]
