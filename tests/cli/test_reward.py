"""`rlctl reward test`: scores of stored responses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner, Result

from rlctl.cli import app, reward_scores
from rlctl.data_prep.rows import PromptRow, write_rows
from rlctl.errors import ConfigError, NotFoundError, RlctlError, UsageError

METHOD = "reward.params.gsm8k.method"
RESPONSES = ["it is 18", "#### 18.0", "#### 19"]


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    asked = [{"role": "user", "content": "?"}]
    rows = [PromptRow("openai/gsm8k", asked, "18", extra_info={"i": i}) for i in range(3)]
    write_rows(tmp_path / "rows.parquet", rows)
    return tmp_path / "rows.parquet"


@pytest.fixture
def responses(tmp_path: Path) -> Path:
    lines = (json.dumps({"response": text}) for text in RESPONSES)
    (tmp_path / "responses.jsonl").write_text("\n".join(lines))
    return tmp_path / "responses.jsonl"


def run(rows: Path, responses: Path, *arguments: str) -> Result:
    words = ["reward", "test", "--data", str(rows), "--responses", str(responses), *arguments]
    return CliRunner().invoke(app, words)


def scores(*arguments: Any) -> list[float]:
    result = run(*arguments, "--json")
    assert result.exit_code == 0, result.output
    return [each["score"] for each in json.loads(result.stdout)["answers"]]


@pytest.mark.parametrize(
    ("method", "wanted"),
    [
        ("strict", [0, 1, 0]),
        ("flexible", [1, 1, 0]),
        ("verl_strict", [0, 0, 0]),
        ("verl_flexible", [1, 0, 0]),
    ],
)
def test_each_method(rows: Path, responses: Path, method: str, wanted: list[float]) -> None:
    assert scores(rows, responses, f"{METHOD}={method}") == wanted


def test_each_format_of_responses(rows: Path, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, RESPONSES)))
    (tmp_path / "a.json").write_text(json.dumps([{"response": text} for text in RESPONSES]))
    (tmp_path / "a.txt").write_text("\n".join(RESPONSES) + "\n")
    pq.write_table(pa.table({"response": RESPONSES}), tmp_path / "a.parquet")
    for name in ("a.jsonl", "a.json", "a.txt", "a.parquet"):
        assert scores(rows, tmp_path / name, f"{METHOD}=flexible") == [1, 1, 0], name


def test_several_responses_per_row_are_consecutive(tmp_path: Path) -> None:
    asked = [{"role": "user", "content": "?"}]
    rows = [PromptRow("openai/gsm8k", asked, truth) for truth in ("1", "2")]
    write_rows(tmp_path / "two.parquet", rows)
    (tmp_path / "four.txt").write_text("#### 1\n#### 2\n#### 1\n#### 2\n")
    assert scores(tmp_path / "two.parquet", tmp_path / "four.txt") == [1, 0, 0, 1]


def test_parts_of_the_responses_are_printed_as_all_at_once(
    rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = [f"é #### {number}" for number in range(16, 28)]
    (tmp_path / "a.json").write_text(json.dumps(texts))
    shown = {}
    for size in (8192, 5):  # 5: one row with its four responses
        monkeypatch.setattr(reward_scores, "_PART", size)
        shown[size] = [run(rows, tmp_path / "a.json", *more) for more in ([], ["--json"])]
    whole, parts = ([each.stdout for each in shown[size]] for size in (8192, 5))
    assert parts[1] == whole[1]
    document = json.loads(whole[1])
    assert whole[1] == json.dumps(document, indent=2, ensure_ascii=False) + "\n"
    assert [each["response"] for each in document["answers"]] == texts
    assert sum(each["score"] for each in document["answers"]) == 1
    assert all(text in "".join(parts[0].split("\n")) for text in texts)
    assert shown[5][0].stderr == shown[8192][0].stderr


def test_a_custom_function_and_its_failures(rows: Path, responses: Path, tmp_path: Path) -> None:
    mine = tmp_path / "my reward.py"
    mine.write_text(
        "def f(solution_str, extra_info, **kwargs):\n"
        "    if extra_info['i'] == 1: raise RuntimeError('boom')\n"
        "    return {'score': 0.5, 'length': len(solution_str)}\n"
    )
    result = run(rows, responses, "--reward", f"{mine}:f", "--json")
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert [each["score"] for each in report["answers"]] == [0.5, 0.0, 0.5]
    assert report["answers"][0]["components"] == {"length": 8.0}
    assert report["answers"][1]["error"] == f"RuntimeError: boom ({mine}:2)"
    assert (report["num_errors"], report["num_timeouts"]) == (1, 0)
    assert report["mean"] == pytest.approx(1 / 3)
    shown = run(rows, responses, "--reward", f"{mine}:f")
    assert "length 8" in shown.stdout
    assert "mean score 0.3333, 1 errors" in shown.stderr
    mine.write_text("def f(**kwargs): raise RuntimeError('boom')\n")
    failed = run(rows, responses, "--reward", f"{mine}:f", "--json")
    assert isinstance(failed.exception, RlctlError)
    assert "the reward of 3 of 3 responses failed" in str(failed.exception)
    assert json.loads(failed.stdout)["num_errors"] == 3


def test_invalid_inputs(rows: Path, responses: Path, tmp_path: Path) -> None:
    assert isinstance(run(rows, tmp_path / "none").exception, NotFoundError)
    assert isinstance(run(rows, responses, "--reward", "gms8k").exception, ConfigError)
    assert isinstance(run(rows, responses, f"{METHOD}=loose").exception, ConfigError)
    (tmp_path / "four.txt").write_text("1\n2\n3\n4\n")
    assert "4 responses for 3 rows" in str(run(rows, tmp_path / "four.txt").exception)
    assert isinstance(run(rows, tmp_path / "four.txt").exception, UsageError)
    (tmp_path / "bad.jsonl").write_text('{"response": "x"}\n{"answer": "x"}\n3\n')
    caught = run(rows, tmp_path / "bad.jsonl").exception
    assert isinstance(caught, ConfigError)
    where = [problem.where for problem in caught.problems]
    assert where == [f"{tmp_path}/bad.jsonl:2", f"{tmp_path}/bad.jsonl:3"]
