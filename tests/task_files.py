"""Task of lm-evaluation-harness with local data: the quickstart's problems."""

from __future__ import annotations

import json
import re
from pathlib import Path

import yaml

from rlctl.data_prep.arithmetic import train_and_validation
from rlctl.data_prep.rows import PromptRow

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
