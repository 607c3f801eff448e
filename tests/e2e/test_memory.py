"""Out of memory: one rank retries with less; several ranks fail with a proposed budget."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlctl.runs.events import read_events
from tests.e2e.command import metrics, rlctl

KEY = "actor_rollout_ref.actor.ppo_max_token_len_per_gpu"
LOSS_MODE = "actor_rollout_ref.actor.policy_loss.loss_mode"
LOSS = '''
import torch
from rlctl.runtime.algorithms.policy_losses.vanilla import vanilla

def hungry(tokens, clip):
    """The last rank has no memory for more than half of the rows."""
    ranks = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    last = ranks == 1 or torch.distributed.get_rank() == ranks - 1
    torch.empty(2**60 if last and tokens.num_rows > 2 // ranks else 1)
    return vanilla(tokens, clip)

def starving(tokens, clip):
    torch.empty(2**60)
'''


@pytest.fixture
def hungry(tmp_path: Path, settings: list[str], monkeypatch: pytest.MonkeyPatch) -> list[str]:
    (tmp_path / "hungry.py").write_text(LOSS)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return [*settings, f"{LOSS_MODE}=hungry:hungry"]


def test_single_rank_retries_with_half_the_budget(tmp_path: Path, hungry: list[str]) -> None:
    done = rlctl("train", "ppo", "--inline", "--name", "alone", *hungry, cwd=tmp_path)
    run = tmp_path / "runs" / "quickstart" / "alone"
    (event,) = [each for each in read_events(run) if each["kind"] == "oom_retry"]
    found = [event[name] for name in ("step", "role", "key", "unit")]
    assert found == [1, "actor", KEY, "tokens"]
    assert event["after"] == event["before"] // 2
    assert f"retrying with {KEY}={event['after']}" in done.stderr
    assert [row.get("actor/oom_retries") for row in metrics(run)] == [None, 1.0, None]


def test_single_row_is_not_retried(tmp_path: Path, hungry: list[str]) -> None:
    options = ["--inline", "--name", "starved", "--retries", "3"]
    failed = rlctl(
        "train", "ppo", *options, *hungry, f"{LOSS_MODE}=hungry:starving", cwd=tmp_path, code=7
    )
    assert "out of memory with a single row of" in failed.stderr
    events = read_events(tmp_path / "runs" / "quickstart" / "starved")
    assert [each["proposed"] for each in events if each["kind"] == "out_of_memory"] == [None]
    assert len([each for each in events if each["kind"] == "attempt"]) == 1


@pytest.mark.soak
@pytest.mark.slow
def test_several_ranks_fail_with_a_proposed_budget(tmp_path: Path, hungry: list[str]) -> None:
    """Fail at once, although the other rank waits in a collective for up to `call_s`."""
    two = ["trainer.n_gpus_per_node=2", "trainer.save_freq=1"]
    done = rlctl("train", "ppo", "--name", "several", "--retries", "1", *hungry, *two, cwd=tmp_path)
    run = tmp_path / "runs" / "quickstart" / "several"
    events = {each["kind"]: each for each in read_events(run)}
    lack = events["out_of_memory"]
    assert (lack["key"], lack["value"]) == (KEY, 16384)
    assert f"rlctl resume @failed {KEY}={lack['proposed']}" in done.stderr
    assert events["retry"]["exit_code"] == 7
    assert [row["step"] for row in metrics(run)] == [0, 1, 2]
