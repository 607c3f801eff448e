"""The `rlctl` process: exit codes, messages, streams, signals and lazy imports."""

import json
import re
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from rlctl import __version__
from rlctl.cli import all_commands
from tests.architecture.source import HEAVY
from tests.processes import run_python
from tests.recorded import called, plain_environment


def rlctl(*arguments: str, **changes: str) -> subprocess.CompletedProcess[str]:
    return called(*arguments, **{"COLUMNS": "100"} | changes)


def started(*arguments: str, **options: Any) -> subprocess.Popen[str]:
    """Start a stand-in with its output in pipes; see `Popen` for the options."""
    code = f"{STAND_IN}\nfrom rlctl.__main__ import main\nsys.exit(main())"
    command = [sys.executable, "-c", code, *arguments]
    command = [*options.pop("before", []), *command]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(command, text=True, env=plain_environment(), **pipes | options)


# Replaces the module of `rlctl data` with commands that fail in different ways.
STAND_IN = """
import sys, time, types
import typer
from rlctl import errors
from rlctl.errors import Problem

app = typer.Typer(add_completion=False)

@app.command()
def bad(kind: str):
    first = Problem("this is wrong", "file.yaml:3", "do that")
    raise getattr(errors, kind)(first, Problem("so is this"))

@app.command()
def defect():
    raise ValueError("a secret bug")

@app.command()
def code(number: int):
    raise typer.Exit(number)

@app.command()
def chatter():
    for number in range(100_000):
        print(number)

@app.command()
def wait():
    try:
        print("ready", flush=True)
        while True:
            time.sleep(0.1)  # Python sleeps on if a signal comes just before the system call
    finally:
        time.sleep(0.3)
        print("cleaned up", flush=True)

module = types.ModuleType("rlctl.cli.commands.data")
module.app = app
sys.modules["rlctl.cli.commands.data"] = module
"""


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "rlctl.cli.commands.data", sys)  # restored at the end
    exec(STAND_IN, {})


def test_help_lists_every_command_on_stdout_and_loads_nothing_heavy():
    probe = (
        "import sys; from rlctl.__main__ import main; code = main(['--help']); "
        "print(*sorted({name.partition('.')[0] for name in sys.modules}), file=sys.stderr); "
        "sys.exit(code)"
    )
    done = run_python("-c", probe, env=plain_environment(COLUMNS="100"))
    assert done.returncode == 0
    for command in all_commands():
        assert re.search(rf"│ {command.name} +{re.escape((command.help or '')[:20])}", done.stdout)
    assert "--install-completion" in done.stdout
    loaded = set(done.stderr.split())
    assert "typer" in loaded
    assert not loaded & (HEAVY | {"pydantic"})


def test_the_list_shows_the_help_of_each_command():
    for command in all_commands():
        loaded = command.load()
        assert loaded.name == command.name
        first_line = (loaded.help or "").strip().split("\n\n")[0].replace("\n", " ")
        assert first_line == command.help, (
            f"rlctl {command.name}: the list of commands and the command itself differ"
        )
        assert all(param.name != "install_completion" for param in loaded.params)


def test_version():
    assert rlctl("--version").stdout == f"rlctl {__version__}\n"
    done = rlctl("version", "--json")
    versions = json.loads(done.stdout)
    assert (done.returncode, done.stderr) == (0, "")
    assert versions["rlctl"] == __version__
    assert versions["python"] == sys.version.split()[0]
    assert rlctl("version").stdout.splitlines()[1].split() == ["rlctl", __version__]


def test_no_command_shows_the_help_and_is_a_usage_error():
    done = rlctl()
    assert done.returncode == 2
    assert "Usage: rlctl" in done.stdout
    assert done.stderr == ""


