"""Entry point of the `rlctl` process: runs the command and reports errors on stderr."""

from __future__ import annotations

import os
import signal
import sys
from typing import TYPE_CHECKING

# Other modules are imported in `main`, so that Ctrl-C while they load prints no traceback.
if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import FrameType
    from typing import Any, NoReturn

    from rlctl.errors import Problem, RlctlError


def main(argv: Sequence[str] | None = None) -> int:
    """Run `rlctl` with `argv` (by default, the arguments of the process).

    Returns the exit code: 0, that of the error (`rlctl.errors`), 70 for a bug, 130 after Ctrl-C.
    Raises `Terminated` on a signal.
    """
    try:
        return _main(sys.argv[1:] if argv is None else argv)
    except KeyboardInterrupt:
        return 128 + signal.SIGINT


def _main(argv: Sequence[str]) -> int:
    """Run the command and report its errors. Raises KeyboardInterrupt."""
    try:
        _open_closed_streams()
        _unwind_on_signals()
        import typer  # noqa: F401

        import rlctl.cli  # noqa: F401
        from rlctl.errors import InternalError
        from rlctl.log import logging_to_stderr
        from rlctl.redaction import redact_word
    except KeyboardInterrupt:
        print("interrupted before the start: nothing was written", file=sys.stderr)
        raise
    words = list(argv)
    # Trackers and Ray record the command line of the process.
    sys.argv[1:] = [redact_word(word) for word in sys.argv[1:]]
    try:
        with logging_to_stderr():
            code = _run(words)
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader (`rlctl runs | head`) has exited; the flush at exit must not fail as well.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (Exception, SystemExit) as error:
        from rlctl.causes import as_rlctl_error

        known = as_rlctl_error(error)
        if known is None:
            if isinstance(error, SystemExit):
                raise
            from rlctl.version_errors import outside_range

            words = [word for word in words if word == "--json"]
            known = outside_range(error) or InternalError(_bug(error))
        return _report(known, words)
    return code


def _open_closed_streams() -> None:
    """Open /dev/null in place of a closed stdout or stderr, which Python sets to None."""
    if sys.stdout is None:
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115


def _run(argv: Sequence[str]) -> int:
    """Run the command and return its exit code. Raises UsageError for errors of Typer."""
    import typer

    from rlctl.cli import app
    from rlctl.errors import UsageError

    try:
        result = app(args=list(argv), prog_name="rlctl", standalone_mode=False)
    except typer.Abort:
        return 128 + signal.SIGINT
    except typer.TyperException as error:
        message = error.format_message().rstrip(".").replace("Value error, ", "")
        if not message:  # a group without a command: its help is already printed
            return error.exit_code
        context = getattr(error, "ctx", None)
        if context and message.startswith(("Missing argument", "Missing option")):
            message = f"missing {_missing(context)}"
        from rlctl.cli.usage import explain

        raise UsageError(explain(message[:1].lower() + message[1:], error, argv)) from error
    return result if isinstance(result, int) else 0


def _missing(context: Any) -> str:
    """Name all required arguments and options that are missing; Typer names only the first."""
    return ", ".join(
        f"{parameter.param_type_name} {parameter.get_error_hint()}"
        for parameter in context.command.params
        if parameter.required and parameter.name not in context.params
    )


def _report(error: RlctlError, words: Sequence[str] = ()) -> int:
    """Print the problems of an error, the codes that `rlctl explain` describes, and `words` right.

    `words` are the command line. Returns the exit code.
    """
    from rlctl.cli.stderr import print_corrected, print_problems, print_see_also
    from rlctl.cli.usage import correct
    from rlctl.error_codes import code_of
    from rlctl.errors import UsageError

    if _debug():
        import traceback

        from rlctl.redaction import redact

        sys.stderr.write(redact(traceback.format_exc()))
    if "--json" in words:
        from rlctl.cli.json_errors import print_error, wants_json

        if wants_json(words):
            print_error(error)
    print_problems(error.problems)
    if not isinstance(error, UsageError):  # its help names `--help`
        codes = (problem.code or code_of(problem.message, error) for problem in error.problems)
        print_see_also(dict.fromkeys(codes))
    line, remaining = correct(words, error.problems, _problems_of if _is_planned(words) else None)
    if line is not None:
        print_corrected(line, remaining)
    return error.exit_code


def _is_planned(words: Sequence[str]) -> bool:
    """Return True for a start that failed late enough that `--dry-run` finds what is left."""
    elsewhere = any(word.startswith(("--address", "--json")) for word in words)
    return [*words[:1]] == ["train"] and not elsewhere and "torch" in sys.modules


def _problems_of(words: Sequence[str]) -> list[Problem]:
    """Return the problems of a start with this command line, which is not started."""
    import logging
    from contextlib import redirect_stderr, redirect_stdout
    from io import StringIO

    from rlctl.errors import RlctlError

    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with redirect_stdout(StringIO()), redirect_stderr(StringIO()):
            _run([*words, "--dry-run"])
    except RlctlError as error:
        return error.problems
    finally:
        logging.disable(before)
    return []


def _bug(error: Exception) -> Problem:
    """Describe an unexpected exception; without `--debug`, write its traceback to a file."""
    import tempfile
    import traceback

    from rlctl.errors import Problem
    from rlctl.redaction import redact

    message = f"internal error: {type(error).__name__}: {error}"
    if _debug():
        return Problem(message)
    with tempfile.NamedTemporaryFile(
        "w", encoding="utf-8", prefix="rlctl-traceback-", suffix=".txt", delete=False
    ) as file:
        file.write(redact(traceback.format_exc()))
    return Problem(
        message,
        where=file.name,
        hint="please report this bug with that file; `rlctl --debug …` prints the traceback",
    )


def _debug() -> bool:
    return os.environ.get("RLCTL_DEBUG", "0") not in ("", "0")


def _unwind_on_signals() -> None:
    """Raise `Terminated` on SIGTERM and SIGHUP, so that workers are stopped and files closed.

    Signals that are ignored (`nohup`) stay ignored.
    """
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, _terminate)


def _terminate(number: int, _frame: FrameType | None) -> NoReturn:
    """Raise `Terminated`; ignore further signals, which `timeout` and cluster managers send."""
    from rlctl.errors import Terminated

    for other in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(other, lambda *_: None)
    raise Terminated(number)


if __name__ == "__main__":
    sys.exit(main())
