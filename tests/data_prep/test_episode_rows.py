"""Rows of episodes that `rlctl prep` writes: problems for a calculator, and games."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rlctl.data_prep.agent_columns import agent_problems
from rlctl.data_prep.arithmetic import ArithmeticParams, arithmetic
from rlctl.data_prep.gridworld import GridworldParams, gridworld
from rlctl.data_prep.gsm8k import Gsm8kParams, gsm8k
from rlctl.data_prep.rows import PromptRow, read_rows, write_rows
from rlctl.errors import UsageError
from rlctl.runtime.agents.environments.calculator import calculate
from tools.make_agent_model import expression


def stored(folder: Path, rows: list[PromptRow]) -> list[PromptRow]:
    write_rows(folder / "rows.parquet", rows)
    return read_rows(folder / "rows.parquet")


def test_tools_make_rows_of_word_problems_episodes(tmp_path: Path) -> None:
    given = ArithmeticParams(train=30, val=5, level=4)
    plain = arithmetic(given)
    episodes = arithmetic(given.model_copy(update={"tools": "calculator, search"}))
    for split in ("train", "val"):
        rows = episodes[split]
        assert stored(tmp_path, rows) == rows
        assert {row.agent_name for row in rows} == {"tool_agent"}
        assert rows[0].extra_info["tool_selection"] == ["calculator", "search"]
        assert [row.prompt for row in rows] == [row.prompt for row in plain[split]]
        assert agent_problems(rows, multi_turn=True) == []
        assert agent_problems(rows, multi_turn=False)
        assert agent_problems(plain[split], multi_turn=False) == []


def test_large_problems_are_solved_by_one_expression() -> None:
    rows = arithmetic(ArithmeticParams(train=300, val=1, level=4))["train"]
    written = [expression(row.extra_info["answer"]) for row in rows]
    assert [calculate(each) for each in written] == [row.ground_truth for row in rows]
    assert any(each.startswith("(") for each in written)
    assert sum(int(row.ground_truth) > 999 for row in rows) > 150


def test_gsm8k_with_tools_asks_to_use_them(tmp_path: Path) -> None:
    for split in ("train", "test"):
        record = json.dumps({"question": "How many?", "answer": "#### 2"})
        (tmp_path / f"{split}.jsonl").write_text(record)
    [row] = gsm8k(Gsm8kParams(source=tmp_path, tools="calculator"))["test"]
    assert row.agent_name == "tool_agent"
    assert row.extra_info["tool_selection"] == ["calculator"]
    assert "use the tools" in row.prompt[0]["content"]
    assert row.prompt[0]["content"].startswith("How many? ")
    [plain] = gsm8k(Gsm8kParams(source=tmp_path))["test"]
    assert (plain.agent_name, "tool_selection" in plain.extra_info) == ("", False)


@pytest.mark.parametrize("given", ["", "calculator,", " "])
def test_empty_names_of_tools_are_refused(given: str) -> None:
    with pytest.raises(UsageError, match="empty name"):
        arithmetic(ArithmeticParams(train=3, val=1, tools=given))


def test_games_have_different_seeds(tmp_path: Path) -> None:
    splits = gridworld(GridworldParams(train=30, val=10, seed=1))
    rows = [*splits["train"], *splits["val"]]
    assert stored(tmp_path, rows) == rows
    seeds = {row.extra_info["seed"] for row in rows}
    assert len(seeds) == 40
    other = gridworld(GridworldParams(train=30, val=10, seed=2))["train"]
    assert not seeds & {row.extra_info["seed"] for row in other}
