"""ETA and plain step line of the panel."""

from io import StringIO

import pytest
from rich.console import Console

from rlctl.monitoring.panel import Panel


def test_eta_is_pace_of_latest_steps_times_steps_left():
    panel = Panel(total_steps=100)
    assert panel.eta() is None
    panel.add(0, {}, at=0.0)
    assert panel.eta() is None
    for step in range(1, 30):
        panel.add(step, {}, at=10.0 + 2.0 * step)
    assert panel.eta() == pytest.approx(2.0 * 71)
    assert panel.line() == "step 29/100  eta 2m 22s"


def test_kl_is_that_to_the_reference() -> None:
    panel = Panel()
    panel.add(1, {"actor/ppo_kl": 0.5}, at=0.0)
    assert panel.line() == "step 1"
    panel.add(2, {"actor/ppo_kl": 0.5, "actor/kl_loss": 0.25}, at=0.0)
    assert panel.line() == "step 2  kl 0.25"


def test_line_has_turns_and_outcomes_of_episodes():
    panel = Panel()
    row = {"agent/turns/mean": 3.25, "agent/outcome/length": 0.25, "agent/outcome/done": 0.75}
    panel.add(1, row, at=0.0)
    assert panel.line() == "step 1  turns 3.2  75% done, 25% length"


def test_phases_beside_a_step_are_not_part_of_its_time() -> None:
    panel = Panel()
    row = {"timing_s/gen": 60.0, "timing_s/wait_rollouts": 2.0, "timing_s/update_actor": 2.0}
    for more, expected in (({}, "rollout 94%"), ({"async/engines_idle": 0.4}, "rollouts 50%")):
        panel.add(1, row | more, at=0.0)
        console = Console(width=120, record=True, file=StringIO())
        console.print(panel)
        assert expected in console.export_text()
