"""Two steps of the recipe of a judge, whose key is in nothing that the run leaves."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rlctl.__main__ import main
from tests.e2e.command import metrics
from tests.rewards.chat_server import Reply, chat_server

KEY = "Qjud-31hh31"


def judged(number: int, body: dict[str, Any]) -> Reply:
    """Score by the length of the message; each fifth reply has no verdict, and two are errors.

    All repeat the key.
    """
    if number == 3:
        return Reply(status=500, body=f"failed with {KEY}")
    if number == 5:
        return Reply(body=json.dumps({"error": KEY}))
    if number % 5 == 4:
        return Reply(f"I cannot say: {KEY}")
    score = len(body["messages"][1]["content"]) % 11
    return Reply(json.dumps({"reasoning": KEY, "score": score}))


def test_a_run_with_a_judge(
    settings: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("PLANTED_JUDGE_KEY", KEY)
    with chat_server(judged) as server:
        overrides = [
            *("--inline", "--recipe", "judge", "--name", "r", *settings, "data.val_files=null"),
            *("actor_rollout_ref.rollout.n=2", f"trainer.run_dir={tmp_path}/runs"),
            *("trainer.test_freq=-1", "reward.max_failed_share=0.9"),
            f"reward.params.judge.base_url={server.base_url}",
            "reward.params.judge.api_key_env=PLANTED_JUDGE_KEY",
        ]
        assert main(["train", "grpo", *overrides]) == 0
        assert set(server.keys) == {f"Bearer {KEY}"}
    run = tmp_path / "runs/quickstart/r"
    first, second = metrics(run)[-2:]
    assert first["reward/num_dropped"] + second["reward/num_dropped"] > 0
    assert (run / ".reward_cache.sqlite").is_file()
    for file in run.rglob("*"):
        assert not file.is_file() or KEY.encode() not in file.read_bytes(), file
    assert KEY not in "".join(capfd.readouterr())
