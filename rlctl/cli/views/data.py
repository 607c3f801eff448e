"""Rows of a data file on a terminal."""

from __future__ import annotations

import json
from typing import Any

from rich.text import Text

from rlctl.cli.console import stdout
from rlctl.terminal import visible


def print_row(entry: dict[str, Any]) -> None:
    """Print one row of `rlctl data show`: facts, prompt, ground truth and extra info."""
    facts = [entry["data_source"], entry["ability"], f"reward style {entry['style']}"]
    facts += [f"{entry['num_tokens']} tokens"] if "num_tokens" in entry else []
    text = entry.get("rendered") or "\n".join(
        f"{message['role']}: {message['content']}" for message in entry["prompt"]
    )
    extra = json.dumps(entry["extra_info"], ensure_ascii=False, default=str)
    out = stdout()
    out.print(
        Text(f"row {entry['row']}", style="bold"),
        Text(visible(" · ".join(fact for fact in facts if fact)), style="dim"),
    )
    out.print(Text(visible(text)))
    out.print(Text.assemble(("ground truth: ", "bold"), visible(str(entry["ground_truth"]))))
    out.print(Text.assemble(("extra info: ", "bold"), visible(extra)))
    out.print()
