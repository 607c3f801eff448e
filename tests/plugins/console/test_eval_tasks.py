"""`rlctl eval --tasks`: metrics of lm-evaluation-harness, and errors with and without it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

import rlctl
from rlctl import packages
from rlctl.__main__ import main
from rlctl.data_prep.arithmetic import train_and_validation
from rlctl.data_prep.rows import PromptRow
from rlctl.installer import adapted
from rlctl.quickstart import NAME as MODEL


@pytest.fixture(autouse=True)
def _in_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RLCTL_RUNS", raising=False)


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["--limit", "4"], 2, "--limit needs --tasks"),
        (["--num-fewshot", "0"], 2, "--num-fewshot needs --tasks"),
        (["--task-dir", "."], 2, "--task-dir needs --tasks"),
        (["--no-chat-template"], 2, "--no-chat-template needs --tasks"),
        (["--tasks", "a", "--samples", "2"], 2, "--samples and --tasks cannot be combined"),
        (["--tasks", "a,,b"], 2, "a name in --tasks 'a,,b' is empty"),
        (["--tasks", "a", "--limit", "0"], 2, "invalid value for '--limit'"),
        (["--tasks", "a", "--task-dir", "nope"], 4, "there is no folder 'nope'"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_options_that_do_not_combine(
    words: list[str], code: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["eval", MODEL, *words]) == code
    assert message in capsys.readouterr().err


def test_without_lm_eval_the_command_that_installs_it_is_given(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(packages, "find_spec", lambda _: None)
    command = adapted("pip install 'rlctl[lm-eval]'")
    assert main(["eval", MODEL, "--tasks", "a"]) == 6
    assert f"help: {command}" in capsys.readouterr().err


def evaluated(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    """Return the JSON document of a successful evaluation on the task."""
    assert main(["eval", MODEL, "--task-dir", ".", "--tasks", NAME, *words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.extra("lm-eval")
def test_a_local_task_scores_the_responses_that_rlctl_generates(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = write_task(tmp_path)[:4]
    found = evaluated(capsys, "--limit", "4")
    responses = rlctl.generate(MODEL, [question(row) for row in rows], max_tokens=48)
    right = [is_right(row, each.text) for row, each in zip(rows, responses, strict=True)]
    assert sum(right) > 0
    [score] = found["results"]
    assert score.pop("stderr") >= 0
    assert score == {
        "task": NAME,
        "metric": "exact_match",
        "filter": "number",
        "value": sum(right) / 4,
        "num_fewshot": 0,
        "num_samples": 4,
    }
    assert (found["limit"], found["chat_template"]) == (4, True)


@pytest.mark.extra("lm-eval")
@pytest.mark.soak  # lm-eval reads all of its tasks: 15 s
def test_few_shot_prompts_as_plain_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_task(tmp_path)
    found = evaluated(capsys, "--limit", "2", "--num-fewshot", "1", "--no-chat-template")
    assert found["results"][0]["num_fewshot"] == 1
    assert found["chat_template"] is False


def failed(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    """Return exit code and stderr."""
    return main(["eval", MODEL, *words]), capsys.readouterr().err


@pytest.mark.extra("lm-eval")
@pytest.mark.soak  # lm-eval reads all of its tasks: 15 s
def test_an_unknown_task_proposes_the_nearest(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_task(tmp_path)
    code, message = failed(capsys, "--tasks", "gsm8kk,rlctl_sum", "--task-dir", ".")
    assert code == 4
    assert "lm-eval has no task 'gsm8kk'" in message
    assert f"did you mean {NAME}?" in message


@pytest.mark.extra("lm-eval")
@pytest.mark.soak  # lm-eval reads all of its tasks: 15 s
def test_data_that_cannot_be_downloaded(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise ConnectionError("the hub cannot be reached")

    monkeypatch.setattr("datasets.load_dataset", refuse)
    code, message = failed(capsys, "--tasks", "gsm8k")
    assert code == 7
    assert "cannot load the task 'gsm8k': its data cannot be downloaded" in message


@pytest.mark.extra("lm-eval")
@pytest.mark.soak  # lm-eval reads all of its tasks: 15 s
def test_a_wrong_task_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_task(tmp_path)
    file = tmp_path / "sums.yaml"
    file.write_text(file.read_text().replace("generate_until", "sing"))
    code, message = failed(capsys, "--tasks", NAME, "--task-dir", ".")
    assert code == 3
    assert f"cannot load the task '{NAME}': ValueError: Got invalid output_type 'sing'" in message


NAME = "rlctl_sums"
FINAL = r"#### (\d+)"


def write_task(folder: Path, num_rows: int = 8) -> list[PromptRow]:
    """Write the task `NAME` to `folder` and return its rows."""
    few, rows = train_and_validation(4, num_rows, seed=3, level=1, careless=0.0)
    for file, some in (("few", few), ("rows", rows)):
        lines = [{"question": question(row), "final": str(row.ground_truth)} for row in some]
        (folder / f"{file}.jsonl").write_text("\n".join(map(json.dumps, lines)))
    task = {
        "task": NAME,
        "dataset_path": "json",
        "dataset_kwargs": {
            "data_files": {"train": str(folder / "few.jsonl"), "test": str(folder / "rows.jsonl")},
            "cache_dir": str(folder / "cache"),
        },
        "fewshot_split": "train",
        "test_split": "test",
        "output_type": "generate_until",
        "doc_to_text": "{{question}}",
        "doc_to_target": "{{final}}",
        "generation_kwargs": {"until": ["\n\n\n"], "do_sample": False, "max_gen_toks": 48},
        "filter_list": [
            {
                "name": "number",
                "filter": [
                    {"function": "regex", "regex_pattern": FINAL},
                    {"function": "take_first"},
                ],
            }
        ],
        "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
    }
    (folder / "sums.yaml").write_text(yaml.safe_dump(task))
    return rows


def question(row: PromptRow) -> str:
    return str(row.prompt[-1]["content"])


def is_right(row: PromptRow, text: str) -> bool:
    """Return True if the number that the task extracts from a response is the row's."""
    found = re.findall(FINAL, text)
    return bool(found) and found[0] == row.ground_truth
