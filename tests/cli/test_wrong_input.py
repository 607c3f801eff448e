"""Wrong input of commands: an error that names the cause, never the exit code of a defect."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import pytest

from rlctl.__main__ import main
from rlctl.recipes.overrides import parse
from rlctl.runs.run_dir import RunDir
from rlctl.suggest import hydra_text
from tests.plugin_folders import is_there, of_commands
from tests.recorded import record

LONG = "n" * 300
VERL = "python3 -m verl.trainer.main_ppo"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the current folder, with a finished run `r`."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RLCTL_RUNS", raising=False)
    run = RunDir.create(Path("runs"), "p", "r", "ppo")
    record(run.path, {1: {"critic/score/mean": 0.5}})
    run.update(state="finished", exit_code=0)
    Path("cyclic.yaml").write_text(
        "defaults: [ppo_trainer, _self_]\ndata: &data {x: *data}\n", encoding="utf-8"
    )
    Path("good.sh").write_text(f"{VERL} data.train_batch_size=8\n", encoding="utf-8")
    lines = [f"a{number}=" + f"${{a{number - 1}}}" * 10 for number in range(1, 12)]
    Path("expanding.sh").write_text(
        "\n".join(["a0=xxxxxxxxxx", *lines, f"{VERL} x=$a11"]), encoding="utf-8"
    )
    Path("repeating.sh").write_text(
        f"a={'x' * 50_000}\n{VERL} x={'$a' * 100_000}", encoding="utf-8"
    )
    Path("many.sh").write_text(f"{VERL} {'x= ' * 100_000}", encoding="utf-8")
    Path("nested.sh").write_text(f"{VERL} x={'${a:-' * 20_000}{'}' * 20_000}", encoding="utf-8")
    return tmp_path


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        pytest.param(
            ["train", "ppo", "--detach", "--dry-run"],
            2,
            "cannot be combined with --dry-run",
            marks=pytest.mark.plugin("console"),
        ),
        *of_commands(
            [
                (["train", "ppo", "--recipe", "cyclic.yaml"], 3, "a value contains itself"),
                (["explain", "a" * 100_000], 4, "nothing has a name of 100000 characters"),
                (["fit", "grpo", "--nodes", "99999999"], 0, ""),
                (
                    ["import", "verl", "good.sh", "-o", "nodir/x.yaml"],
                    4,
                    "the folder nodir does not exist",
                ),
                (
                    ["import", "verl", "expanding.sh"],
                    3,
                    "the variable a5 has more than 100000 characters",
                ),
                (
                    ["import", "verl", "repeating.sh"],
                    3,
                    "more than 2000000 characters once its variables",
                ),
                (["import", "verl", "nested.sh"], 3, "the script has more than 50 nested brackets"),
                (["import", "verl", "many.sh"], 3, "has 100000 settings, at most 2000 are read"),
                (
                    ["completion", "tcsh"],
                    2,
                    "for example `rlctl completion zsh > ~/.zfunc/_rlctl`;",
                ),
                (
                    ["train", "ppo", "--dry-run", "--name", LONG],
                    2,
                    "has 300 bytes, and 200 are allowed",
                ),
                (
                    ["train", "ppo", "--dry-run", "trainer.run_dir=/dev/null"],
                    7,
                    "/null is not a folder",
                ),
                (
                    ["train", "ppo", "--address", "junk"],
                    2,
                    "'junk' is not the address of a cluster",
                ),
                (["runs", "--where", "not " * 2000 + "true"], 2, "too deeply nested"),
                (["runs", "--where", "not " * 90 + "(state == 'lost')"], 0, ""),
                (["train", "ppo", "trainer.project_name=${eval:1+}"], 3, "trainer.project_name"),
                (
                    ["sweep", "ppo", "--dry-run", "--address", "auto"],
                    2,
                    "--address cannot be combined",
                ),
                (
                    ["resume", "r", "--inline", "--address", "auto"],
                    2,
                    "--address cannot be combined",
                ),
                (["runs", "rm", ""], 2, "the name of the run is empty"),
                (["sweep", "best", ""], 2, "the name of the sweep is empty"),
                (["show", LONG], 4, "no run is named"),
                (["train", "sft", "--recipe", "gsm8k_ppo"], 2, "the recipe gsm8k_ppo is for `ppo`"),
                (
                    [
                        *("train", "ppo", "--dry-run", "trainer.resume_mode=resume_path"),
                        "trainer.resume_from_path=nope",
                    ],
                    4,
                    "there is no checkpoint in trainer.resume_from_path: nope",
                ),
                (["explain", "foo/bar", "actor/kl_loss"], 4, "nothing is named 'foo/bar'"),
                (
                    ["train", "ppo", "trainer.=3"],
                    3,
                    "'trainer.' is not a key: a part of it is empty",
                ),
                (
                    ["config", "show", "@last"],
                    4,
                    "help: -r @last shows the configuration of that run",
                ),
                (
                    ["sweep", "ppo", "--dry-run", "algorithm.gamma=0.9,1", "--metric", "nope"],
                    3,
                    "no trial would log the metric 'nope'",
                ),
                (
                    ["sweep", "ppo", "--dry-run", "algorithm.gamma=range(5,1)"],
                    3,
                    "algorithm.gamma='range(",
                ),
                (
                    ["report", "r", "-o", "missing/r.html"],
                    4,
                    "error: the folder missing does not exist",
                ),
                (["runs", "sync", "r", "--logger", "tensorboard"], 3, "configuration is damaged"),
            ]
        ),
    ],
    ids=lambda value: " ".join(value)[:60] if isinstance(value, list) else "",
)
def test_wrong_input_has_its_own_error(
    folder: Path,
    words: list[str],
    code: int,
    message: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(words) == code
    assert message in capsys.readouterr().err
    assert (folder / "runs" / "p" / "r").is_dir()


VALUES = {
    "trainer.total_epochs=nan": "total_epochs should be a whole number",
    "trainer.seed=99999999999999999999999": "trainer.seed should be",
    "actor_rollout_ref.actor.optim.betas=[0.9,1.5]": "betas should be a list of 2 numbers ≥ 0 and",
}
PLAN = {
    "actor_rollout_ref.actor.fsdp_config.tensor_model_parallel_size=1000000": "the model's 4",
    "trainer.placement.pools={nope: 1}": "pools names 'nope', where no role is placed",
    "actor_rollout_ref.model.lora_rank=100000": "is above the model's hidden size",
    "data.prompt_key=nope": "at: quickstart: train.parquet, column nope",
    "data.val_files=[]": "data.val_files is an empty list",
    "trainer.resume_mode=resume_path": "needs trainer.resume_from_path",
}


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize("problems", [VALUES, PLAN], ids=["values", "plan"])
def test_all_problems_are_shown_at_once(
    problems: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", "ppo", "--dry-run", *problems]) == 3
    shown = capsys.readouterr().err
    assert [message for message in problems.values() if message not in shown] == []


def test_watch_skips_an_alarm_without_a_name(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    RunDir(folder / "runs" / "p" / "r").event("alarm", step=1, message="m")
    assert main(["watch", "r"]) == 0
    assert "r is finished" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words", of_commands([[line.split()] for line in ("runs tag r x", "runs note r x", "resume r")])
)
def test_a_read_only_folder_of_runs(
    folder: Path,
    words: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def refuse(path: Path, *_: object, **__: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))

    if is_there("console"):
        monkeypatch.setattr("rlctl.plugins.console.label_changes.write_text", refuse)
    monkeypatch.setattr("rlctl.api.resume", lambda *_, **__: refuse(folder))
    assert main(words) == 7
    assert "Read-only file system" in capsys.readouterr().err


@pytest.mark.plugin("console")
@pytest.mark.parametrize(("code", "shown"), [(errno.EACCES, "E-ACCESS"), (28, "E-DISK")])
def test_a_report_that_cannot_be_written(
    folder: Path,
    code: int,
    shown: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fail(*_: object) -> None:
        raise OSError(code, os.strerror(code), ".x.html.123.tmp")

    monkeypatch.setattr("rlctl.plugins.console.commands.report.write_text", fail)
    assert main(["report", "r", "-o", "x.html"]) == 7
    error = capsys.readouterr().err
    assert shown in error
    assert "at: x.html" in error
    assert ".tmp" not in error


def test_train_and_sweep_refuse_a_folder_that_is_not_writable(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(os, "access", lambda *_: False)
    assert main(["train", "ppo", "--dry-run"]) == 7
    assert "runs is not writable" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["ünï", "a=b", "a,b", "true", "null", 'a"b', "it's", "[x"])
def test_an_option_quotes_its_text_for_hydra(name: str) -> None:
    (override,), problems = parse([hydra_text("trainer.experiment_name", name)])
    assert problems == []
    assert override.value() == name


def test_json_of_a_dry_run_has_one_shape(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "ppo", "--dry-run", "--json", "trainer.total_epoch=1"]) == 3
    refused = json.loads(capsys.readouterr().out)
    assert refused["ok"] is False
    assert refused["problems"][0]["message"] == "unknown key trainer.total_epoch"