@pytest.mark.parametrize(
    ("arguments", "message", "helper"),
    [
        (["rusn"], "no such command 'rusn'", "rlctl --help"),
        (["runs", "--jsn"], "no such option: --jsn", "rlctl runs --help"),
        (["runs", "-n", "many"], "invalid value for '-n' / '--number': ", "rlctl runs --help"),
        (
            ["prep", "jsonl", "--prompt-key=q"],
            "missing option '--out' / '-o', argument 'FILE'",
            "rlctl prep jsonl --help",
        ),
        (
            ["runs", "--state", "sleeping"],
            "invalid value for '--state': 'sleeping' is not one of ",
            "rlctl runs --help",
        ),
    ],
)
def test_usage_errors_are_printed_like_all_errors(arguments, message, helper):
    done = rlctl(*arguments)
    assert (done.returncode, done.stdout) == (2, "")
    first, help_line = done.stderr.splitlines()[:2]
    assert first.lower().startswith(f"error: {message}".lower())
    assert help_line.startswith("  help: ")
    assert help_line.endswith(f"`{helper}` lists arguments and options")


CODES = {
    "RlctlError": 1,
    "UsageError": 2,
    "ConfigError": 3,
    "NotFoundError": 4,
    "ConflictError": 5,
    "MissingExtraError": 6,
    "ResourceError": 7,
    "InternalError": 70,
}


@pytest.mark.usefixtures("stand_in")
def test_all_problems_of_an_error_are_printed_to_stderr():
    done = rlctl("data", "bad", "ConfigError")
    assert (done.returncode, done.stdout) == (3, "")
    assert (
        done.stderr
        == "error: this is wrong\n  at: file.yaml:3\n  help: do that\nerror: so is this\n"
        "  see: rlctl explain E-CONFIG\n"
    )
    colours = rlctl("data", "bad", "ConfigError", FORCE_COLOR="1").stderr
    assert "\x1b[1;31merror" in colours
    plain = rlctl("data", "bad", "ConfigError", FORCE_COLOR="1", NO_COLOR="1").stderr
    assert "\x1b[31m" not in plain


@pytest.mark.usefixtures("stand_in")
def test_exit_codes_of_errors_and_commands():
    for kind, code in CODES.items():
        assert rlctl("data", "bad", kind).returncode == code
    for code in ("7", "0"):
        assert rlctl("data", "code", code).returncode == int(code)


@pytest.mark.usefixtures("stand_in")
def test_an_internal_error_is_one_line_with_its_traceback_in_a_file(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    done = rlctl("data", "defect")
    assert (done.returncode, done.stdout) == (70, "")
    first, where, hint, see = done.stderr.splitlines()
    assert see == "  see: rlctl explain E-INTERNAL"
    assert first == "error: internal error: ValueError: a secret bug"
    file = Path(where.removeprefix("  at: "))
    assert file.parent == tmp_path
    assert "in defect" in file.read_text(encoding="utf-8")
    assert hint.startswith("  help: ")
    file.unlink()
    for arguments, changes in ((["--debug"], {}), ([], {"RLCTL_DEBUG": "1"})):
        done = rlctl(*arguments, "data", "defect", **changes)
        assert done.returncode == 70
        assert "in defect" in done.stderr
        assert "\nerror: internal error: ValueError: a secret bug\n" in done.stderr
        assert list(tmp_path.iterdir()) == []


def test_a_closed_pipe_prints_no_error():
    done = started("data", "chatter")
    assert done.stdout is not None
    assert done.stderr is not None
    assert done.stdout.readline() == "0\n"
    done.stdout.close()
    assert done.stderr.read() == ""
    assert done.wait(600) == 1


@pytest.mark.parametrize(
    ("signals", "code"),
    [
        ([signal.SIGTERM], 143),
        ([signal.SIGTERM, signal.SIGTERM], 143),
        ([signal.SIGHUP], 129),
    ],
)
def test_signals_unwind_the_command_and_have_their_code(signals, code):
    child = started("data", "wait")
    assert child.stdout is not None
    assert child.stdout.readline() == "ready\n"
    for number in signals:
        child.send_signal(number)
    out, err = child.communicate(timeout=600)
    assert (child.returncode, out, err) == (code, "cleaned up\n", "")


def test_nohup_ignores_sighup():
    quiet = subprocess.DEVNULL
    child = started("data", "wait", before=["nohup"], stderr=quiet, stdin=quiet)
    assert child.stdout is not None
    assert child.stdout.readline() == "ready\n"
    child.send_signal(signal.SIGHUP)
    with pytest.raises(subprocess.TimeoutExpired):
        child.wait(0.7)
    child.send_signal(signal.SIGTERM)
    assert child.wait(600) == 143
