"""Evaluation sets: one table of where each is, its columns, and the question and truth of a row."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlctl.data_prep.datasets import Dataset, Splits, dataset, option
from rlctl.data_prep.record_files import record_files
from rlctl.data_prep.records import convert
from rlctl.data_prep.rows import PromptRow
from rlctl.data_prep.skipping import report_skipped
from rlctl.errors import Problem
from rlctl.hub import hub_parquet
from rlctl.plugins import Params
from rlctl.plugins.objectives.countdown import CountdownParams, draw, prompt_of
from rlctl.plugins.objectives.ifeval import CHECKS

Made = tuple[str, Any, dict[str, Any]]  # text of the prompt, truth, other fields

_MATH = "Let's think step by step and output the final answer within \\boxed{}."
_LETTER = "Think step by step, and end with: the answer is (LETTER)."


class SourceParams(Params):
    """Option `--source` of evaluation sets."""

    source: str | None = option(
        None,
        "FILE|DIR",
        "JSONL, CSV or parquet with the columns of the set, or owner/name on the hub; by default "
        "the set on the hub.",
    )


@dataclass(frozen=True)
class EvalSet:
    """Set on the hub: id, which selects the reward, configuration, split, and how rows are made."""

    hub: str
    title: str
    make: Callable[[Mapping[str, Any], int], Made]
    split: str = "test"
    config: str | None = None

    def declared(self, name: str) -> Dataset:
        """Return the plug-in of the set."""

        def load(params: SourceParams) -> Splits:
            if params.source is None:
                files = hub_parquet(self.hub, self.split, self.config)
            else:
                files = record_files([params.source], self.split)
            skipped: list[Problem] = []

            def row(record: Any, index: int, path: Path) -> PromptRow | None:
                del path
                text, truth, more = self.make(record, index)
                if unknown := more.pop("unknown", None):
                    skipped.append(
                        Problem(f"{', '.join(unknown)} cannot be checked", f"row {index}")
                    )
                    return None
                chat = [{"role": "user", "content": text}]
                info = {"split": "test", "index": index, **more}
                return PromptRow(self.hub, chat, truth, extra_info=info)

            found = list(convert(files, row))
            rows = [each for each in found if each is not None]
            report_skipped(skipped, len(found))
            return Splits({"test": rows}, len(skipped))

        load.__doc__ = f"{self.title}, in test.parquet: rows to validate on, and for rlctl eval."
        example = f"rlctl prep {name} --source {name}.jsonl --out data/{name}"
        return dataset(SourceParams, example, default_out=f"~/data/{name}")(load)


def _field(record: Mapping[str, Any], *names: str) -> Any:
    """Return the first field that is not null. Raises ValueError without one."""
    for name in names:
        if isinstance(record, Mapping) and record.get(name) not in (None, ""):
            return record[name]
    raise ValueError(f"no column {' or '.join(map(repr, names))}")


def _mathematics(record: Mapping[str, Any], index: int) -> Made:
    del index
    question = str(_field(record, "problem", "question"))
    more = {name: record[name] for name in ("subject", "level") if record.get(name) is not None}
    return f"{question} {_MATH}", str(_field(record, "answer")), {"question": question, **more}


def _choice(record: Mapping[str, Any], index: int) -> Made:
    """Return a question with its four answers, shuffled by a seed of the row."""
    right = str(_field(record, "Correct Answer"))
    question = str(_field(record, "Question"))
    answers = [right, *(str(_field(record, f"Incorrect Answer {n}")) for n in (1, 2, 3))]
    order = random.Random(f"gpqa-{index}").sample(range(4), 4)
    lines = [f"({'ABCD'[place]}) {answers[n].strip()}" for place, n in enumerate(order)]
    text = "\n".join([question.strip(), "", *lines, "", _LETTER])
    more = {"question": question}
    if domain := record.get("High-level domain"):
        more["domain"] = domain
    return text, "ABCD"[order.index(0)], more


def _instructions(record: Mapping[str, Any], index: int) -> Made:
    """Return a prompt and its instructions; `unknown` are those without a check."""
    del index
    ids = list(_field(record, "instruction_id_list"))
    prompt = str(_field(record, "prompt"))
    settings = [
        {key: value for key, value in (given or {}).items() if value is not None}
        for given in _field(record, "kwargs")
    ]
    checks = [{"id": each, **given} for each, given in zip(ids, settings, strict=True)]
    return prompt, checks, {"unknown": [each for each in ids if each not in CHECKS]}


SETS = {
    "math500": EvalSet(
        "HuggingFaceH4/MATH-500", "MATH-500: 500 competition problems", _mathematics
    ),
    "aime24": EvalSet("HuggingFaceH4/aime_2024", "AIME 2024: 30 problems", _mathematics, "train"),
    "aime25": EvalSet("math-ai/aime25", "AIME 2025: 30 problems", _mathematics),
    "amc23": EvalSet("math-ai/amc23", "AMC 2023: 40 problems", _mathematics),
    "minerva": EvalSet("math-ai/minervamath", "Minerva: 272 problems of science", _mathematics),
    "gpqa": EvalSet(
        "Idavidrein/gpqa", "GPQA diamond: 198 choices of four", _choice, "train", "gpqa_diamond"
    ),
    "ifeval": EvalSet(
        "google/IFEval", "IFEval: 541 prompts with checkable instructions", _instructions, "train"
    ),
}
math500, aime24, aime25, amc23, minerva, gpqa, ifeval = (
    each.declared(name) for name, each in SETS.items()
)


@dataset(
    CountdownParams,
    "rlctl prep countdown --out data/countdown --train 4096 --val 256",
    default_out="data/countdown",
)
def countdown(params: CountdownParams) -> dict[str, list[PromptRow]]:
    """Numbers and a target that an equation of all of them reaches: train.parquet, val.parquet."""
    problems = draw(params)
    rows = [
        PromptRow(
            "rlctl/countdown",
            [{"role": "user", "content": prompt_of(numbers, target)}],
            {"target": target, "numbers": list(numbers)},
            ability="math",
            extra_info={"index": index},
        )
        for index, (numbers, target) in enumerate(problems)
    ]
    return {"train": rows[: params.train], "val": rows[params.train :]}
