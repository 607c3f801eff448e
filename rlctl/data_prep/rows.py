"""The parquet contract: what one row of prompts holds."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class PromptRow:
    """One problem. `prompt` is a chat (a list of {role, content}); `ground_truth` is what the reward function compares with."""

    data_source: str
    prompt: list[dict[str, str]]
    ground_truth: Any
    ability: str = ""
    style: str = "rule"
    extra_info: dict[str, Any] = field(default_factory=dict)
