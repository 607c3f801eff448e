"""Updates with the baseline of ReMax, and none with a batch of an engine with outdated weights."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Self

import pytest
import torch
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedModel

from rlctl.__main__ import main
from rlctl.runtime.algorithms.ppo import PPO
from rlctl.runtime.rollout.engine import EngineSpec
from rlctl.runtime.rollout.hf import HFEngine
from rlctl.runtime.workers.actor import ActorWorker
from tests.e2e import command
from tests.e2e.killed_runs import events
from tests.recorded import watched
from tests.settings import given

METRIC = "training/rollout_probs_diff_mean"
Capsys = pytest.CaptureFixture[str]


class StaleEngine(HFEngine):
    """Takes weights once and never again."""

    loaded = False

    @classmethod
    def from_spec(cls, spec: EngineSpec, policy: PreTrainedModel | None) -> Self:  # noqa: ARG003
        return super().from_spec(spec, None)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        if not self.loaded:
            super().load_weights(weights)
        self.loaded = True


@pytest.fixture
def scored(settings: list[str], tmp_path: Path) -> list[str]:
    """Return the settings of a run whose score is the number of different letters."""
    (tmp_path / "letters.py").write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    return float(len(set(solution_str)))\n"
    )
    reward = f"reward.custom_reward_function.path={tmp_path}/letters.py"
    return [*settings, reward, *given(reward_processes=1, val=None, runs=f"{tmp_path}/runs")]


@pytest.fixture
def stale(scored: list[str]) -> list[str]:
    return [*scored, *given(engine=f"{__name__}:StaleEngine", lr=0.02, steps=3)]


def steps(run: Path) -> dict[int, dict[str, Any]]:
    """Return the metrics of each training step."""
    return {row["step"]: row for row in command.metrics(run) if row["step"]}


# With GRPO and one mini-batch, the update itself compares before its step.
ONE_UPDATE = given(mini_batch=8, n=2)


@pytest.mark.parametrize(("recipe", "sizes"), [("ppo", []), ("grpo", ONE_UPDATE)])
def test_halt_stops_before_learning(
    recipe: str, sizes: list[str], stale: list[str], tmp_path: Path, capsys: Capsys
) -> None:
    own = [*stale, *sizes, "trainer.mismatch.halt=0.005"]
    assert main(["train", recipe, "--inline", "--name", "x", *own]) == 1
    run = tmp_path / "runs" / "quickstart" / "x"
    [halt] = events(run, "mismatch_halt")
    assert (halt["step"], halt["metric"], halt["limit"]) == (2, METRIC, 0.005)
    assert list(steps(run)) == [1]
    assert steps(run)[1][METRIC] < 1e-5
    talk = capsys.readouterr().err
    assert f"{METRIC} is {halt['value']:.3g} in step 2, above trainer.mismatch.halt=0.005" in talk
    assert "Traceback" not in talk
    dump = torch.load(halt["batch"], weights_only=False)
    assert Path(halt["batch"]).parent == run / "attempts" / "1"
    found = dump["log_probs"], dump["batch"].rollout_log_probs
    ours, theirs = (each.values.double() for each in found)
    assert float((ours.exp() - theirs.exp()).abs().mean()) == pytest.approx(halt["value"])
    assert json.loads((run / "run.json").read_text())["exit_code"] == 1


@pytest.mark.plugin("objectives")
def test_responses_of_a_file_are_not_compared(tmp_path: Path) -> None:
    """The engine has generated others, for the validation before the first step."""
    own = given(steps=1, val_rows=4, batch=8, mini_batch=8, runs=f"{tmp_path}/runs")
    assert main(["train", "dpo", "--inline", "trainer.mismatch.halt=1e-9", *own]) == 0


def test_remax_subtracts_the_greedy_score(
    scored: list[str], shelf: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Overlong responses have a penalty, greedy ones too."""
    generated = watched(monkeypatch, ActorWorker, "generate_sequences")
    collected = watched(monkeypatch, PPO, "collect")
    updated = watched(monkeypatch, ActorWorker, "update")
    overrides = [
        *("algorithm.adv_estimator=remax", "reward.overlap=false", *given(steps=1), *ONE_UPDATE),
        *("algorithm.overlong_buffer.enable=true", "algorithm.overlong_buffer.len=4"),
    ]
    assert main(["train", "ppo", "--inline", *scored, *overrides]) == 0
    [answers] = [found for _, how, found in generated if how.get("greedy")]
    [(_, _, batch)], [((_, experience, *_), _, _)] = collected, updated
    assert len(answers) == 8
    assert len(batch) == len(experience) == 16

    def penalty(length: int) -> float:
        return -max(length - 8, 0) / 4

    tokenizer = AutoTokenizer.from_pretrained(shelf / "model")
    for row in range(16):
        ids = answers.response_ids.rows()[row // 2]
        text = tokenizer.decode(ids.tolist(), skip_special_tokens=True)
        baseline = len(set(text)) + penalty(len(ids))
        assert float(batch.greedy_scores[row]) == pytest.approx(baseline)
        score = float(batch.scores[row]) + penalty(len(batch.response_ids.rows()[row]))
        advantages = experience.advantages.rows()[row]
        assert advantages.tolist() == pytest.approx([score - baseline] * len(advantages), abs=1e-5)
    assert torch.equal(batch.prompt_ids.values, answers.repeat(2).prompt_ids.values)
