"""Evidence of a run: copies of the user's code, differences, and a run that repeats it."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

import rlctl as api
from rlctl.plugins.console import evidence
from rlctl.plugins.console.evidence_diff import without_effect
from rlctl.runs.record import RunRecord
from rlctl.runs.run import read_run
from rlctl.runs.run_dir import RunDir
from rlctl.runtime.planning.equivalent_command import equivalent_command
from tests.e2e.command import reproducible, rlctl
from tests.e2e.conftest import small, write_shelf
from tests.recorded import called

SECRET = "sk-abcdefghijklmnopqrstuvwxyz0123456789"
REWARD = """from helper import bonus

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return len(solution_str) / 100 + bonus(solution_str)
"""


def git(folder: Path, *words: str) -> None:
    who = ("-c", "user.name=a", "-c", "user.email=a@b")
    subprocess.run(["git", *who, *words], cwd=folder, check=True, capture_output=True)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a repository with uncommitted changes, whose run `a` has a reward of its own."""
    folder = write_shelf(tmp_path_factory.mktemp("home"))
    (folder / "reward.py").write_text(REWARD)
    (folder / "helper.py").write_text(f"KEY = '{SECRET}'\n\ndef bonus(text):\n    return 0.5\n")
    git(folder, "init", "-q")
    git(folder, "add", "reward.py")
    git(folder, "commit", "-qm", "one")
    (folder / "reward.py").write_text(REWARD.replace("/ 100", "/ 200"))
    rlctl("train", "grpo", "--name", "a", "--inline", *words(folder), cwd=folder)
    return folder


def words(folder: Path) -> list[str]:
    return [
        *small(folder),
        "reward.custom_reward_function.path=reward.py",
        "trainer.logger=[console]",
        "trainer.price_per_hour=3600",
        "trainer.save_freq=1",
        "trainer.checkpoint.max_optimizers_to_keep=1",
    ]


def run_of(home: Path, name: str = "a") -> Path:
    return home / "runs" / "quickstart" / name


def test_a_run_has_the_changes_the_files_and_the_packages(home: Path):
    folder = run_of(home)
    patch = (folder / "evidence" / "changes.patch").read_text()
    assert "+    return len(solution_str) / 200" in patch
    assert "/ 200" in (folder / "evidence" / "files" / "reward.py").read_text()
    assert "def bonus" in (folder / "evidence" / "files" / "helper.py").read_text()
    assert not any(SECRET in path.read_text("utf-8", "replace") for path in all_files(folder))
    assert "\ntorch==" in (folder / "env.txt").read_text()


def all_files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


def test_a_rerun_has_the_same_metrics(home: Path):
    done = rlctl("rerun", "a", "--json", cwd=home)
    found = json.loads(done.stdout)
    assert (found["run"], found["steps"], found["count"]) == ("quickstart/a-rerun", 3, 0)
    again = run_of(home, "a-rerun")
    assert reproducible(again) == reproducible(run_of(home))
    before, after = (json.loads((run / "run.json").read_text()) for run in (run_of(home), again))
    assert (after["recipe"], after["command"][-1]) == (before["recipe"], "--inline")


@pytest.fixture
def changed(home: Path) -> Iterator[Path]:
    """Change a file that the run has imported, for one test."""
    helper = home / "helper.py"
    text = helper.read_text()
    helper.write_text(text.replace("0.5", "0.25"))
    yield helper
    helper.write_text(text)


def test_a_changed_file_is_refused_and_shown(home: Path, changed: Path):
    refused = rlctl("rerun", "a", "--name", "never", cwd=home, code=3)
    assert f"{changed} has changed since a started" in refused.stderr
    assert not run_of(home, "never").exists()
    shown = rlctl("show", "a", "--diff", cwd=home).stdout
    assert "+    return len(solution_str) / 200" in shown
    assert "-    return 0.5\n+    return 0.25\n" in shown
    assert "quickstart/a" in rlctl("rerun", "a", "--force", "--check", "--json", cwd=home).stdout
    copy = run_of(home) / "evidence" / "files" / "reward.py"
    rlctl("rerun", "a", "--check", f"reward.custom_reward_function.path={copy}", cwd=home)


@pytest.mark.soak
def test_a_forced_rerun_tells_the_differences(home: Path, changed: Path):
    done = rlctl("rerun", "a", "--force", "--name", "forced", cwd=home)
    assert "values differ from a" in done.stderr
    del changed


def test_files_of_anothers_run_are_not_compared_unasked(home: Path, changed: Path, tmp_path: Path):
    shutil.copytree(home / "runs", tmp_path / "runs", symlinks=True)
    words = ("show", "a", "--diff")
    untrusted = rlctl(*words, cwd=tmp_path)
    assert "a is not a run of yours, so today's files are not compared" in untrusted.stderr
    assert "-    return 0.5" not in untrusted.stdout
    assert json.loads(rlctl(*words, "--json", cwd=tmp_path).stdout)["compares_files"] is False
    trusted = called(*words, cwd=tmp_path, RLCTL_TRUSTED=str(tmp_path / "runs"))
    assert ("-    return 0.5\n+    return 0.25\n" in trusted.stdout, trusted.stderr) == (True, "")
    assert "commit" not in trusted.stdout, "of the folder of the run, not of this one"
    del changed


