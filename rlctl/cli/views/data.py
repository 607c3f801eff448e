"""Rows of a data file on a terminal."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from rich.text import Text

from rlctl.cli.console import stdout
from rlctl.terminal import visible

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from rlctl.data_prep.rows import PromptRow


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


def row_entry(
    index: int, row: PromptRow, tokenizer: PreTrainedTokenizerBase | None
) -> dict[str, Any]:
    """Return what is shown of a row; with a tokenizer also the rendered prompt and its length."""
    entry: dict[str, Any] = {
        "row": index,
        "data_source": row.data_source,
        "prompt": row.prompt,
        "ground_truth": row.ground_truth,
        "ability": row.ability,
        "style": row.style,
        "extra_info": row.extra_info,
    }
    if tokenizer:
        from rlctl.runtime.data.tokenizer import encode_prompt, render_prompt

        entry |= {
            "rendered": render_prompt(tokenizer, row.prompt),
            "num_tokens": len(encode_prompt(tokenizer, row.prompt)),
        }
    return entry
