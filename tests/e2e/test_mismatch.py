"""An engine with outdated weights: reported, stopped, and corrected as far as weights can."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Self

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from rlctl.__main__ import main
from rlctl.runtime.rollout.engine import EngineSpec
from rlctl.runtime.rollout.hf import HFEngine
from tests.e2e import command
from tests.e2e.killed_runs import events

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
def stale(settings: list[str], tmp_path: Path) -> list[str]:
    (tmp_path / "letters.py").write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    return float(len(set(solution_str)) % 3)\n"
    )
    return [
        *settings,
        f"reward.custom_reward_function.path={tmp_path}/letters.py",
        "reward.num_processes=1",
        f"actor_rollout_ref.rollout.name={__name__}:StaleEngine",
        "actor_rollout_ref.actor.optim.lr=0.02",
        "trainer.total_training_steps=3",
        "data.val_files=null",
        f"trainer.run_dir={tmp_path}/runs",
    ]


def steps(run: Path) -> dict[int, dict[str, Any]]:
    """Return the metrics of each training step."""
    return {row["step"]: row for row in command.metrics(run) if row["step"]}


# With GRPO and one mini-batch, the update itself compares before its step.
ONE_UPDATE = ["actor_rollout_ref.actor.ppo_mini_batch_size=8", "actor_rollout_ref.rollout.n=2"]


@pytest.mark.parametrize(("recipe", "sizes"), [("ppo", []), ("grpo", ONE_UPDATE)])
def test_halt_stops_before_learning(
    recipe: str, sizes: list[str], stale: list[str], tmp_path: Path, capsys: Capsys
) -> None:
    given = [*stale, *sizes, "trainer.mismatch.halt=0.005"]
    assert main(["train", recipe, "--inline", "--name", "x", *given]) == 1
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
    ours, theirs = (
        dump["log_probs"].values.double(),
        dump["batch"].rollout_log_probs.values.double(),
    )
    assert float((ours.exp() - theirs.exp()).abs().mean()) == pytest.approx(halt["value"])
    assert json.loads((run / "run.json").read_text())["exit_code"] == 1


def test_responses_of_a_file_are_not_compared(tmp_path: Path) -> None:
    """The engine has generated others, for the validation before the first step."""
    short = ["trainer.total_training_steps=1", "data.val_max_samples=4", "data.train_batch_size=8"]
    given = [*short, "actor_rollout_ref.actor.ppo_mini_batch_size=8", "trainer.mismatch.halt=1e-9"]
    where = f"trainer.run_dir={tmp_path}/runs"
    assert main(["train", "dpo", "--inline", "--name", "x", *given, where]) == 0


def test_stale_runs_warn_and_are_changed_by_corrections(
    stale: list[str], tmp_path: Path, capsys: Capsys
) -> None:
    """A correction changes only rounding in the first step, whose weights are current."""
    limits = ["trainer.mismatch.warn=0.001", "trainer.mismatch.halt=null"]
    on = [
        "algorithm.rollout_correction.rollout_is=token",
        "algorithm.rollout_correction.rollout_is_threshold=2",
    ]
    for name, num_steps, overrides in (("off", 4, []), ("on", 2, on)):
        given = [*stale, *limits, f"trainer.total_training_steps={num_steps}", *overrides]
        assert main(["train", "ppo", "--inline", "--name", name, *given]) == 0
    runs = tmp_path / "runs" / "quickstart"
    [alarm] = [each for each in events(runs / "off", "alarm") if each["name"] == "rollout_mismatch"]
    assert (alarm["step"], alarm["limit"]) == (4, 0.001)
    assert "rollout mismatch" in capsys.readouterr().err
    off, corrected = (steps(runs / name) for name in ("off", "on"))
    assert corrected[1]["rollout_corr/rollout_is_mean"] == pytest.approx(1.0, abs=1e-4)
    assert corrected[1]["actor/grad_norm"] == pytest.approx(off[1]["actor/grad_norm"], rel=1e-3)
    assert corrected[2]["rollout_corr/rollout_is_std"] > 0.01
    difference = abs(corrected[2]["actor/grad_norm"] - off[2]["actor/grad_norm"])
    assert difference > 1e-3 * off[2]["actor/grad_norm"]