def test_two_runs_differ_in_settings(home: Path):
    other = run_of(home, "b")
    shutil.copytree(run_of(home), other, symlinks=True)
    text = (other / "config.yaml").read_text()
    config = yaml.safe_load(text.replace("  seed: 1\n", "  seed: 5\n"))
    config["critic"]["ppo_mini_batch_size"] = 64
    (other / "config.yaml").write_text(yaml.safe_dump(config, sort_keys=False))
    (other / "env.txt").write_text((other / "env.txt").read_text() + "mine==1.0\n")
    trusted, diff = str(home / "runs"), ("show", "a", "--diff", "b")
    found = json.loads(called(*diff, "--json", cwd=home, RLCTL_TRUSTED=trusted).stdout)
    assert found["settings"]["trainer.seed"] == [1, 5]
    assert found["without_effect"] == ["critic.ppo_mini_batch_size"]
    shown = called(*diff, cwd=home, RLCTL_TRUSTED=trusted)
    assert "have no effect: critic.ppo_mini_batch_size\n" in shown.stderr
    assert "ppo_mini_batch_size" not in shown.stdout
    assert found["environment"] == {"mine": [None, "1.0"]}
    assert (found["files"], found["patch"]) == ({}, "")
    assert "two runs need --diff" in rlctl("show", "a", "b", cwd=home, code=2).stderr
    shutil.rmtree(other)


def test_a_damaged_configuration_has_no_keys_without_effect(tmp_path: Path):
    run = RunDir.create(tmp_path, "p", "r", "ppo")
    run.write_config("trainer: 3\ntrainer.seed: 4\n", {})
    assert without_effect(read_run(run.path), None, ["trainer.seed"]) == []


@pytest.mark.parametrize(
    ("recipe", "verb"), [("grpo", "grpo"), ("gsm8k_ppo", "ppo"), ("sft", "sft")]
)
def test_the_command_of_a_program_names_recipe_and_overrides(recipe: str, verb: str):
    overrides = ["trainer.save_freq=2", "trainer.seed=3"]
    composed = api.compose(recipe, overrides)
    plan: Any = SimpleNamespace(recipe=composed, config=composed.config, inline=True)
    words = equivalent_command(plan, None)
    assert words[:5] == ["rlctl", "train", verb, "--recipe", recipe]
    assert (sorted(words[5:-1]), words[-1]) == (sorted(overrides), "--inline")


@pytest.mark.soak
def test_the_command_of_a_program_trains_the_same(home: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(home)
    run = api.train("grpo", [*words(home), "trainer.experiment_name=n"], inline=True)
    command = list(RunRecord.read(run.path / "run.json").command)
    rlctl(*command[1:], "--name", "m", cwd=home)
    assert reproducible(run_of(home, "m")) == reproducible(run.path)


def test_the_cost_is_a_field_of_runs(home: Path):
    (run,) = json.loads(
        rlctl(
            "runs",
            "--where",
            'name == "a"',
            "--sort",
            "-cost",
            "--cols",
            "cost,took",
            "--json",
            cwd=home,
        ).stdout
    )
    assert run["cost"] == pytest.approx(run["took"], abs=1e-3)
    assert "cost" in rlctl("show", "a", cwd=home).stdout


def test_only_the_newest_checkpoint_has_the_optimizer(home: Path):
    folder = run_of(home) / "checkpoints"
    assert not (folder / "step_000001" / "actor" / "optimizer").exists()
    assert (folder / "step_000002" / "actor" / "optimizer").is_dir()
    fork = ("resume", "a", "--from-step", "1", "--fork")
    refused = rlctl(*fork, "c", "--inline", cwd=home, code=3)
    assert "step_000001 has no optimizer" in refused.stderr


@pytest.mark.soak
def test_an_older_checkpoint_starts_a_new_optimizer(home: Path):
    fork = ("resume", "a", "--from-step", "1", "--fork")
    without = "trainer.checkpoint.load_contents=[model,extra]"
    rlctl(*fork, "d", "--inline", without, cwd=home)
    assert reproducible(run_of(home, "d"))[-1]["step"] == 2


def test_large_files_and_patches_are_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    run = RunDir.create(tmp_path / "runs", "p", "r", "ppo")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "big.py").write_text("#" * (evidence.MAX_FILE + 1))
    (tmp_path / "tools.yaml").write_text("tools:\n  - class_name: mine.sub.Tool\n")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "__init__.py").touch()
    (tmp_path / "mine" / "sub.py").write_text("import other\n")
    (tmp_path / "other.py").write_text("x = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    recorded = {"a": "big.py", "b": {"c": ["tools.yaml"]}, "d": "/dev/zero", "e": "mine.sub:Tool"}
    evidence.keep(run.path, recorded)
    index = json.loads((run.path / "evidence" / "index.json").read_text())
    assert list(index["files"]) == ["tools.yaml", "mine/sub.py", "other.py"]
    assert list(index["left_out"]) == [str(tmp_path / "big.py")]
    assert "big.py" in caplog.text
