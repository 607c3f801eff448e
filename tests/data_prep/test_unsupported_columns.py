"""Columns for videos are refused if they have content; those for agents are read."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rlctl.data_prep.agent_columns import agent_problems
from rlctl.data_prep.rows import read_rows
from rlctl.errors import ConfigError

ROW = {
    "data_source": "s",
    "prompt": [{"role": "user", "content": "2 + 2?"}],
    "reward_model": {"style": "rule", "ground_truth": "4"},
    "extra_info": {"question": "1 + 1?"},
}


def file(folder: Path, **columns: object) -> Path:
    pq.write_table(pa.Table.from_pylist([ROW | columns] * 2), folder / "x.parquet")
    return folder / "x.parquet"


@pytest.mark.parametrize(
    "columns",
    [
        {"image": [{"bytes": b"x"}]},
        {"videos": ["v.mp4"]},
    ],
)
def test_content_is_refused(tmp_path: Path, columns: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match="2 of 2 rows have") as caught:
        read_rows(file(tmp_path, **columns))
    assert len(caught.value.problems) == 1


def test_empty_columns_and_agent_names_are_read(tmp_path: Path) -> None:
    path = file(tmp_path, images=[], tools=None, agent_name="tool_agent", env_class="grid")
    rows = read_rows(path)
    assert [row.agent_name for row in rows] == ["tool_agent"] * 2
    assert rows[0].extra_info == {
        "question": "1 + 1?",
        "env_class": "grid",
        "reward_model": {"style": "rule", "ground_truth": "4"},
    }


@pytest.mark.parametrize(
    "columns",
    [
        {"tools": ["search"]},
        {"extra_info": {"tools_kwargs": {"t": {"create_kwargs": {"a": 1}}}}},
        {"extra_info": {"interaction_kwargs": {"name": "x"}}},
    ],
)
def test_rows_for_episodes_need_several_turns(tmp_path: Path, columns: dict[str, object]) -> None:
    rows = read_rows(file(tmp_path, **columns))
    [problem] = agent_problems(rows, multi_turn=False)
    assert "multi_turn.enable is false" in problem.message
    assert not [*agent_problems(rows, multi_turn=True)]


def test_unknown_agents_are_refused(tmp_path: Path) -> None:
    rows = read_rows(file(tmp_path, agent_name="langgraph"))
    [problem] = agent_problems(rows, multi_turn=True)
    assert "langgraph" in problem.message


def test_prompt_may_be_a_text_at_a_path(tmp_path: Path) -> None:
    [row, _] = read_rows(file(tmp_path), prompt_key="extra_info.question")
    assert row.prompt == [{"role": "user", "content": "1 + 1?"}]
