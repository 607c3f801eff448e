"""Prompts that cannot be used as they are: too long ones, and files without any other."""

from __future__ import annotations

from collections.abc import Mapping

from rlctl.errors import ConfigError
from rlctl.recipes import schema
from rlctl.runtime.data.loader import TOO_LONG
from rlctl.runtime.data.row_table import Rows


def no_prompts(rows: Rows, num_long: int, skipped: Mapping[str, int], limit: int) -> ConfigError:
    """Return the error of files without any row that can be used."""
    if set(skipped) - {TOO_LONG}:
        reasons = ", ".join(f"{reason}: {count}" for reason, count in skipped.items())
        message = f"no row is left by data.skip_invalid=true ({reasons})"
        return ConfigError(message, where=rows.paths, hint="`rlctl data show FILE` shows rows")
    return ConfigError(
        f"no prompt is left: {num_long} of {len(rows)} are longer than "
        f"data.max_prompt_length={limit} tokens",
        where=rows.paths,
        hint="set a larger data.max_prompt_length",
    )


def truncate(ids: list[int], data: schema.Data, where: str) -> list[int]:
    """Shorten a prompt to `data.max_prompt_length` by `data.truncation`, or raise ConfigError."""
    limit = data.max_prompt_length
    match data.truncation:
        case "left":
            return ids[-limit:]
        case "right":
            return ids[:limit]
        case "middle":
            return ids[: limit // 2] + ids[len(ids) - (limit - limit // 2) :]
        case _:
            raise ConfigError(
                f"a prompt of {len(ids)} tokens is longer than data.max_prompt_length={limit}",
                where=where,
                hint="set a larger data.max_prompt_length, data.filter_overlong_prompts=true or "
                "data.truncation=left|right|middle",
            )
