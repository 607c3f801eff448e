"""GSM8K data set (arXiv:2110.14168): 7,473 training and 1,319 test problems with verl's prompt."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from rlctl.data_prep.agent_columns import ToolsParams, with_tools
from rlctl.data_prep.datasets import dataset, option
from rlctl.data_prep.records import convert
from rlctl.data_prep.rows import PromptRow
from rlctl.errors import NotFoundError, ResourceError
from rlctl.hub import hub_answers

DATA_SOURCE = "openai/gsm8k"
INSTRUCTION = 'Let\'s think step by step and output the final answer after "####".'
INSTRUCTION_WITH_TOOLS = (
    'Let\'s think step by step, use the tools to compute, and output the final answer after "####".'
)
SPLITS = ("train", "test")

_MARK = "#### "


class Gsm8kParams(ToolsParams):
    """Options of `rlctl prep gsm8k`."""

    source: Path | None = option(
        None,
        "DIR",
        "Folder with train.jsonl and test.jsonl or the hub's parquet files; "
        "by default from the hub.",
    )


@dataset(
    Gsm8kParams,
    "rlctl prep gsm8k --model Qwen/Qwen2.5-0.5B-Instruct --max-prompt-length 512",
    default_out="~/data/gsm8k",  # which the recipes read
    train=lambda params: None if params.tools else "ppo --recipe gsm8k_ppo",
)
def gsm8k(params: Gsm8kParams) -> dict[str, list[PromptRow]]:
    """GSM8K: 7,473 training and 1,319 test problems, in train.parquet and test.parquet."""
    names = params.tool_names()
    instruction = INSTRUCTION
    if names:
        instruction = INSTRUCTION_WITH_TOOLS
    splits = load_gsm8k(params.source, instruction)
    return {split: with_tools(rows, names) for split, rows in splits.items()}


def load_gsm8k(source: Path | None, instruction: str = INSTRUCTION) -> dict[str, list[PromptRow]]:
    """Return the rows of both splits, from the folder `source` or from the Hugging Face hub.

    The folder has the official `train.jsonl` and `test.jsonl`, or the hub's `train*.parquet` and
    `test*.parquet`, which may be in `main/`. Raises NotFoundError for missing files, ConfigError
    for malformed records, ResourceError if the hub cannot be reached.
    """
    splits: dict[str, list[PromptRow]] = {}
    for split in SPLITS:
        files = _find(source, split) if source is not None else [_download(split)]
        splits[split] = list(convert(files, partial(_row, split=split, instruction=instruction)))
    return splits


def _row(record: Any, index: int, path: Path, *, split: str, instruction: str) -> PromptRow:
    del path
    question = answer = None
    if isinstance(record, dict):
        question = record.get("question")
        answer = record.get("answer")
    if not (isinstance(question, str) and isinstance(answer, str) and _MARK in answer):
        raise ValueError(
            "not a GSM8K record: expected {question, answer}, both text, "
            "and `#### number` in the answer"
        )
    return PromptRow(
        data_source=DATA_SOURCE,
        prompt=[{"role": "user", "content": f"{question} {instruction}"}],
        ground_truth=answer.partition(_MARK)[2].strip().replace(",", ""),
        ability="math",
        style="rule",
        extra_info={"split": split, "index": index, "question": question, "answer": answer},
    )


def _find(source: Path, split: str) -> list[Path]:
    source = source.expanduser()
    if not source.is_dir():
        raise NotFoundError(
            "the source is not a folder",
            where=str(source),
            hint="give a folder with train.jsonl and test.jsonl",
        )
    for pattern in (f"{split}.jsonl", f"{split}*.parquet", f"main/{split}*.parquet"):
        if found := sorted(source.glob(pattern)):
            return found
    raise NotFoundError(
        f"the source has no {split} split",
        where=str(source),
        hint=f"expected {split}.jsonl, {split}*.parquet or main/{split}*.parquet",
    )


def _download(split: str) -> Path:
    from huggingface_hub import hf_hub_download

    where: dict[str, Any] = {
        "repo_id": DATA_SOURCE,
        "filename": f"main/{split}-00000-of-00001.parquet",
        "repo_type": "dataset",
    }
    try:
        return Path(hf_hub_download(**where, local_files_only=not hub_answers()))
    except OSError as error:
        raise ResourceError(
            f"GSM8K's {split} split is not in the local cache and cannot be downloaded",
            where=f"{DATA_SOURCE}, {where['filename']}",
            hint="use --source DIR with the official train.jsonl and test.jsonl "
            "(github.com/openai/grade-school-math)",
        ) from error
