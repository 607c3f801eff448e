"""Arithmetic word problems: correct, distinct, seeded; as episodes with a calculator, and games."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from rlctl.data_prep.agent_columns import agent_problems
from rlctl.data_prep.arithmetic import (
    LEVELS,
    ArithmeticParams,
    arithmetic,
    generate,
    train_and_validation,
)
from rlctl.data_prep.gridworld import GridworldParams, gridworld
from rlctl.data_prep.gsm8k import Gsm8kParams, gsm8k
from rlctl.data_prep.rows import PromptRow, read_rows, write_rows
from rlctl.errors import UsageError
from tools.make_agent_model import expression

EQUATION = re.compile(r"(\d+) ([+*-]) (\d+) = (\d+)")


def solve(question: str) -> int:
    """Solve a problem from its text, independently of the templates."""
    sentences = [s for s in re.split(r"(?<=[.?])\s", question) if s.endswith(".")]
    numbers = [int(n) for n in re.findall(r"\d+", sentences[0])]
    value = numbers[0] * numbers[1] if len(numbers) == 2 else numbers[0]
    for sentence in sentences[1:]:
        (number,) = map(int, re.findall(r"\d+", sentence))
        if "times as many" in sentence:
            value *= number
        elif " more" in sentence:
            value += number
        else:
            assert re.search(r"sells|loses|gives|eats", sentence), sentence
            value -= number
    return value


@pytest.mark.parametrize("level", [1, 3, 4])
def test_solutions_are_correct(level: int) -> None:
    for row in generate(500, seed=3, level=level, careless=0.0, split="train"):
        question, answer = row.extra_info["question"], row.extra_info["answer"]
        assert row.prompt == [{"role": "user", "content": question}]
        assert solve(question) == int(row.ground_truth)
        assert answer.split("#### ")[1] == row.ground_truth
        equations = EQUATION.findall(answer)
        assert len(equations) in LEVELS[level].steps
        results = [
            {"+": int(a) + int(b), "-": int(a) - int(b), "*": int(a) * int(b)}[op]
            for a, op, b, _ in equations
        ]
        assert results == [int(result) for *_, result in equations]
        assert [int(a) for a, *_ in equations[1:]] == results[
            :-1
        ]  # each step starts from the previous result
        assert all(
            1 <= int(n) <= LEVELS[level].largest for n in re.findall(r"\d+", question + answer)
        )


def test_careless_solutions_omit_one_equation_and_are_wrong() -> None:
    good = generate(800, seed=5, level=2, careless=0.0, split="train")
    all_careless = generate(800, seed=5, level=2, careless=1.0, split="train")
    some = generate(800, seed=5, level=2, careless=0.6, split="train")
    several_steps = cut = 0
    for right, wrong, maybe in zip(good, all_careless, some, strict=True):
        assert right.prompt == wrong.prompt == maybe.prompt
        assert right.ground_truth == wrong.ground_truth == maybe.ground_truth
        equations = right.extra_info["answer"].split(" ; ")[:-1]
        if len(equations) == 1:
            assert wrong.extra_info["answer"] == right.extra_info["answer"]
            continue
        value = equations[-2].split(" = ")[1]
        assert wrong.extra_info["answer"] == " ; ".join([*equations[:-1], f"#### {value}"])
        assert value != right.ground_truth
        several_steps += 1
        cut += maybe.extra_info["answer"] == wrong.extra_info["answer"]
    assert cut / several_steps == pytest.approx(
        0.6, abs=0.06
    )  # 2.5 standard deviations of about 600 draws


def test_training_and_validation_rows_are_disjoint_and_seeded() -> None:
    train, val = train_and_validation(3000, 500, seed=1, level=1, careless=0.5)
    questions = [row.extra_info["question"] for row in train + val]
    assert len(set(questions)) == 3500
    assert train == generate(3000, seed=1, level=1, careless=0.5, split="train")
    assert (
        train_and_validation(3000, 20, seed=1, level=1, careless=0.5)[0] == train
    )  # the size of one set does not change the other
    assert train != train_and_validation(3000, 500, seed=2, level=1, careless=0.5)[0]
    assert all(
        row.extra_info["answer"].endswith(f"#### {row.ground_truth}") for row in val
    )  # validation is never careless
    assert [row.extra_info["index"] for row in val] == list(range(500))
    assert {row.extra_info["split"] for row in val} == {"val"}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"level": 5}, "level 5 does not exist"),
        ({"careless": 1.5}, "careless must be a probability"),
        ({"count": -1}, "cannot generate -1"),
    ],
)
def test_invalid_arguments_raise(given: dict[str, float], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        generate(**{"count": 3, "seed": 0, "level": 1, "careless": 0.0, "split": "train", **given})  # type: ignore[arg-type]


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
        assert not [*agent_problems(rows, multi_turn=True)]
        assert [*agent_problems(rows, multi_turn=False)]
        assert not [*agent_problems(plain[split], multi_turn=False)]


@pytest.mark.plugin("agents")
def test_large_problems_are_solved_by_one_expression() -> None:
    from rlctl.plugins.agents.environments.calculator import calculate

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
