"""Control characters never reach a terminal or a pipe; log records are printed with their level."""

from __future__ import annotations

import io
import json
import logging
import re
from dataclasses import replace
from pathlib import Path

import pytest
from rich.text import Text

from rlctl.__main__ import main
from rlctl.cli import console as console_module
from rlctl.data_prep.rows import PromptRow, write_rows
from rlctl.episodes import Episode, Message, Use
from rlctl.log import logging_to_stderr
from rlctl.runs.labels import LABELS_FILE
from rlctl.runs.run_dir import RunDir
from rlctl.safe_console import SafeConsole
from rlctl.terminal import visible
from rlctl.tracking.alarms import Alarm
from rlctl.tracking.console_tracker import ConsoleTracker
from rlctl.tracking.tracker import Sample
from tests.recorded import record

# Clear screen, title, hyperlink, bell, return, C1 CSI, bidirectional override and isolate.
HOSTILE = "a\x1b[2J\x1b]0;title\x07\x1b]8;;http://x\x1b\\b\rc\x9b31md\u202ee\u2066f\tg 数\u3000学"
FORBIDDEN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a data file, a run and its log, all with hostile text."""
    folder = tmp_path_factory.mktemp("hostile")
    row = PromptRow(HOSTILE, [{"role": "user", "content": HOSTILE}], HOSTILE)
    write_rows(folder / "data.parquet", [row])
    run = RunDir.create(folder / "runs", "p", "r", "ppo")
    run.update(recipe=HOSTILE, command=["rlctl", HOSTILE], state="finished", exit_code=0)
    fields = {"value": 1.0, "limit": 0.5, "hint": HOSTILE}
    run.event("alarm", name="kl", step=1, message=HOSTILE, **fields)
    (run.path / LABELS_FILE).write_text(json.dumps({"tags": [], "note": HOSTILE}))
    sample = Sample(HOSTILE, HOSTILE, HOSTILE, 0.0, {}, 3, "stop", HOSTILE)
    messages = (
        Message("assistant", HOSTILE, True, reward=1.0),
        Message("tool", HOSTILE, False, name=HOSTILE),
    )
    episode = Episode(HOSTILE, messages, (Use(HOSTILE, 0.1, HOSTILE),), error=HOSTILE)
    samples = [sample, replace(sample, episode=episode)]
    record(run.path, {1: {"critic/score/mean": 0.5}}, {1: samples})
    (run.attempt / "main-0.log").write_text(HOSTILE + "\n")
    return folder


@pytest.mark.parametrize(
    "words",
    [
        ["data", "show", "data.parquet"],
        ["show", "r"],
        ["show", "r", "--samples"],
        ["logs", "r"],
        ["watch", "r"],
        ["show", f"nope{HOSTILE}"],
        ["config", "keys", f"x{HOSTILE}"],
    ],
    ids=lambda words: " ".join(words[:2]) if HOSTILE not in words[-1] else "error",
)
def test_commands_escape_control_characters(
    folder: Path,
    words: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.delenv("RLCTL_RUNS", raising=False)
    main(words)
    out, err = capsys.readouterr()
    shown = out + err
    assert FORBIDDEN.findall(shown) == []
    assert "\\x1b[2J" in shown
    assert "\\x9b31m" in shown
    assert "\\u202e" in shown


def test_text_keeps_newlines_tabs_and_letters_of_all_scripts() -> None:
    assert visible("数\u3000学\n\té\u00a0x👩‍🔬") == "数\u3000学\n\té\u00a0x👩‍🔬"
    assert visible(HOSTILE).startswith("a\\x1b[2J\\x1b]0;title\\x07")


def test_a_console_on_a_terminal_keeps_only_its_own_codes() -> None:
    stream = io.StringIO()
    console = SafeConsole(file=stream, force_terminal=True, color_system="standard", width=400)
    console.print(Text(HOSTILE, style="red"))
    assert stream.getvalue().startswith("\x1b[31ma\\x1b[2J")
    assert FORBIDDEN.findall(re.sub(r"\x1b\[\d*m", "", stream.getvalue())) == []


def test_words_in_brackets_are_printed_as_they_are() -> None:
    stream, words = io.StringIO(), "trainer.logger=[console,jsonl] x=[/a] [bold]b"
    SafeConsole(file=stream, width=400).print(words)
    assert stream.getvalue() == f"{words}\n"


def test_alarms_on_the_console_and_logged_lines_are_escaped(
    capsys: pytest.CaptureFixture[str],
) -> None:
    ConsoleTracker().alarm(Alarm("kl", 1, 1.0, 0.5, HOSTILE, HOSTILE, over=False))
    with logging_to_stderr():
        logging.getLogger("rlctl.x").warning("read %s", HOSTILE)
    shown = capsys.readouterr().err
    assert FORBIDDEN.findall(shown) == []
    assert shown.count("\\x1b[2J") == 3  # message, hint, log


LOG = logging.getLogger("rlctl.some.module")


def test_records_are_printed_with_their_level(capsys):
    with logging_to_stderr():
        LOG.info("fetching %s", "x")
        LOG.warning("disk is full")
        LOG.error("step 3 hangs")
    assert capsys.readouterr().err == "fetching x\nwarning: disk is full\nerror: step 3 hangs\n"


def test_debug_records_are_dropped_and_nested_blocks_print_once(capsys):
    with logging_to_stderr(), logging_to_stderr():
        LOG.debug("detail")
        LOG.warning("once")
    assert capsys.readouterr().err == "warning: once\n"


def test_handler_is_removed_after_the_block(capsys, caplog):
    with logging_to_stderr():
        pass
    LOG.warning("later")
    assert capsys.readouterr().err == ""
    assert [record.message for record in caplog.records] == ["later"]


@pytest.mark.parametrize("width", [80, 100, 400])
def test_numbers_do_not_wrap(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.StringIO()
    narrow = SafeConsole(file=stream, width=width)
    monkeypatch.setattr(console_module, "stdout", lambda: narrow)
    runs = ["ppo-261121-024813-abc", "grpo-261121-024813-abd", "rloo-261121-024813-xyz"]
    rows = [
        ["val-core/rlctl/arithmetic/acc/mean@1", "at step", "40", *["1.64e+03"] * 3],
        ["", "best", "", "94.5 % @10", "96.9 % @20", "96.5 % @40"],
    ]
    narrow.print(console_module.table(["metric", "", "step", *runs], rows, right=["step", *runs]))
    lines = stream.getvalue().splitlines()
    assert max(map(len, lines)) <= width
    assert sum(line.count("1.64e+03") for line in lines) == 3
    (best,) = [line for line in lines if "best" in line]
    assert all(cell in best for cell in rows[1][3:])
