"""First words of a command, Ctrl-C while it starts, and the commands proposed at its end."""

from __future__ import annotations

import json
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from rlctl.cli.commands.train import check_algorithm
from rlctl.cli.startup import print_end
from rlctl.recipes.compose import compose
from rlctl.runs.run_dir import RunDir
from rlctl.runtime.training.checkpoint_store import ControllerState
from rlctl.runtime.workers.background import PARTS
from tests.e2e.command import environment
from tests.processes import run_python
from tests.recorded import called

INTERRUPTED = "interrupted before the start: nothing was written"


def interrupted_by(module: str, folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a command in an empty folder; the import of `module` presses Ctrl-C."""
    (folder / "path").mkdir()
    (folder / "path" / f"{module}.py").write_text("raise KeyboardInterrupt\n")
    (folder / "empty").mkdir()
    env = environment()
    env["PYTHONPATH"] = f"{folder / 'path'}:{Path(__file__).parents[2]}"
    done = run_python("-m", "rlctl", *arguments, cwd=folder / "empty", env=env)
    assert list((folder / "empty").iterdir()) == []
    return done


def test_first_line_comes_before_heavy_imports_and_ctrl_c_after_it_is_explained(
    tmp_path: Path,
) -> None:
    done = interrupted_by("hydra", tmp_path, "train", "ppo", "--dry-run")
    assert done.stderr.splitlines() == ["checking the configuration …", INTERRUPTED]
    assert done.returncode == 130


def test_ctrl_c_while_python_loads_prints_no_traceback(tmp_path: Path) -> None:
    done = interrupted_by("typer", tmp_path, "train", "ppo")
    assert done.stderr.splitlines() == [INTERRUPTED]
    assert done.returncode == 130


@pytest.mark.parametrize(
    ("verb", "recipe", "notices"),
    [("grpo", "ppo", True), ("grpo", "dr_grpo", False), ("ppo", "grpo", False)],
)
def test_a_recipe_with_another_estimator_than_the_command_is_noticed(
    verb: str, recipe: str, notices: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    check_algorithm(verb, recipe, compose(recipe))
    notice = "note: settings decide, not `train grpo`: algorithm.adv_estimator=gae\n"
    assert capsys.readouterr().err == (notice if notices else "")


def test_commands_that_load_a_model_say_so_first(tmp_path: Path) -> None:
    done = interrupted_by("torch", tmp_path, "eval", "quickstart")
    assert done.stderr.splitlines()[0] == "loading the model …"
    assert done.returncode == 130


@pytest.mark.parametrize("words", [["nosuch"], ["quickstart", "--recipe", "missing.yaml"]])
def test_unknown_names_are_refused_before_a_model_is_loaded(
    tmp_path: Path, words: list[str]
) -> None:
    done = interrupted_by("torch", tmp_path, "eval", *words)
    assert done.returncode == 4, "torch is not imported"


def ended(
    root: Path,
    state: str,
    capsys: pytest.CaptureFixture[str],
    *parts: str,
    contents: Sequence[str] = PARTS,
) -> list[str]:
    """Return the commands that the end of a run with the folders `parts` proposes.

    Its checkpoints have `contents`.
    """
    run = RunDir.create(root, "quickstart", "long", "ppo")
    for part in parts:
        (run.path / part).mkdir()
    for step in run.path.glob("checkpoints/*"):
        (step / "manifest.json").write_text(json.dumps({"contents": contents}))
        if "hf_model" in contents:
            (step / "huggingface").mkdir()
    print_end(run, state, 1.0)
    lines = capsys.readouterr().err.splitlines()
    first = next(i for i, line in enumerate(lines) if line.startswith("  next"))
    return [line.removeprefix("  next").strip() for line in lines[first:]]


def test_a_stopped_run_proposes_to_resume_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RLCTL_RUNS", raising=False)
    assert ended(Path("runs"), "stopped", capsys) == [
        "rlctl resume long",
        "rlctl show long",
        "rlctl report long",
    ]
    elsewhere = ended(tmp_path / "other", "stopped", capsys)
    assert elsewhere[0] == f"rlctl resume {tmp_path}/other/quickstart/long"


def test_a_finished_run_proposes_what_it_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RLCTL_RUNS", raising=False)
    parts = ("generations/step_000001.jsonl", "checkpoints/step_000001")
    assert ended(Path("runs"), "finished", capsys, *parts) == [
        "rlctl show long",
        "rlctl show long --samples",
        "rlctl report long",
        "rlctl eval long",
        "rlctl export long DIR",
    ]


def test_a_checkpoint_proposes_what_works_on_its_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RLCTL_RUNS", raising=False)
    checkpoint = ("checkpoints/step_000001",)

    def proposed(state: str, *contents: str) -> list[str]:
        found = ended(tmp_path / "runs", state, capsys, *checkpoint, contents=contents)
        shutil.rmtree(tmp_path / "runs")
        return [line for line in found if not line.startswith(("rlctl show", "rlctl report"))]

    assert proposed("finished", "model") == ["rlctl export long DIR"]
    without = "rlctl resume long trainer.checkpoint.load_contents=[model,extra]"
    assert proposed("stopped", "model", "hf_model") == [
        without,
        "rlctl eval long",
        "rlctl export long DIR",
    ]
    assert proposed("stopped", "hf_model") == ["rlctl eval long", "rlctl export long DIR"]


def test_a_stop_during_a_validation_counts_its_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RLCTL_RUNS", raising=False)
    run = RunDir.create(Path("runs"), "quickstart", "long", "ppo")
    run.metrics.write_text('{"step": 0, "val/loss": 1}\n{"step": 1, "train/loss": 2}\n')
    checkpoint = run.path / "checkpoints" / "step_000002"
    checkpoint.mkdir(parents=True)
    (checkpoint / "manifest.json").write_text("{}")
    metrics: dict[str, float | None] = {"train/loss": 1.0}
    ControllerState(2, "r", {}, 0, {}, metrics, pending=True).write(checkpoint)
    print_end(run, "stopped", 1.0)
    shown = capsys.readouterr().err
    assert "`rlctl resume long` continues with the validation of step 2\n" in shown
    assert "stopped: 2 steps in" in shown
    page = called("show", "long", cwd=tmp_path).stdout
    assert "1; step 2 is saved before its validation\n" in page
    run.metrics.write_text('{"step": 1, "train/loss": 2}\n{"step": 2, "train/loss": 1}\n')
    print_end(run, "stopped", 1.0)
    assert "stopped: 2 steps in" in capsys.readouterr().err


def test_closed_streams_are_no_defect(tmp_path: Path) -> None:
    words = f"{shlex.quote(sys.executable)} -m rlctl runs >&- 2>&-"
    done = subprocess.run(["bash", "-c", words], cwd=tmp_path, env=environment(), check=False)
    assert done.returncode == 0


@pytest.mark.parametrize("state", ["stopped", "failed"])
def test_a_run_that_ended_early_names_the_step_that_a_resume_starts_from(
    state: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RLCTL_RUNS", raising=False)
    run = RunDir.create(Path("runs"), "quickstart", "long", "ppo")
    print_end(run, state, 1.0)
    assert "continues" not in capsys.readouterr().err  # no step is lost
    run.metrics.write_text('{"step": 1}\n{"step": 2}\n')
    print_end(run, state, 1.0)
    lost = "note: `rlctl resume long` continues from the beginning: none of the 2 steps is saved"
    assert lost in capsys.readouterr().err
    for step in (1, 2):  # the second one is incomplete
        (run.path / "checkpoints" / f"step_{step:06d}").mkdir(parents=True)
    (run.path / "checkpoints" / "step_000001" / "manifest.json").touch()
    print_end(run, state, 1.0)
    assert "note: `rlctl resume long` continues after step 1\n" in capsys.readouterr().err
