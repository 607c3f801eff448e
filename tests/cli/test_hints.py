"""Hints of the command line and of recipe files, each by the words or the file that it is for."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from rlctl.data_prep.rows import PromptRow, write_rows
from rlctl.runs.run_dir import RunDir
from tests.cli.test_json_documents import made_sweep
from tests.plugin_folders import of_commands
from tests.recorded import called

_SECRET = "hf_abcdefghijklmnopqrstuvwxyzabcdefgh"
_TEST_ENV = "rlctl env test gridworld, or rlctl env test --program agent.py:run --model RUN"
_REWARD = "reward test --data rows.parquet"

COMMANDS = {
    "config show --yaml --json": "give one of them",
    "config show -r r data.seed=1": "name a recipe or remove the overrides",
    "config show -r nothing-like-it": "shipped recipes: dapo, ",
    "config why lr": "give one of them: actor_rollout_ref.actor.optim.lr or critic.optim.lr",
    "config why actor_rollout_ref.actor.optim": "`rlctl config show actor_rollout_ref.actor.optim",
    "config why optim.lrr": "did you mean actor_rollout_ref.actor.optim.lr or critic.optim.lr",
    "config why nothing.like.it.at.all": "`rlctl config keys nothing.like.it.at.all` searches",
    "config keys @last": "-r @last shows the configuration of that run",
    "config keys zzzz": "`rlctl config keys` lists all keys",
    "data show rows.parquet --start 9": "the file has 1 row, counted from 0",
    "data show none.parquet": "`rlctl prep arithmetic --out data` writes one",
    "doctor x.txt --bug-report": "--run RUN names a run",
    "engines add r --url a --url b --count 1": "leave out --count",
    "engines drain r": "`rlctl engines list RUN` shows the numbers",
    "env test": _TEST_ENV,
    "env test gridworld --program a.py:run": _TEST_ENV,
    "env test --program a.py:run": "add --model quickstart",
    "env test gridworld -s a=1": "add --model quickstart",
    "env test gridworld --model quickstart --scripted m": "leave out one",
    "env test gridworld size": "size=VALUE",
    "eval r --num-fewshot 2": "add --tasks NAME[,NAME…]",
    "eval r --samples 1 --tasks a": "without --tasks, responses to the run's data are printed",
    "eval r --tasks a,,b": "--tasks NAME[,NAME…]",
    "export r out --private": "--push ORG/NAME --private",
    "fit gpro": "did you mean grpo",
    "fit zzzzzz": "--run RUN uses the settings of a run",
    "import verl verl.sh -o verl.sh": "overwrite it with --force",
    "logs r --address auto --json": "leave out one of them",
    "prep arithmetic --max-prompt-length 3": "--model DIR",
    "recipes cp grpo verl.sh": "choose another name, or overwrite it with --force",
    _REWARD: "--responses FILE; only a reward model",
    f"{_REWARD} --responses three.jsonl --model x --reward gsm8k": "each in a separate command",
    f"{_REWARD} --responses none.jsonl --reward gsm8k": "give one response per row, or the same",
    "resume s data.seed=3": "its runs, named SWEEP-NNN, take overrides and options",
    "runs --watch": "list the runs once without it",
    "show r --wrong --right": "leave out both to see all",
    "sweep ppo data.seed=1,2 --json": "`rlctl show SWEEP --json` prints the results of a sweep",
    "train ppo --address auto --dry-run": "leave out --address",
    "train ppo --address foo": "write auto, ray://HOST:10001 or http://HOST:8265",
    f"train ppo --address auto trainer.project_name={_SECRET}": "KEY='${oc.env:NAME}' reads it",
    "train ppo --json": "a run writes its metrics to metrics.jsonl in its folder",
    "train ppo --max-time x": "write 3h50m, 90m, 45s, 3:50:00 or 1-12:00:00",
    "train ppo --recipe ppo --config-name x": "leave out --recipe, or give the file to it",
    "train ppo --save-by 25:99": "write 23:30 or 2026-11-22T06:00",
    "train sft --recipe ppo": "use `ppo` with this recipe, or the recipe sft",
    "train --cfg job": "`rlctl config show --yaml` prints the composed configuration",
    "train ppo --multirun": "`rlctl sweep ALGORITHM KEY=A,B` runs several values of a key",
}
# Their hints are of the folder `console`, and their commands are not.
OF_CONSOLE = {
    "doctor x.zip": "rlctl doctor --bug-report",
    "runs --state finished trash": "rlctl runs trash … --state …",
}
RECIPES = {
    "a: {lr: ${b.c}}": 'quote a reference inside braces: {key: "${other.key}"}',
    "a: b: c": "check indentation, colons and quotes there",
    "a: &x {b: *x}": "an alias (`*name`) must not be inside its anchor (`&name`)",
    "defaults: 3": "defaults: [ppo_trainer, _self_]",
    "1: 2": "put it in quotes",
    "a: 1\na: 2": "first on line 1",
    "hydra: {run: 3}": "recipes may only set hydra.searchpath",
    "hydra: {searchpath: 3}": "[file://parts]",
    "a: 1": "start it with `defaults: [ppo_trainer, _self_]`: the base has all defaults",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a run, rows, responses and a script."""
    here = tmp_path_factory.mktemp("hints")
    RunDir.create(here / "runs", "p", "r", "ppo").write_config("trainer: {}\n", {})
    made_sweep(here)
    write_rows(here / "rows.parquet", [PromptRow("s", [{"role": "user", "content": "a"}], "1")])
    (here / "none.jsonl").write_text("")
    (here / "three.jsonl").write_text('"1"\n' * 3)
    (here / "verl.sh").write_text("python3 -m verl.trainer.main_ppo data.seed=3\n")
    return here


@pytest.mark.parametrize(("line", "hint"), of_commands(COMMANDS.items()), ids=COMMANDS)
def test_a_command_line_gets_its_hint(line: str, hint: str, folder: Path) -> None:
    check_hint(line, hint, folder)


@pytest.mark.plugin("console")
@pytest.mark.parametrize(("line", "hint"), OF_CONSOLE.items(), ids=OF_CONSOLE)
def test_a_command_line_gets_its_hint_of_a_plug_in(line: str, hint: str, folder: Path) -> None:
    check_hint(line, hint, folder)


def check_hint(line: str, hint: str, folder: Path) -> None:
    done = called(*shlex.split(line), cwd=folder)
    assert done.returncode in range(1, 70), done.stderr
    [help] = [line for line in done.stderr.splitlines() if line.startswith("  help: ")]
    assert hint in help


@pytest.mark.parametrize(("text", "hint"), RECIPES.items(), ids=RECIPES)
def test_a_recipe_gets_its_hint(text: str, hint: str, tmp_path: Path) -> None:
    (tmp_path / "own.yaml").write_text(f"{text}\n")
    done = called("recipes", "check", "own.yaml", cwd=tmp_path)
    assert done.returncode == 3
    assert f"  help: {hint}" in done.stderr
