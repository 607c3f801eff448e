"""Tool that searches texts of a local file by words, ranked with BM25 (Robertson and Zaragoza)."""

from __future__ import annotations

import heapq
import math
import re
from array import array
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import Field

from rlctl import plugins
from rlctl.data_prep.records import read_records
from rlctl.errors import ConfigError
from rlctl.plugins.agents.environments.tool import StatelessTool, ToolResult
from rlctl.plugins.user_code import check_file
from rlctl.runtime.sandbox.calls import call
from rlctl.runtime.serving.chat import to_schema

_WORD = re.compile(r"\w+")
_K1 = 1.5  # weight of repeated words
_B = 0.75  # weight of long texts


class SearchParams(plugins.Params):
    """Settings of the search tool."""

    path: str = Field(description="file of texts: JSONL (texts or objects) or parquet")
    text_key: str = Field("text", description="key or column of the text")
    top_k: int = Field(3, ge=1, description="texts of a result")


class SearchTool(StatelessTool):
    """Search the texts of a local file, and return those that match best."""

    Params = SearchParams
    schema = to_schema(
        "search",
        "Search a collection of texts by words.",
        {
            "type": "object",
            "properties": {"query": {"type": "string", "description": "Words to search for."}},
            "required": ["query"],
        },
    )

    def __init__(self, params: SearchParams) -> None:
        """Build the index in memory. Raises ConfigError for a file that cannot be read."""
        self._top_k = params.top_k
        self._texts = list(_texts(Path(params.path).expanduser(), params.text_key))
        self._index = Index(self._texts)

    async def call(self, arguments: Mapping[str, Any]) -> ToolResult:
        """Return the best texts, numbered, or a note that no text matches."""
        found = await call(self._index.search, str(arguments["query"]), self._top_k)
        lines = [f"[{rank}] {self._texts[number]}" for rank, number in enumerate(found, 1)]
        return ToolResult("\n".join(lines) or "no text matches")


class Index:
    """Inverted index of texts with BM25 weights."""

    def __init__(self, texts: list[str]) -> None:
        self._postings: dict[str, tuple[array[int], array[float]]] = defaultdict(
            lambda: (array("L"), array("d"))
        )
        words = [Counter(_words(text)) for text in texts]
        lengths = [sum(counts.values()) for counts in words]
        mean = sum(lengths) / max(1, len(lengths)) or 1.0
        for number, counts in enumerate(words):
            norm = _K1 * (1 - _B + _B * lengths[number] / mean)
            for word, count in counts.items():
                numbers, weights = self._postings[word]
                numbers.append(number)
                weights.append(count * (_K1 + 1) / (count + norm))
        self._size = len(texts)

    def search(self, query: str, top_k: int) -> list[int]:
        """Return the numbers of the best texts; ties go to the earlier one."""
        scores: dict[int, float] = defaultdict(float)
        for word in set(_words(query)):
            if word in self._postings:
                numbers, weights = self._postings[word]
                idf = math.log(1 + (self._size - len(numbers) + 0.5) / (len(numbers) + 0.5))
                for number, weight in zip(numbers, weights, strict=True):
                    scores[number] += idf * weight
        return heapq.nsmallest(top_k, scores, key=lambda number: (-scores[number], number))


def _words(text: str) -> list[str]:
    return _WORD.findall(text.lower())


def _texts(path: Path, key: str) -> Iterator[str]:
    """Yield the texts of a file. Raises ConfigError."""
    check_file(path, "the file of texts does not exist", "tool_params.search.path")
    for number, (where, row) in enumerate(read_records(path), 1):
        text = row
        keys: list[str] = []
        if isinstance(row, dict):
            text = row.get(key)
            keys = list(row)
        if not isinstance(text, str):
            hint = "tool_params: text_key" if key in keys else plugins.suggestion(key, keys)
            raise ConfigError(f"row {number} has no text {key!r}", where=where, hint=hint)
        yield text
