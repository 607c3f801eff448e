"""Geometry3K data set (arXiv:2105.04165): problems about a figure, with verl's prompt."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from rlctl.data_prep.datasets import dataset, option
from rlctl.data_prep.decoded_images import require_pillow
from rlctl.data_prep.question_records import Fields, rows_from_records
from rlctl.data_prep.record_files import record_files
from rlctl.data_prep.rows import PromptRow
from rlctl.plugins import Params

DATA_SOURCE = "hiyouga/geometry3k"
INSTRUCTION = (
    "You FIRST think about the reasoning process as an internal monologue and then provide the "
    "final answer. The reasoning process MUST BE enclosed within <think> </think> tags. The final "
    "answer MUST BE put in \\boxed{}."
)
_FIELDS = Fields("problem", "answer", DATA_SOURCE, None, INSTRUCTION, "images")


class Geo3kParams(Params):
    """Options of `rlctl prep geo3k`."""

    source: str = option(
        DATA_SOURCE,
        "DIR",
        "Folder with the files of the splits train and test (parquet or JSONL), or a data set on "
        "the hub.",
    )


@dataset(
    Geo3kParams,
    "rlctl prep geo3k --out data/geo3k --model Qwen/Qwen3-VL-2B-Instruct --max-prompt-length 1024",
    default_out="data/geo3k",
)
def geo3k(params: Geo3kParams) -> dict[str, list[PromptRow]]:
    """Geometry3K: 2,101 training and 601 test problems about figures, in train and test.parquet."""
    require_pillow("rlctl prep geo3k")
    return {split: list(_rows(params.source, split)) for split in ("train", "test")}


def _rows(source: str, split: str) -> Iterator[PromptRow]:
    for row in rows_from_records(record_files([source], split), _FIELDS):
        extra_info = {"split": split, **row.extra_info, "answer": row.ground_truth}
        yield replace(row, ability="math", extra_info=extra_info)
