"""Evaluation sets from files with the real columns, their rewards, and comparisons of models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rlctl.data_prep.rows import PromptRow, read_rows
from rlctl.plugins.objectives import choice, countdown, ifeval
from rlctl.plugins.objectives.countdown import CountdownParams
from rlctl.runtime.rewards.math_answers import score as math_score
from tests.e2e.command import rlctl

RECORDS: dict[str, dict[str, Any]] = {
    "math500": {
        "problem": "Convert $(0,3)$ to polar coordinates.",
        "solution": "We have $r = 3$.",
        "answer": "\\left( 3, \\frac{\\pi}{2} \\right)",
        "subject": "Precalculus",
        "level": 2,
        "unique_id": "test/precalculus/807.json",
    },
    "aime24": {"id": 60, "problem": "Aya walks.", "solution": "…", "answer": "204", "year": "2024"},
    "aime25": {"id": "0", "problem": "Find the sum of bases b.", "answer": "70"},
    "amc23": {"id": 0, "question": "Cities A and B", "answer": "27.0", "url": "…"},
    "minerva": {"question": "How far is it, in km?", "answer": "4.5e33"},
    "gpqa": {
        "Question": "Which one?\n",
        "Correct Answer": "right",
        "Incorrect Answer 1": "w1",
        "Incorrect Answer 2": "w2",
        "Incorrect Answer 3": "w3",
        "Record ID": "rec0",
        "High-level domain": "Physics",
    },
    "ifeval": {
        "key": 1000,
        "prompt": "Write without commas, in at least 3 words.",
        "instruction_id_list": ["punctuation:no_comma", "length_constraints:number_words"],
        "kwargs": [
            {"num_words": None, "relation": None},
            {"num_words": 3, "relation": "at least"},
        ],
    },
}


def prepared(name: str, tmp_path: Path, *records: dict[str, Any]) -> list[PromptRow]:
    file = tmp_path / f"{name}.parquet"
    pq.write_table(pa.Table.from_pylist(list(records)), file)
    rlctl("prep", name, "--source", file, "--out", tmp_path / name, cwd=tmp_path)
    return read_rows(tmp_path / name / "test.parquet")


@pytest.mark.parametrize("name", ["math500", "aime24", "aime25", "amc23", "minerva"])
def test_mathematics_is_scored(name: str, tmp_path: Path) -> None:
    (row,) = prepared(name, tmp_path, RECORDS[name])
    text = row.prompt[0]["content"]
    assert text.startswith(RECORDS[name].get("problem") or RECORDS[name]["question"])
    answer = RECORDS[name]["answer"]
    given = (row.data_source, f"So \\boxed{{{answer}}}.", row.ground_truth)
    assert math_score(*given)["score"] == 1.0


def test_choices_are_shuffled_by_the_number_of_the_row(tmp_path: Path) -> None:
    rows = prepared("gpqa", tmp_path, *[RECORDS["gpqa"]] * 20)
    assert rows == prepared("gpqa", tmp_path, *[RECORDS["gpqa"]] * 20)
    assert {row.ground_truth for row in rows} == set("ABCD")
    for row in rows:
        assert f"({row.ground_truth}) right\n" in row.prompt[0]["content"]


@pytest.mark.parametrize(
    ("text", "pred"),
    [
        ("The answer is (C).", "C"),
        ("the answer is A, or rather: the correct answer is **B**", "B"),
        ("So $\\boxed{\\text{D}}$", "D"),
        ("I think:\nB.", "B"),
        ("A triangle has 3 sides", None),
        ("<think>the answer is A</think> The answer is (D)", "D"),
    ],
)
def test_letters(text: str, pred: str | None) -> None:
    assert choice.score("", text, "B") == {"score": float(pred == "B"), "pred": pred}


def test_rows_with_an_unknown_instruction_are_named_and_left_out(tmp_path: Path) -> None:
    other = {
        **RECORDS["ifeval"],
        "instruction_id_list": ["language:response_language"],
        "kwargs": [{}],
    }
    file = tmp_path / "rows.jsonl"
    file.write_text(f"{json.dumps(RECORDS['ifeval'])}\n{json.dumps(other)}\n")
    done = rlctl("prep", "ifeval", "--source", file, "--out", tmp_path / "if", cwd=tmp_path)
    assert "leaving out 1 of 2 records: language:response_language cannot be checked" in done.stderr
    (row,) = read_rows(tmp_path / "if" / "test.parquet")
    assert row.ground_truth == [
        {"id": "punctuation:no_comma"},
        {"id": "length_constraints:number_words", "num_words": 3, "relation": "at least"},
    ]
    assert ifeval.score("", "one two three", row.ground_truth)["score"] == 1
    found = ifeval.score("", "one, two three", row.ground_truth)
    assert found == {"score": 0.0, "instructions": 0.5}
    with pytest.raises(ValueError, match="no check of language:response_language"):
        ifeval.score("", "x", [{"id": "language:response_language"}])


# By instruction: settings, responses that follow it, and others that do not.
INSTRUCTIONS: dict[str, tuple[dict[str, Any], list[str], list[str]]] = {
    "keywords:existence": ({"keywords": ["Red", "blue"]}, ["blue, red"], ["red"]),
    "keywords:frequency": (
        {"keyword": "red", "frequency": 2, "relation": "at least"},
        ["Red red"],
        ["red"],
    ),
    "keywords:forbidden_words": ({"forbidden_words": ["red"]}, ["redder"], ["a RED one"]),
    "keywords:letter_frequency": (
        {"letter": "a", "let_frequency": 2, "let_relation": "less than"},
        ["Alm"],
        ["Anna"],
    ),
    "length_constraints:number_sentences": (
        {"num_sentences": 2, "relation": "at least"},
        ["One. Two!", "It is 3.5. Good"],
        ["It is 3.5 now"],
    ),
    "length_constraints:number_paragraphs": (
        {"num_paragraphs": 2},
        ["a\n***\nb", "a ***b***"],
        ["a"],
    ),
    "length_constraints:number_words": (
        {"num_words": 3, "relation": "less than"},
        ["one two"],
        ["one two three"],
    ),
    "length_constraints:nth_paragraph_first_word": (
        {"num_paragraphs": 2, "nth_paragraph": 2, "first_word": "then"},
        ["First.\n\nThen, more."],
        ["First.\n\nMore then.", "Then."],
    ),
    "detectable_content:number_placeholders": ({"num_placeholders": 1}, ["[name]"], ["name"]),
    "detectable_content:postscript": ({"postscript_marker": "P.S."}, ["x\nP. S. y"], ["x"]),
    "detectable_format:number_bullet_lists": ({"num_bullets": 2}, ["* a\n- b"], ["* a", "**a**"]),
    "detectable_format:constrained_response": ({}, ["My answer is no."], ["No."]),
    "detectable_format:number_highlighted_sections": (
        {"num_highlights": 1},
        ["*a*"],
        ["* a", "**"],
    ),
    "detectable_format:multiple_sections": (
        {"section_spliter": "Section", "num_sections": 2},
        ["Section 1 a Section 2 b"],
        ["Section 1"],
    ),
    "detectable_format:json_format": ({}, ['```json\n{"a": 1}\n```', "[1]"], ["{a}"]),
    "detectable_format:title": ({}, ["<<A title>>\nx"], ["<<>>", "title"]),
    "combination:two_responses": ({}, ["a\n******\nb"], ["a", "a******a"]),
    "combination:repeat_prompt": ({"prompt_to_repeat": "Do it."}, ["do it. Yes"], ["Yes"]),
    "startend:end_checker": ({"end_phrase": "The end."}, ['So: "the end."'], ["The end"]),
    "startend:quotation": ({}, ['"a"'], ["a", '"']),
    "change_case:capital_word_frequency": (
        {"capital_frequency": 2, "capital_relation": "at least"},
        ["BIG and RED"],
        ["BIG"],
    ),
    "change_case:english_capital": ({}, ["ALL BIG"], ["All"]),
    "change_case:english_lowercase": ({}, ["all small"], ["All"]),
    "punctuation:no_comma": ({}, ["a b"], ["a, b"]),
}


@pytest.mark.parametrize("name", ifeval.CHECKS)
def test_each_instruction_is_checked(name: str) -> None:
    settings, right, wrong = INSTRUCTIONS[name]
    for text, expected in [*((text, 1.0) for text in right), *((text, 0.0) for text in wrong)]:
        found = ifeval.score("", text, [{"id": name, **settings}])
        assert found["score"] == expected, text
    assert ifeval.score("", "", [{"id": name, **settings}])["score"] == 0


def test_countdown_has_solutions_and_runs_no_code(tmp_path: Path) -> None:
    words = ("--train", "20", "--val", "5", "--largest", "20", "--out", tmp_path / "c")
    rlctl("prep", "countdown", *words, cwd=tmp_path)
    train, val = (read_rows(tmp_path / "c" / f"{name}.parquet") for name in ("train", "val"))
    assert (len(train), len(val)) == (20, 5)
    assert len({str(row.prompt) for row in train + val}) == 25
    assert list(countdown.draw(CountdownParams(train=20, val=5, largest=20)))[20:] == [
        (tuple(row.ground_truth["numbers"]), row.ground_truth["target"]) for row in val
    ]
    truth = {"target": 9, "numbers": [1, 2, 3]}
    for equation, expected in {
        "(1 + 2) * 3": (1.0, 1.0),
        "3*(2+1) = 9": (1.0, 1.0),
        "(1 + 2) * 3 + 0": (0.0, 1.0),
        "9": (0.0, 1.0),
        "9**9**9": (0.0, 0.0),
        "__import__('os').abort()": (0.0, 0.0),
        "1/(3-3)": (0.0, 0.0),
        "1.0 + 8": (0.0, 0.0),
        "(" * 150: (0.0, 0.0),
    }.items():
        found = countdown.score("", f"so <answer> {equation} </answer>", truth)
        assert (found["score"], found["format"]) == expected, equation
    assert countdown.score("", "9", truth)["score"] == 0
