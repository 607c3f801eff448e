"""Data sets of verl's `data.custom_cls`: classes whose items are tokens, or rows of prompts."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

from pydantic import Field

from rlctl.data_prep.contract import TRUTH_PATH, row_faults
from rlctl.data_prep.records import value_at
from rlctl.data_prep.rows import PromptRow
from rlctl.errors import ConfigError
from rlctl.plugins import Params, declare
from rlctl.plugins.user_code import load_named
from rlctl.runtime.data.readers import Source


class DatasetClassParams(Params):
    """The class of a data set."""

    path: str = Field(description="Python file with the class")
    name: str = Field(description="name of the class")


class _Config(dict[str, Any]):
    """Settings of `data`, which verl's classes read as attributes or with `get`."""

    __getattr__ = dict.get


@declare(Params=DatasetClassParams)
def dataset_class(source: Source, params: DatasetClassParams) -> Iterator[PromptRow | None]:
    """Yield the rows of a data set that is made as verl makes it: of files, tokenizer and config.

    An item with `input_ids` and `loss_mask` is for SFT; one with the columns of a row, whose prompt
    may be `raw_prompt`, is for other algorithms.
    """
    kind = load_named("readers", f"{params.path}:{params.name}", "data set class")
    longest = source.data.max_prompt_length + source.data.max_response_length
    config = _Config(source.data.model_dump(), max_length=longest)
    given = {"tokenizer": source.tokenizer, "config": config, "processor": None, "max_samples": -1}
    accepted = inspect.signature(kind).parameters
    if not any(each.kind is each.VAR_KEYWORD for each in accepted.values()):
        given = {name: value for name, value in given.items() if name in accepted}
    found = kind([str(source.path)], **given)
    for number in range(len(found)):
        item: Any = found[number]
        try:
            yield _row(item, number, source)
        except ValueError as error:
            raise ConfigError(str(error), where=f"{params.path}:{params.name}[{number}]") from error


def _row(item: Any, number: int, source: Source) -> PromptRow | None:
    if not isinstance(item, dict):
        raise ValueError(f"the item is {item!r:.60}, not a mapping")
    if "loss_mask" in item:
        lists = {name: _list(item.get(name)) for name in ("input_ids", "loss_mask")}
        kept = _list(item.get("attention_mask")) or [1] * len(lists["input_ids"])
        ids, mask = (
            [value for value, is_kept in zip(values, kept, strict=True) if is_kept]
            for values in lists.values()
        )
        return source.tokens(ids, mask, f"item {number}")
    record = {"prompt": item.get("raw_prompt"), **item}
    for fault in row_faults(record, "prompt", "data_source"):
        raise ValueError(fault.message)
    truth = value_at(record, TRUTH_PATH)
    more = record.get("extra_info") or {}
    return PromptRow(record["data_source"], record["prompt"], truth, extra_info=more)


def _list(value: Any) -> list[int]:
    """Return the numbers of a tensor, array or list."""
    return [] if value is None else getattr(value, "tolist", lambda: list(value))()
