"""Tests of the GSM8K data set: prompts and rows, from each form of its files."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rlctl.data_prep.gsm8k import load_gsm8k
from rlctl.data_prep.rows import PromptRow, read_rows, write_rows
from rlctl.errors import ConfigError, NotFoundError, ResourceError
from rlctl.runtime.rewards.gsm8k import METHODS, score

EXTRACT = Path(__file__).parents[1] / "data" / "gsm8k"
TRAIN = "72 10 5 42 624 35 48 16 41 990 121 5 85 35 5 448000 800 43 1080 850000".split()
TEST = "18 3 70000 540 20 64 260 160 45 2125".split()
RECORDS = [
    {
        "question": "How many?  Two\u2019s.",
        "answer": "It is 1,000 + 1,000 = <<1000+1000=2000>>2,000\n#### 2,000",
    },
    {"question": "And less?", "answer": "#### -5"},
]
SUFFIX = ' Let\'s think step by step and output the final answer after "####".'


def expected(split: str) -> list[PromptRow]:
    return [
        PromptRow(
            data_source="openai/gsm8k",
            prompt=[{"role": "user", "content": record["question"] + SUFFIX}],
            ground_truth=truth,
            ability="math",
            style="rule",
            extra_info={
                "split": split,
                "index": index,
                "question": record["question"],
                "answer": record["answer"],
            },
        )
        for index, (record, truth) in enumerate(zip(RECORDS, ("2000", "-5"), strict=True))
    ]


@pytest.mark.parametrize(
    "form", ["train.jsonl", "train-00000-of-00001.parquet", "main/train-00000-of-00001.parquet"]
)
def test_all_forms_of_the_source_give_the_same_rows(tmp_path: Path, form: str) -> None:
    for split in ("train", "test"):
        path = tmp_path / form.replace("train", split)
        path.parent.mkdir(exist_ok=True)
        if path.suffix == ".jsonl":
            path.write_text("\n".join(json.dumps(record) for record in RECORDS))
        else:
            pq.write_table(pa.Table.from_pylist(RECORDS), path)
    assert load_gsm8k(tmp_path) == {"train": expected("train"), "test": expected("test")}


def test_invalid_sources_raise(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="not a folder"):
        load_gsm8k(tmp_path / "none")
    with pytest.raises(NotFoundError, match="no train split"):
        load_gsm8k(tmp_path)
    (tmp_path / "train.jsonl").write_text(
        '{"question": "q", "answer": "#### 1"}\n{"question": "q", "answer": "1"}\n'
    )
    with pytest.raises(ConfigError, match="not a GSM8K record") as caught:
        load_gsm8k(tmp_path)
    assert [problem.where for problem in caught.value.problems] == [f"{tmp_path}/train.jsonl:2"]


def test_unreachable_hub_raises_with_a_hint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")  # no server
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    slept: list[float] = []
    monkeypatch.setattr(time, "sleep", slept.append)  # between attempts
    with pytest.raises(ResourceError, match="--source DIR"):
        load_gsm8k(None)
    assert sum(slept) < 10


def test_real_records(tmp_path: Path) -> None:
    splits = load_gsm8k(EXTRACT)
    truths = {split: [row.ground_truth for row in rows] for split, rows in splits.items()}
    assert truths["train"] == TRAIN
    assert truths["test"] == TEST
    first = splits["test"][0]
    assert first.prompt[0]["content"].startswith("Janet\u2019s ducks lay 16 eggs per day.")
    assert first.prompt[0]["content"].endswith("farmers' market?" + SUFFIX)
    write_rows(tmp_path / "test.parquet", splits["test"])
    assert read_rows(tmp_path / "test.parquet") == splits["test"]


@pytest.mark.parametrize("method", METHODS)
def test_reference_solutions_score_1(method: str) -> None:
    """All solutions score 1, but verl's flexible method fails at thousands separators."""
    for row in [row for rows in load_gsm8k(EXTRACT).values() for row in rows]:
        solution = row.extra_info["answer"]
        fails = method == "verl_flexible" and "," in solution.split("#### ")[1]
        result = score("", solution, row.ground_truth, method=method)
        assert result["score"] == (0 if fails else 1)
