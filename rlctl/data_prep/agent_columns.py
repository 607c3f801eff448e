"""Fields of rows for episodes: the kind of agent, tools, and arguments of tools and environments.

verl puts them into columns or into `extra_info`; here they are in `extra_info`, but `agent_name`.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from pydantic import Field

from rlctl.data_prep.row_columns import has_content
from rlctl.errors import Problem, UsageError
from rlctl.plugins import Params

if TYPE_CHECKING:
    from rlctl.data_prep.rows import PromptRow

log = logging.getLogger(__name__)

SINGLE_TURN = "single_turn_agent"
TOOL_AGENT = "tool_agent"
_AGENT = "agent_name"
_FIELDS = ("tools", "tools_kwargs", "tool_selection", "interaction_kwargs")
# Columns that are read if a file has them.
_SELECTION = "tool_selection"
ENV_CLASS = "env_class"  # of SkyRL's rows, whose environments read any column
AGENT_COLUMNS = (_AGENT, *_FIELDS, "need_tools_kwargs", _SELECTION, ENV_CLASS)
_ROW_COLUMNS = ("prompt", "data_source", "ability", "extra_info", _AGENT)  # fields of a row


class ToolsParams(Params):
    """Option `--tools` of data sets."""

    tools: str | None = Field(
        default=None,
        description="Make each row an episode with these tools, such as `calculator`; separate "
        "several by commas. The default of `--out` then ends with `_tools`.",
        json_schema_extra={"metavar": "NAMES"},
    )

    def tool_names(self) -> list[str]:
        """Return the names of the tools. Raises UsageError for a list with an empty name."""
        if self.tools is None:
            return []
        names = [name.strip() for name in self.tools.split(",")]
        if not all(names):
            raise UsageError(
                f"--tools {self.tools!r} has an empty name", hint="--tools calculator,search"
            )
        return names


def with_tools(rows: Sequence[PromptRow], names: Sequence[str]) -> list[PromptRow]:
    """Return the rows as episodes with the tools `names`; unchanged if there are none."""
    if not names:
        return list(rows)
    selection = {_SELECTION: list(names)}
    return [
        replace(row, agent_name=TOOL_AGENT, extra_info={**row.extra_info, **selection})
        for row in rows
    ]


def agent_name(record: Mapping[str, Any]) -> str:
    """Return the kind of agent of a record; empty if it has none."""
    extra_info = record.get("extra_info")
    nested = extra_info.get(_AGENT) if isinstance(extra_info, dict) else None
    return str(record.get(_AGENT) or nested or "")


def with_agent_columns(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return the record's `extra_info` with the columns for episodes that have content.

    With `env_class`, they are all columns that have no other place in a row.
    """
    names = record if record.get(ENV_CLASS) else AGENT_COLUMNS
    columns = {
        name: record[name]
        for name in names
        if name in record and name not in _ROW_COLUMNS and has_content(record[name])
    }
    return {**columns, **(record.get("extra_info") or {})}


def episode_fields(row: PromptRow) -> tuple[str, ...]:
    """Return the names of the fields for episodes that have content in a row."""
    found = row.extra_info
    return tuple(name for name in _FIELDS if name in found and has_content(found[name]))


def agent_problems(rows: Sequence[PromptRow], multi_turn: bool) -> Iterator[Problem]:
    """Yield the problems of rows whose responses need several turns, or an unknown agent.

    A kind of agent alone needs none: verl's loop without tools has a single turn.
    """
    if multi_turn:
        if unknown := {row.agent_name for row in rows} - {"", SINGLE_TURN, TOOL_AGENT}:
            yield Problem(
                f"unknown agent_name: {', '.join(sorted(unknown))}",
                hint=f"{TOOL_AGENT} or {SINGLE_TURN}; your environment is "
                "actor_rollout_ref.rollout.agent.environment=module:Class",
            )
        return
    if several := {row.agent_name for row in rows} - {"", SINGLE_TURN}:
        log.warning(
            "agent_name (%s) is not used: actor_rollout_ref.rollout.multi_turn.enable is false",
            ", ".join(sorted(several)),
        )
    present = {name for row in rows for name in episode_fields(row)}
    found = [name for name in _FIELDS if name in present]
    if found:
        yield Problem(
            f"the rows ask for episodes with tools ({', '.join(found)}), but "
            "actor_rollout_ref.rollout.multi_turn.enable is false",
            hint="actor_rollout_ref.rollout.multi_turn.enable=true, or rows without these fields",
        )
