"""Errors that need no torch are reported before its import, which takes seconds."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import yaml

from rlctl.recipes.compose import compose
from rlctl.runs.run_dir import RunDir

MODEL = "actor_rollout_ref.model"
# Command lines, exit codes and a part of the message.
CASES = [
    (["data.nothing=1"], 3, "unknown key data.nothing"),
    (["data.train_batch_size=abc"], 3, "should be a whole number"),
    (["data.train_files=none.parquet"], 3, "none.parquet"),
    (["data.val_files=[quickstart,rows.jsonl]"], 3, "rows.jsonl:1"),
    ([f"{MODEL}.path=/nowhere/model"], 3, "there is no model folder"),
    ([f"{MODEL}.path=./empty"], 3, "no readable config.json"),
    ([f"{MODEL}.tokenizer_path=./empty"], 3, "the model folder has no tokenizer"),
    ([f"{MODEL}.custom_chat_template=broken.jinja"], 3, "broken.jinja:2"),
    ([f"{MODEL}.custom_chat_template=none.jinja"], 3, "the chat template cannot be read"),
    (["reward.custom_reward_function.path=none.py"], 3, "reward file does not exist: none.py"),
    (["trainer.experiment_name=taken"], 5, "taken"),
    (["trainer.experiment_name=.mine"], 2, "'.mine'"),
    (["-l", "absent"], 6, "'absent' needs the package 'surely_not_installed'"),
    (
        ["-l", "absent", "data.train_files=none.parquet", f"{MODEL}.path=/nowhere/model"],
        3,
        "there is no model folder",
    ),
]
RESUME = ["resume", "stored", "--inline"]
SWEEP = ["sweep", "ppo", "--recipe", "ppo", "--dry-run"]
LR = "actor_rollout_ref.actor.optim.lr"
# The same checks before a run is resumed, and before the trials of a sweep are planned.
OTHERS = [
    ([*RESUME, "data.nothing=1"], 3, "unknown key data.nothing"),
    ([*RESUME, "data.train_files=none.parquet"], 3, "none.parquet"),
    ([*RESUME, "--fork", "x", f"{MODEL}.path=/nowhere/model"], 3, "there is no model folder"),
    ([*RESUME, f"{MODEL}.custom_chat_template=broken.jinja"], 3, "broken.jinja:2"),
    ([*RESUME, "trainer.logger=[absent]"], 6, "'absent' needs the package"),
    ([*RESUME, "--fork", "taken"], 5, "taken"),
    ([*RESUME, f"{LR}=1"], 3, "→ 1 would change the run"),
    ([*RESUME, "--from-step", "3"], 4, "no checkpoint of step 3"),
    ([*SWEEP, f"{LR}=1e-4,2e-4", "data.val_files=[quickstart,rows.jsonl]"], 3, "rows.jsonl:1"),
    ([*SWEEP, f"{LR}=1e-4,2e-4", "-l", "absent"], 6, "'absent' needs the package"),
    ([*SWEEP, "data.train_files=quickstart,none.parquet"], 3, "trial data.train_files=none"),
    ([*SWEEP, f"{LR}=1e-4,2e-4", "trainer.test_freq=-1"], 3, "trials would never run validation"),
    ([*SWEEP, f"{LR}=1e-4,abc"], 3, f"trial {LR}=abc"),
]
SCRIPT = """
import json, sys
from contextlib import redirect_stderr
from io import StringIO
from rlctl.__main__ import main

results = []
for words in json.load(sys.stdin):
    with redirect_stderr(StringIO()) as said:
        code = main(words)
    heavy = sorted({"torch", "transformers", "ray"} & sys.modules.keys())
    results.append((code, said.getvalue(), heavy))
print(json.dumps(results))
"""


def package_with_a_logger(folder: Path) -> None:
    info = folder / "absent-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: absent\nVersion: 1.0\nProvides-Extra: more\n"
        "Requires-Dist: surely-not-installed; extra == 'more'\n"
    )
    (info / "entry_points.txt").write_text(
        "[rlctl.loggers]\nabsent = absent_logger:Logger [more]\n"
    )
    (folder / "absent_logger.py").write_text("import surely_not_installed\n")


def store_run(root: Path) -> None:
    recipe, folder = compose("ppo"), RunDir.create(root, "quickstart", "stored", "ppo")
    folder.write_config(yaml.safe_dump(recipe.container), recipe.origins)
    folder.finish("stopped", 0)


def test_errors_that_need_no_torch_do_not_import_it(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"prompt": 3}\n')
    (tmp_path / "empty").mkdir()
    (tmp_path / "quickstart").mkdir()  # no data of its name
    (tmp_path / "broken.jinja").write_text("{% generation %}a{% endgeneration %}\n{% if %}")
    (tmp_path / "runs" / "quickstart" / "taken").mkdir(parents=True)
    (tmp_path / "runs" / "quickstart" / "taken" / "run.json").write_text("{}")
    package_with_a_logger(tmp_path / "packages")
    store_run(tmp_path / "runs")
    train = ["train", "ppo", "--recipe", "ppo"]
    cases = [*OTHERS, *(([*train, *words], code, said) for words, code, said in CASES)]
    paths = [str(tmp_path / "packages"), os.environ.get("PYTHONPATH")]
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        input=json.dumps([words for words, *_ in cases]),
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
        capture_output=True,
        text=True,
        check=True,
        timeout=600,
    )
    results = json.loads(done.stdout.splitlines()[-1])
    for (words, code, message), (found, said, heavy) in zip(cases, results, strict=True):
        assert (found, heavy) == (code, []), (words, said)
        assert message in said, words
    last = results[-1][1]  # has all at once
    assert "none.parquet" in last
    assert "surely_not_installed" in last
