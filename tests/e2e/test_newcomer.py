"""Every mistake of a newcomer's first hour is answered with what would work."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.e2e.command import environment
from tests.e2e.newcomer import FILES, LOOKING_AROUND, RUNS, SETTINGS, Mistake, Shell


@pytest.fixture(scope="module")
def shell(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shell]:
    """Return a terminal in a folder with files of questions, none of them in rlctl's format."""
    folder = tmp_path_factory.mktemp("newcomer")
    pq.write_table(pa.table({"question": ["a"], "answer": ["b"]}), folder / "train.parquet")
    (folder / "questions.csv").write_text('question,answer\n"1, 2?",b\n')
    (folder / "qa.jsonl").write_text('{"question": "1+1?", "answer": "2"}\n')
    wide = {"COLUMNS": "300", "TERM": "xterm", "PAGER": "cat", "HF_HUB_OFFLINE": "1"}
    opened = Shell(folder, environment() | wide)
    yield opened
    opened.close()


def play(shell: Shell, mistakes: Sequence[Mistake]) -> None:
    """Type the commands and report all whose response does not help."""
    failures: list[str] = []
    for each in mistakes:
        code, printed = shell.run(each.command)
        missing = [text for text in each.help if text not in printed]
        if code != each.code or missing or "Traceback" in printed or "internal error" in printed:
            failures.append(f"$ rlctl {each.command}\n[exit {code}] {printed}\nmissing: {missing}")
    assert not failures, "\n\n".join(failures)


@pytest.mark.soak
def test_looking_around(shell: Shell) -> None:
    play(shell, LOOKING_AROUND)


def test_wrong_settings(shell: Shell) -> None:
    play(shell, SETTINGS)


def test_wrong_files_and_then_a_first_run(shell: Shell) -> None:
    play(shell, FILES)


def test_wrong_names_of_runs_and_metrics(shell: Shell) -> None:
    play(shell, RUNS)


def test_the_hour_has_forty_mistakes() -> None:
    assert len({*LOOKING_AROUND, *SETTINGS, *FILES, *RUNS}) >= 40
