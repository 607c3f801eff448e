"""Failed reward calls of the steps of a run: their metric, their alarm, and the end of the run."""

from __future__ import annotations

from dataclasses import dataclass

from rlctl.errors import RlctlError
from rlctl.runtime.base.batch import Scored
from rlctl.runtime.rewards.role import RuleReward
from rlctl.tracking.alarm_rules import FAILED_REWARDS
from rlctl.tracking.alarms import Alarms


@dataclass
class StepFailures:
    """Failures of `reward` in the steps of a run."""

    reward: RuleReward
    in_a_row: int = 0  # steps in which every reward has failed

    def check(self, scored: Scored, step: int, alarms: Alarms | None) -> dict[str, float]:
        """Return metrics of a step. Raises RlctlError after too many steps without a reward.

        The alarm of failed rewards gets the first error of the latest batch: a failure of the
        validation before is another one.
        """
        first = self.reward.last_error
        most = self.reward.max_failed_steps
        if alarms is not None and first is not None:
            alarms.details[FAILED_REWARDS] = first
        all_failed = len(scored) > 0 and bool(scored.failed.all())
        self.in_a_row = self.in_a_row + 1 if all_failed else 0
        if most is not None and self.in_a_row >= most:
            raise RlctlError(
                f"the reward of every response failed in {self.in_a_row} steps in a row, the last "
                f"being step {step}; the first error: {first}",
                where=f"reward.max_failed_steps={most}",
                hint="`rlctl logs RUN` has the first tracebacks, and `rlctl reward test` scores "
                "stored responses",
            )
        number = self.reward.pop_timeouts()
        return {"reward/num_timed_out": float(number)} if number else {}
