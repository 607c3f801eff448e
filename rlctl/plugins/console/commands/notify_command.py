"""`rlctl notify`: send a test notice to receivers of `trainer.notify`."""

from __future__ import annotations

import socket
from typing import Annotated

import typer

from rlctl.cli.console import print_json, print_table
from rlctl.cli.options import Json
from rlctl.errors import RlctlError

app = typer.Typer(add_completion=False)

_EXAMPLES = """
Examples:

  export SLACK_URL=https://hooks.slack.com/services/T0/B0/xyz

  rlctl notify SLACK_URL

  rlctl notify 'notify-send "$RLCTL_TITLE" "$RLCTL_BODY"'        a command

  rlctl train ppo 'trainer.notify=[URL]' 'trainer.notify_on=\\[failed,lost]'
"""


@app.command(epilog=_EXAMPLES)
def notify(
    targets: Annotated[
        list[str],
        typer.Argument(
            metavar="RECEIVER...",
            help="Environment variables that have an address of Slack, Discord, Teams, ntfy, "
            "e-mail or a hundred others of apprise, and shell commands.",
        ),
    ],
    as_json: Json = False,
) -> None:
    """Send a test notice to receivers of `trainer.notify`.

    Exit code 1 if one cannot be reached. A command gets the notice as RLCTL_EVENT, RLCTL_RUN,
    RLCTL_TITLE and RLCTL_BODY.
    """
    from rlctl.plugins.console.notices import Notice, error_of
    from rlctl.plugins.console.notify import check_targets

    check_targets(targets)
    body = f"a test of `rlctl notify` on {socket.gethostname()}"
    notice = Notice("finished", "test", "rlctl can reach you", body)
    errors = {target: error_of(notice, target) for target in targets}
    failed = [target for target, error in errors.items() if error]
    if as_json:
        print_json([{"receiver": target, "error": error} for target, error in errors.items()])
        raise typer.Exit(bool(failed))
    print_table(["receiver", "result"], [(name, error or "sent") for name, error in errors.items()])
    if failed:
        raise RlctlError(f"no notice could be sent to {', '.join(failed)}")
