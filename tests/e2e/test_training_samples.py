"""Training responses: a few of each step are kept, shown, and replaced by a resumed run."""

from __future__ import annotations

import json
from pathlib import Path

from tests.e2e import command
from tests.e2e.command import rlctl
from tests.e2e.killed_runs import SCORE, responses
from tests.settings import given


def names(run: Path) -> list[str]:
    return sorted(path.name for path in (run / "generations_train").iterdir())


def test_responses_of_each_step_are_kept_and_shown(settings: list[str], tmp_path: Path) -> None:
    (tmp_path / "score.py").write_text(SCORE)
    words = [*settings, *given(n=2, steps=3, save=1, reward="score.py", reward_processes=1)]
    run = command.train("grpo", "kept", "--inline", *words, cwd=tmp_path)
    steps = [f"step_{step:06d}.jsonl" for step in (1, 2, 3)]
    assert names(run) == steps
    shown = json.loads(rlctl("show", "kept", "--samples", "--train", "--json", cwd=tmp_path).stdout)
    assert shown["step"] == 3
    prompts = [sample["prompt"] for sample in shown["samples"]]
    assert len(prompts) == 4  # two responses to each of two prompts
    assert prompts[0] == prompts[1] != prompts[2] == prompts[3]
    text = rlctl("show", "kept", "--train", "--step", 1, "--wrong", cwd=tmp_path).stdout
    first = json.loads((run / "generations_train" / steps[0]).read_text().splitlines()[0])
    assert first["prompt"] not in prompts
    assert text.startswith("wrong  score ")
    before = responses(run)
    rlctl("resume", "kept", "--inline", "--from-step", 1, cwd=tmp_path)
    assert responses(run) == before
    taken = run / "attempts" / "2" / "taken_back" / "generations_train"
    assert sorted(path.name for path in taken.iterdir()) == steps[1:]


def test_no_responses_are_kept_on_request(settings: list[str], tmp_path: Path) -> None:
    words = [*settings, *given(steps=1), "trainer.log_train_generations=0"]
    run = command.train("grpo", "nothing", "--inline", *words, cwd=tmp_path)
    assert not (run / "generations_train").exists()
    error = rlctl("show", "nothing", "--samples", "--train", cwd=tmp_path, code=4).stderr
    assert "this run has no training samples" in error
    assert "trainer.log_train_generations=2" in error
