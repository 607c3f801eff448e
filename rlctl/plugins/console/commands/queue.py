"""`rlctl queue`: runs that wait for devices of this machine."""

from __future__ import annotations

import shlex
from typing import Annotated, Any

import typer

from rlctl.cli.console import print_json, print_table
from rlctl.cli.options import Json
from rlctl.cli.startup import announce
from rlctl.cli.stderr import notice
from rlctl.plugins.console.queue.queue_file import Entry, Queue, others

app = typer.Typer(help="Start runs as devices of this machine become free.", no_args_is_help=True)

_SHOWN = 10  # ended entries without --all
_COLUMNS = ("id", "state", "priority", "added", "began", "ended", "exit_code", "reason")
Number = Annotated[int, typer.Argument(metavar="ID", help="Number of an entry in `ls`.")]
_ADD = """
Examples:

  rlctl queue add train ppo --recipe mine.yaml trainer.seed=2

  rlctl queue add --priority 5 sweep ppo \\
    actor_rollout_ref.actor.optim.lr=1e-6,3e-6

  rlctl queue add --cores 4 train grpo --inline    two at once on eight cores
"""


@app.command(epilog=_ADD, context_settings={"allow_interspersed_args": False})
def add(
    command: Annotated[
        list[str],
        typer.Argument(metavar="COMMAND...", help="Line of `rlctl train`, `sweep` or `resume`."),
    ],
    priority: Annotated[
        int, typer.Option("--priority", "-p", help="Entries with a higher one start first.")
    ] = 0,
    cores: Annotated[
        int | None,
        typer.Option("--cores", min=1, help="Cores of a run on a CPU.", show_default="all"),
    ] = None,
    as_json: Json = False,
) -> None:
    """Check a command as its dry run does, and add it; it starts when its devices are free.

    It runs in this folder, with the variables of this shell and in a new session, so it continues
    after a logout. Options of `add` come before COMMAND.
    """
    from rlctl.plugins.console.queue.orders import checked, context_of

    queue = Queue()
    if len(command) == 1:
        command = shlex.split(command[0])
    context = context_of(command)
    as_json = as_json or bool(context.params.get("as_json"))  # --json at the end of the line
    announce("checking the command")
    entry = queue.add(checked(context).order(cores), priority)
    _wake(queue, [entry])
    message = f"added {entry.id}: {entry.order.name}; `rlctl queue ls` shows why it waits"
    _print(queue, entry, message, as_json)


@app.command(epilog="Example: rlctl queue ls --all --json")
def ls(
    every: Annotated[bool, typer.Option("--all", "-a", help="Also show older entries.")] = False,
    as_json: Json = False,
) -> None:
    """List entries in the order in which they start, and why they wait or failed."""
    queue = Queue()
    entries = queue.entries()
    _wake(queue, entries)
    ended = sorted((entry for entry in entries if entry.ended), key=lambda entry: entry.ended or "")
    shown = ended if every else ended[-_SHOWN:]
    for state in ("running", "waiting"):
        shown += [entry for entry in entries if entry.state == state]
    rows = _rows(queue, shown)
    if as_json:
        print_json(rows)
        return
    columns = ["id", "state", "run", "priority", "devices", "reason"]
    cells = [
        [", ".join(row[name]) if name == "devices" else str(row[name]) for name in columns]
        for row in rows
    ]
    if rows:
        print_table(columns, cells, right=["id", "priority"])
    else:
        notice("the queue is empty; `rlctl queue add train …` adds a run")
    if queue.paused:
        notice("the queue is paused; `rlctl queue start` continues")
    for folder, number in others(queue.folder).items():
        notice(f"{folder} has {number} entries of another machine, or of another name of this one")


@app.command(epilog="Example: rlctl queue move 7 1          start it next")
def move(
    number: Number,
    place: Annotated[int, typer.Argument(min=1, help="Place among those that wait.")],
    as_json: Json = False,
) -> None:
    """Move a waiting entry to a place; its priority becomes that of its neighbours there."""
    queue = Queue()
    entry = queue.move(number, place)
    _print(queue, entry, f"moved {number}: {entry.order.name}", as_json)


@app.command("rm", epilog="Example: rlctl queue rm 7 8")
def rm(
    numbers: Annotated[
        list[int], typer.Argument(metavar="ID...", help="Numbers of entries in `ls`.")
    ],
    as_json: Json = False,
) -> None:
    """Remove entries that wait or have ended; `rlctl stop RUN` stops one that runs."""
    Queue().remove(numbers)
    if as_json:
        print_json({"removed": numbers})
    else:
        notice(f"removed {', '.join(map(str, numbers))}")


@app.command(epilog="Example: rlctl queue pause && rlctl stop @last")
def pause(as_json: Json = False) -> None:
    """Start no more entries until `rlctl queue start`; running ones continue."""
    _pause(True, as_json)


@app.command(epilog="Example: rlctl queue start          in a crontab: @reboot rlctl queue start")
def start(as_json: Json = False) -> None:
    """Start entries again: after a pause, a reboot, or if the queue's process was killed."""
    _pause(False, as_json)


def _pause(paused: bool, as_json: bool) -> None:
    queue = Queue()
    queue.pause(paused)
    entries = queue.entries("waiting", "running")
    _wake(queue, entries)
    waiting = sum(entry.state == "waiting" for entry in entries)
    counts = {"paused": paused, "waiting": waiting, "running": len(entries) - waiting}
    if as_json:
        print_json(counts)
    else:
        state = "paused" if paused else "started"
        notice(f"{state}: {waiting} waiting, {counts['running']} running")


def _wake(queue: Queue, entries: list[Entry]) -> None:
    """Start the process of the queue if an entry needs it."""
    from rlctl.plugins.console.queue.worker import ensure_worker

    needed = {"running"} if queue.paused else {"running", "waiting"}
    if any(entry.state in needed for entry in entries):
        ensure_worker(queue)


def _rows(queue: Queue, entries: list[Entry]) -> list[dict[str, Any]]:
    """Return what `ls` shows of entries, with the reason why each waits."""
    from rlctl.plugins.console.queue.free_devices import choose

    waiting = queue.entries("waiting")
    choices = choose(waiting, queue.entries("running"))
    reasons = {choice.entry.id: choice.reason or "starts now" for choice in choices}
    if queue.paused:
        reasons = dict.fromkeys(reasons, "the queue is paused")
    return [
        {
            **{name: getattr(entry, name) for name in _COLUMNS},
            "run": entry.order.name,
            "path": entry.order.folder,
            "command": ["rlctl", *entry.order.words],
            "cwd": entry.order.cwd,
            "devices": entry.used,
            "reason": reasons.get(entry.id, entry.reason),
            "log": str(queue.log(entry)),
        }
        for entry in entries
    ]


def _print(queue: Queue, entry: Entry, message: str, as_json: bool) -> None:
    if as_json:
        print_json(_rows(queue, [entry])[0])
    else:
        notice(message)
