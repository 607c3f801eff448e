"""Values of tokens: kept by the listener, shown in colours or as text, and on the board."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

from rlctl.errors import NotFoundError
from rlctl.plugins.console.token_values import KINDS, page, plain, token_rows
from rlctl.runs.run import read_run
from rlctl.runs.run_dir import RunDir
from tests.e2e import command
from tests.e2e.command import rlctl
from tests.e2e.conftest import small, write_shelf
from tests.settings import given

ROW = {
    "prompt": "<b>",
    "score": 1.0,
    "tokens": ["<i>", "b", "\x1b[2J"],
    "advantage": [0.5, -1.0, None],
}


def test_a_run_keeps_the_tokens_of_some_prompts(tmp_path: Path) -> None:
    words = [*small(write_shelf(tmp_path)), *given(n=2, steps=3, lr=0.01, val=None)]
    plainly = command.train("grpo", "plain", "--inline", *words, cwd=tmp_path)
    words += [
        "trainer.listeners=[token_values]",
        "trainer.listener_params={token_values: {steps: 2}}",
    ]
    run = command.train("grpo", "tokens", "--inline", *words, cwd=tmp_path)
    assert command.reproducible(run) == command.reproducible(plainly)  # watching changes nothing
    files = sorted(path.name for path in (run / "tokens").iterdir())
    assert files == ["step_000002.jsonl", "step_000003.jsonl"]
    step, rows = token_rows(read_run(run))
    assert (step, len(rows)) == (3, 4)  # two responses to each of two prompts
    samples = json.loads(rlctl("show", "tokens", "--train", "--json", cwd=tmp_path).stdout)
    texts = {sample["response"]: sample["score"] for sample in samples["samples"]}
    for row in rows:
        assert {len(row[name]) for name in KINDS} == {len(row["tokens"])}
        assert max(map(abs, row["diff"])) < min(row["entropy"])  # the same weights, up to rounding
        assert all(0 <= value <= math.log(2000) for value in row["entropy"])
        assert set(row["mask"]) == {1.0}
        assert len(set(row["advantage"])) == 1  # GRPO's are equal in a response
    assert any(1.0 in row["clip"] for row in rows) or all(row["clip"] for row in rows)
    assert len(texts) <= 4
    shown = rlctl("show", "tokens", "--samples", "--tokens", "entropy", "-n", 1, cwd=tmp_path)
    assert plain(rows[0], "entropy") in shown.stdout
    assert "1 of 4 responses of step 3, by entropy" in shown.stderr
    error = rlctl("show", "plain", "--tokens", "mask", cwd=tmp_path, code=4).stderr
    assert "trainer.listeners=[token_values]" in error


def test_tokens_in_colour_and_as_text(tmp_path: Path) -> None:
    run = RunDir.create(tmp_path, "p", "r", "ppo").path
    with pytest.raises(NotFoundError, match="no values of tokens"):
        token_rows(read_run(run))
    (run / "tokens").mkdir()
    (run / "tokens" / "step_000004.jsonl").write_text(json.dumps(ROW) + "\n")
    assert plain(ROW, "advantage").startswith("<i>‹0.5›b‹-1›")
    assert "\x1b" not in plain(ROW, "advantage")
    colours = {"FORCE_COLOR": "1", "COLORTERM": "truecolor", "TERM": "xterm"}
    environment = {name: os.environ[name] for name in os.environ if name != "NO_COLOR"} | colours
    words = ["show", "r", "--root", tmp_path, "--tokens", "advantage"]
    text = subprocess.run(
        [sys.executable, "-m", "rlctl", *map(str, words)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=command.TIMEOUT_S,
        check=True,
    ).stdout
    assert "\x1b[30;48;2;255;0;0mb" in text  # −1: red
    assert "\x1b[30;48;2;128;255;128m<i>" in text  # 0.5: half green
    found = page(read_run(run), None, "advantage")
    assert "&lt;i&gt;" in found
    assert "<i>" not in found
    assert 'title="-1" style="background:rgba(220,0,0,1.00)">b</span>' in found
    assert "<b>advantage</b>" in found
    assert '?run=p/r&amp;step=4&amp;by=entropy"' in found
