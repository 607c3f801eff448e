"""Notices about a run (`trainer.notify`): the listener that starts their process.

A separate process watches the run, so that also a killed run is reported, and so that no receiver
can delay the run or make it fail.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from collections.abc import Collection
from pathlib import Path

from rlctl.errors import ConfigError, Problem, raise_problems
from rlctl.packages import require
from rlctl.plugins.console.notices import is_variable
from rlctl.recipes import schema
from rlctl.runs.events import EVENTS_FILE
from rlctl.runs.run_dir import RunDir
from rlctl.runtime.training.listeners import Listener

LOG = logging.getLogger(__name__)

KEY = "trainer.notify"
LOG_FILE = "notices.log"  # in the folder of an attempt
_HINT = (
    "name an environment variable that has the address, such as "
    "SLACK_URL=https://hooks.slack.com/services/…: records never have it"
)


def check_targets(targets: Collection[str]) -> None:
    """Raise the problems of all receivers; sends nothing."""
    problems: list[Problem] = []
    for target in targets:
        if "://" in target.split()[0]:
            problems.append(Problem("an address may be a secret", KEY, _HINT))
        elif is_variable(target):
            try:
                check_address(target)
            except ConfigError as error:
                problems += error.problems
    raise_problems(problems)


def check_address(variable: str) -> None:
    """Raise ConfigError if the variable has no address, and MissingExtraError without apprise."""
    if not os.environ.get(variable):
        message = f"the environment variable {variable} is not set"
        hint = f"{_HINT}; a command of one word is ./{variable}"
        raise ConfigError(message, where=KEY, hint=hint)
    require("apprise", f"{KEY}=[{variable}] needs apprise", "notify", KEY)
    from apprise import Apprise

    logging.getLogger("apprise").setLevel(logging.CRITICAL)  # it prints the address
    if not Apprise().add(os.environ[variable]):
        raise ConfigError(
            f"the environment variable {variable} has no address that can be notified",
            where=KEY,
            hint="a webhook of Slack, Discord or Teams, ntfy://ntfy.sh/TOPIC, mailto://…, "
            "json://…; see https://appriseit.com/services/",
        )


class Notify(Listener):
    """Listener that starts the process which watches the run and sends notices."""

    def __init__(self, run: RunDir, config: schema.Config) -> None:
        super().__init__(run, config)
        events = run.path / EVENTS_FILE
        order = {
            "folder": str(run.path.absolute()),
            "attempt": run.record.attempts,
            "begin": events.stat().st_size if events.exists() else 0,
            "targets": config.trainer.notify,
            "events": config.trainer.notify_on,
        }
        with (run.attempt / LOG_FILE).open("ab") as log:
            watcher = subprocess.Popen(
                [sys.executable, "-P", "-m", "rlctl.plugins.console.notices"],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                start_new_session=True,  # a signal to the run's group must not reach it
            )
        assert watcher.stdin is not None, "it is a pipe"
        with watcher.stdin as file:
            file.write(json.dumps(order).encode())
        self.watcher = watcher

    @classmethod
    def check(cls, config: schema.Config, run: Path | None, sources: Collection[str]) -> None:
        check_targets(config.trainer.notify)
