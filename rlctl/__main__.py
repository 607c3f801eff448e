"""The process `rlctl`: runs the command and turns whatever ends it into one message on stderr and an exit code."""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import traceback
from collections.abc import Sequence
from types import FrameType
from typing import NoReturn

from rlctl.errors import InternalError, Problem, Terminated, UsageError, as_ours
from rlctl.log import logging_to_stderr


def main(argv: Sequence[str] | None = None) -> int:
    """Run `rlctl` with `argv` (the process's own arguments by default).

    Returns the exit code: 0, that of the error (`rlctl.errors`), 70 for a defect, 130 after Ctrl-C. A signal leaves as `Terminated`.
    """
    _unwind_on_signals()
    try:
        with logging_to_stderr():
            code = _run(argv)
        sys.stdout.flush()
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except BrokenPipeError:
        # The reader (`rlctl runs | head`) has seen enough. Python would complain once more when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (
        Exception
    ) as error:  # the outermost frame: the last place that can turn a defect into a message
        ours = as_ours(error)
        return (
            _report(ours.problems, ours.exit_code)
            if ours
            else _report([_defect(error)], InternalError.exit_code)
        )
    return code


def _run(argv: Sequence[str] | None) -> int:
    """The command's exit code; what Typer says of a wrong command line becomes a `UsageError`, in the style of all other errors."""
    import typer

    from rlctl.cli import app

    try:
        result = app(args=argv, prog_name="rlctl", standalone_mode=False)
    except typer.Abort:
        return 128 + signal.SIGINT
    except typer.TyperException as error:
        message = error.format_message().rstrip(".").replace("Value error, ", "")
        if not message:  # a family without a command: its help has been printed already
            return error.exit_code
        context = getattr(error, "ctx", None)
        path = context.command_path if context else "rlctl"
        raise UsageError(
            message[:1].lower() + message[1:], hint=f"`{path} --help` lists what it takes"
        ) from error
    return result if isinstance(result, int) else 0


def _report(problems: Sequence[Problem], code: int) -> int:
    from rlctl.cli.console import print_problems

    if _debug():
        traceback.print_exc()
    print_problems(problems)
    return code


def _defect(error: Exception) -> Problem:
    """What to say of an exception that nobody foresaw; its traceback goes to a file, not over the user's terminal."""
    message = f"internal error: {type(error).__name__}: {error}"
    if _debug():
        return Problem(message)
    with tempfile.NamedTemporaryFile(
        "w", prefix="rlctl-traceback-", suffix=".txt", delete=False
    ) as file:
        traceback.print_exc(file=file)
    return Problem(
        message,
        where=file.name,
        hint="this is a defect of rlctl: please report it with that file; `rlctl --debug …` prints it",
    )


def _debug() -> bool:
    return os.environ.get("RLCTL_DEBUG", "0") not in ("", "0")


def _unwind_on_signals() -> None:
    """Let SIGTERM and SIGHUP unwind the stack as Ctrl-C does, so that workers are stopped and files closed; `nohup` stays in force."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, _terminate)


def _terminate(number: int, _frame: FrameType | None) -> NoReturn:
    """Unwind once: `timeout` and cluster managers signal a process and its group, and the second signal must not cut the clean-up short."""
    for other in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(other, lambda *_: None)
    raise Terminated(number)


if __name__ == "__main__":
    sys.exit(main())
