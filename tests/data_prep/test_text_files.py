"""CSV and JSONL of other programs: encodings, separators, empty cells."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rlctl.data_prep.preferences import PreferencesParams, preferences
from rlctl.data_prep.question_records import JsonlParams, jsonl
from rlctl.data_prep.records import read_records
from rlctl.data_prep.text_files import TextForm, encoding_of, text_form
from rlctl.errors import ConfigError, UsageError

ROWS = [("Größe von 3 + 4; gerundet?", "7"), ("Wie viel kosten 2 Äpfel, je 1 €?", "2")]


def table(delimiter: str, *more: str) -> str:
    lines = [["Frage", "Antwort"], *([f'"{question}"', answer] for question, answer in ROWS)]
    return "\r\n".join([*(delimiter.join(line) for line in lines), *more, ""])


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "cp1252", "utf-16", "utf-16-le"])
@pytest.mark.parametrize("delimiter", [",", ";", "\t", "|"])
def test_encoding_and_separator_are_found_and_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, encoding: str, delimiter: str
) -> None:
    (tmp_path / "a.csv").write_bytes(table(delimiter).encode(encoding))
    with caplog.at_level(logging.INFO):
        records = [record for _, record in read_records(tmp_path / "a.csv")]
        assert [record for _, record in read_records(tmp_path / "a.csv")] == records
    assert [(record["Frage"], record["Antwort"]) for record in records] == ROWS
    said = [record.message for record in caplog.records]
    assert len(said) == (not encoding.startswith("utf-8")) + (delimiter != ",")
    assert all("; --encoding names" in line or "; --delimiter names" in line for line in said)


def test_an_encoding_and_a_separator_may_be_named(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_bytes(table("#").encode("mac-roman"))
    form = text_form("mac-roman", "#")
    records = [record for _, record in read_records(tmp_path / "a.csv", form)]
    assert [tuple(record.values()) for record in records] == ROWS
    assert text_form(None, "tab") == TextForm(None, "\t")
    with pytest.raises(UsageError, match="no encoding 'utf8x'"):
        text_form("utf8x", None)
    with pytest.raises(UsageError, match="'ab' cannot separate fields"):
        text_form(None, "ab")
    with pytest.raises(ConfigError, match=r"not text in ASCII.*\n.*a\.csv:2"):
        list(read_records(tmp_path / "a.csv", TextForm("ascii")))


def test_damaged_utf_8_is_an_error_with_its_line(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_bytes(table(",").encode() + b"\xff,1\r\n")
    assert encoding_of(tmp_path / "a.csv") == "utf-8-sig"
    with pytest.raises(ConfigError) as caught:
        list(read_records(tmp_path / "a.csv"))
    (problem,) = caught.value.problems
    assert problem.message.startswith("not text in UTF-8: ")
    assert problem.where == f"{tmp_path}/a.csv:4"
    assert (problem.hint or "").startswith("--encoding NAME")


def test_json_lines_of_windows_are_read(tmp_path: Path) -> None:
    lines = [json.dumps({"q": "Größe?", "a": "7"}, ensure_ascii=False)] * 3
    for encoding in ("utf-16", "cp1252"):
        (tmp_path / "a.jsonl").write_bytes("\r\n".join(lines).encode(encoding))
        params = JsonlParams(files=[str(tmp_path / "a.jsonl")], prompt_key="q", answer_key="a")
        rows = list(jsonl(params)["train"])
        assert [row.prompt[0]["content"] for row in rows] == ["Größe?"] * 3
        with pytest.raises(ConfigError, match="`rlctl prep jsonl FILE` reads other encodings"):
            list(read_records(tmp_path / "a.jsonl"))


def test_empty_cells_are_named_or_skipped(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    more = ["Leer?;", ";8", ";", "", " ;9", "zu;viele;Felder", "Gut?;1"]
    file = tmp_path / "a.csv"
    file.write_text(table(";", *more), encoding="utf-8", newline="")
    params: dict[str, Any] = {"files": [str(file)], "prompt_key": "Frage", "answer_key": "Antwort"}
    with pytest.raises(ConfigError) as caught:
        jsonl(JsonlParams(**params))
    assert [(problem.message, problem.where) for problem in caught.value.problems] == [
        ("'Antwort' is null", f"{file}:4"),
        ("'Frage' is null", f"{file}:5"),
        ("'Frage' is null", f"{file}:8"),
        (
            "the line does not have the fields Frage, Antwort, separated by semicolons "
            "(--delimiter)",
            f"{file}:9",
        ),
    ]
    assert caught.value.problems[0].hint == "--skip-invalid leaves such records out and counts them"
    rows = jsonl(JsonlParams(**params, skip_invalid=True, val_fraction=0.34))
    assert (len(rows["train"]), len(rows["val"])) == (2, 1)
    kept = {row.extra_info["question"] for split in rows.values() for row in split}
    assert kept == {"Gut?", *(question for question, _ in ROWS)}
    (line,) = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert line.startswith(
        f"leaving out 4 of 7 records: 'Antwort' is null ({file}:4); "
        f"'Frage' is null ({file}:5, :8); the line does not have"
    )


def test_a_missing_number_is_no_answer(tmp_path: Path) -> None:
    pq.write_table(pa.table({"q": ["a", "b"], "a": [1.5, float("nan")]}), tmp_path / "a.parquet")
    params = JsonlParams(files=[str(tmp_path / "a.parquet")], prompt_key="q", answer_key="a")
    with pytest.raises(ConfigError, match=r"'a' is null\n.*row 1"):
        jsonl(params)


def test_pairs_are_read_from_any_csv(tmp_path: Path) -> None:
    lines = ["prompt;chosen;rejected", "Größe?;süß;groß"]
    (tmp_path / "a.csv").write_bytes("\n".join(lines).encode("cp1252"))
    (row,) = preferences(PreferencesParams(source=str(tmp_path / "a.csv")))["train"]
    assert (row.extra_info["chosen"], row.extra_info["rejected"]) == ("süß", "groß")
