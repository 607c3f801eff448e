"""Bad input: one clear error before anything starts, its exit code, and nothing left behind."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest

from rlctl.__main__ import main
from tests.e2e.command import rlctl

Capsys = pytest.CaptureFixture[str]


def broken_reward(folder: Path) -> str:
    (folder / "broken.py").write_text("import nothing_of_that_name\n")
    return f"reward.custom_reward_function.path={folder}/broken.py"


def not_parquet(folder: Path) -> str:
    (folder / "text.parquet").write_text("not parquet at all")
    return f"data.train_files={folder}/text.parquet"


CASES = {
    "not parquet": (not_parquet, 3, "text.parquet"),
    "long prompts": (
        ["data.max_prompt_length=8", "data.filter_overlong_prompts=false"],
        3,
        "data.max_prompt_length=8",
    ),
    "all too long": ("data.max_prompt_length=8", 3, "no prompt is left"),
    "reward file": (broken_reward, 3, "broken.py"),
    "no GPU": ("trainer.device=cuda", 7, "GPU"),
}


@pytest.mark.parametrize("case", CASES)
def test_bad_input_gives_one_clear_error(
    case: str, settings: list[str], here: Path, capsys: Capsys
) -> None:
    make, code, wanted = CASES[case]
    spoilt = make(here) if callable(make) else make
    overrides = spoilt if isinstance(spoilt, list) else [spoilt]
    assert main(["train", "ppo", *settings, *overrides]) == code
    talk = capsys.readouterr().err
    begin, *lines = talk.splitlines()
    assert begin == "checking the configuration …"
    first = next(line for line in lines if not line.startswith(("note: ", "warning: ")))
    assert first.startswith("error: "), talk
    assert wanted in talk
    assert "Traceback" not in talk
    assert not (here / "runs").exists()


def test_missing_package_of_a_logger_exits_6_with_the_install_command(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capsys
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    # An earlier test may have imported the tracker while its package was there.
    monkeypatch.delitem(sys.modules, "rlctl.tracking.wandb", raising=False)
    assert main(["train", "ppo", "-l", "wandb"]) == 6
    assert "pip install 'rlctl[wandb]'" in capsys.readouterr().err
    assert not (here / "runs" / "quickstart").exists()


def test_too_little_disk_space_is_refused(
    shelf: Path, settings: list[str], tmp_path: Path, capsys: Capsys
) -> None:
    """Pretend that the model's weights are eight terabytes with a sparse file."""
    model = tmp_path / "model"
    shutil.copytree(shelf / "model", model)
    with (model / "more.safetensors").open("wb") as file:
        file.truncate(1 << 43)
    overrides = [
        f"actor_rollout_ref.model.path={model}",
        "trainer.save_freq=1",
        f"trainer.run_dir={tmp_path}/runs",
    ]
    assert main(["train", "ppo", *settings, *overrides]) == 7
    assert "MiB free" in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


@pytest.mark.slow
def test_ray_start_timeout(settings: list[str], tmp_path: Path) -> None:
    done = rlctl(
        "train", "ppo", *settings, "trainer.timeouts.ray_start_s=0.05", cwd=tmp_path, code=7
    )
    assert "Ray did not start within 0.05 s" in done.stderr
    record = json.loads(next((tmp_path / "runs").glob("quickstart/*/run.json")).read_text())
    assert (record["state"], record["exit_code"]) == ("failed", 7)
