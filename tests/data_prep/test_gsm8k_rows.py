"""GSM8K: the text and the schema of SEMANTICS, from any of its forms."""

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

REAL = Path(__file__).parents[3] / "shared" / "data" / "gsm8k"
RECORDS = [
    {
        "question": "How many?  Two\u2019s.",
        "answer": "It is 1,000 + 1,000 = <<1000+1000=2000>>2,000\n#### 2,000",
    },
    {"question": "And less?", "answer": "#### -5"},
]
SUFFIX = ' Let\'s think step by step and output the final answer after "####".'


def wanted(split: str) -> list[PromptRow]:
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
def test_every_form_of_the_source(tmp_path: Path, form: str) -> None:
    for split in ("train", "test"):
        path = tmp_path / form.replace("train", split)
        path.parent.mkdir(exist_ok=True)
        if path.suffix == ".jsonl":
            path.write_text("\n".join(json.dumps(record) for record in RECORDS))
        else:
            pq.write_table(pa.Table.from_pylist(RECORDS), path)
    assert load_gsm8k(tmp_path) == {"train": wanted("train"), "test": wanted("test")}


def test_sources_that_will_not_do(tmp_path: Path) -> None:
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


def test_without_a_hub_the_error_names_the_way_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9"
    )  # nobody listens there
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    started = time.monotonic()
    with pytest.raises(ResourceError, match="--source DIR"):
        load_gsm8k(None)
    assert time.monotonic() - started < 10


@pytest.mark.skipif(not REAL.is_dir(), reason="the real GSM8K is not here")
def test_the_real_one(tmp_path: Path) -> None:
    splits = load_gsm8k(REAL)
    assert {split: len(rows) for split, rows in splits.items()} == {"train": 7473, "test": 1319}
    first = splits["test"][0]
    assert first.prompt[0]["content"].startswith("Janet\u2019s ducks lay 16 eggs per day.")
    assert first.prompt[0]["content"].endswith("farmers' market?" + SUFFIX)
    assert first.ground_truth == "18"
    assert not any("," in row.ground_truth for rows in splits.values() for row in rows)
    for method in METHODS:  # every reference solution is right, by every scorer; verl's flexible one stumbles over commas
        missed = sum(
            score("", row.extra_info["answer"], row.ground_truth, method=method) != 1
            for row in splits["train"]
        )
        assert missed == (
            sum("," in row.extra_info["answer"].split("#### ")[1] for row in splits["train"])
            if method == "verl_flexible"
            else 0
        )
    write_rows(tmp_path / "test.parquet", splits["test"])
    assert read_rows(tmp_path / "test.parquet") == splits["test"]
