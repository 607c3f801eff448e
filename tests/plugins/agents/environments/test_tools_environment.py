"""Tests of the tools environment: every call gets a message, wrong ones with the reason."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rlctl.errors import ConfigError
from rlctl.plugins.agents.environments.calculator import calculate
from rlctl.plugins.agents.environments.function_tools import schema_of
from rlctl.plugins.agents.environments.protocol import Step
from rlctl.plugins.agents.environments.tool import Side, truncated
from rlctl.plugins.agents.environments.tools_environment import without_none
from rlctl.runtime.sandbox import calls
from rlctl.runtime.serving.chat import MalformedCall, ToolCall, Turn
from tests.plugins.agents.environments.episodes import load_here, play_here, turn_of

SOURCE = '''
import asyncio, time
from rlctl.plugins.agents.environments.function_tools import function_tool

@function_tool
def echo(text: str, times: int = 1) -> str:
    """Repeat a text.

    Args:
        text: The text
            to repeat.
        times (int): Number of times.
    """
    return text * times

@function_tool("numbers")
async def listed(stop: int) -> list[int]:
    """List numbers."""
    return list(range(stop))

@function_tool
def fail() -> str:
    """Fail."""
    raise LookupError("no such thing")

@function_tool
def leave() -> str:
    """End the process."""
    raise SystemExit(1)

@function_tool
def stop_iteration() -> str:
    """Raise what a future does not accept."""
    raise StopIteration

@function_tool
async def wait() -> str:
    """Ignore the first cancellation."""
    try:
        await asyncio.sleep(3600)
    except asyncio.CancelledError:
        await asyncio.sleep(3600)

def helper() -> str:
    """Is no tool."""
'''


@pytest.fixture
def file(tmp_path: Path) -> str:
    (tmp_path / "mine.py").write_text(SOURCE)
    return str(tmp_path / "mine.py")


def use(
    file: str, *turns: Turn, extra_info: dict[str, Any] | None = None, **params: Any
) -> list[Step]:
    """Play turns with the tools of a file; return the steps."""
    row = {"extra_info": extra_info} if extra_info else None
    return play_here("tools", {"function_tool_path": file, **params}, turns, row).steps


def calls_of(*calls: tuple[str, dict[str, Any]]) -> Turn:
    return Turn("", tuple(ToolCall(f"c{i}", *call) for i, call in enumerate(calls)))


def test_every_call_gets_a_message_in_order(file: str) -> None:
    turn = calls_of(
        ("echo", {"text": "ab", "times": 2}),
        ("numbers", {"stop": 3}),
        ("fail", {}),
        ("nope", {}),
        ("echo", {"text": "a", "times": "two"}),
        ("leave", {}),
        ("stop_iteration", {}),
        ("echo", {"text": "late"}),
    )
    turn = Turn("", turn.calls, (MalformedCall("{", "no JSON"),))
    [step] = use(file, turn, max_parallel_calls=7)
    assert [message["content"] for message in step.messages] == [
        "abab",
        "[0, 1, 2]",
        "error: LookupError: no such thing",
        "error: unknown tool 'nope'; known: echo, numbers, fail, leave, stop_iteration, wait",
        "error: wrong arguments: times: 'two' is not of type 'integer'",
        "error: RuntimeError: SystemExit: 1",
        "error: RuntimeError: StopIteration: ",
        "error: not executed: at most 7 tool calls are allowed in one turn",
        "error: malformed tool call: no JSON",
    ]
    errors = [None, None, "raised", "unknown", "malformed", "raised", "raised", "too_many"]
    assert [use.error for use in step.uses] == [*errors, "malformed"]
    assert [message.get("tool_call_id") for message in step.messages[:8]] == [
        call.id for call in turn.calls
    ]
    assert all(message["role"] == "tool" for message in step.messages)
    assert not step.done


def test_call_that_ignores_its_cancellation_costs_its_deadline_only(
    file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calls, "_call_limit", 0.2)
    turn = calls_of(("wait", {}), ("echo", {"text": "x"}))
    [step] = use(file, turn, max_parallel_calls=2)
    contents = [message["content"] for message in step.messages]
    assert contents == ["error: timed out after 0.2 s", "x"]
    assert [use.error for use in step.uses] == ["timeout", None]


def test_schema_of_a_function() -> None:
    def weather(city: str, days: int = 1, unit: str | None = None) -> str:
        """Return the weather.

        More of it.

        Args:
            city: Name: with a colon.
            days: Number of days,
                today included.

        Returns:
            city: not an argument.
        """
        return ""

    assert schema_of(weather)["function"] == {
        "name": "weather",
        "description": "Return the weather.\n\nMore of it.",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "description": "Name: with a colon."},
                "days": {"type": "integer", "description": "Number of days, today included."},
                "unit": {"anyOf": [{"type": "string"}, {"type": "null"}]},
            },
            "required": ["city"],
        },
    }


def test_functions_that_cannot_be_tools() -> None:
    def undocumented(x: int) -> int:
        return x

    def untyped(x) -> int:
        """Do."""
        return x

    def many(*x: int) -> int:
        """Do."""
        return x[0]

    for function, message in (
        (undocumented, "has no docstring"),
        (untyped, "'x' of the tool 'untyped' has no type hint"),
        (many, "has the parameter .\\*x: "),
    ):
        with pytest.raises(ConfigError, match=message) as caught:
            schema_of(function)
        assert str(caught.value.problems[0].where).startswith(__file__)


def test_wrong_configurations(file: str, tmp_path: Path) -> None:
    (tmp_path / "none.py").write_text("def f(): ...")
    for params, message in (
        ({"function_tool_path": str(tmp_path / "none.py")}, "no function marked"),
        ({"function_tool_path": "missing.py"}, "does not exist"),
        ({"tools": ["calculato"]}, "unknown tool 'calculato'"),
        ({"tools": ["calculator"], "tool_params": {"x": {}}}, "which `tools` does not name"),
        ({"tools": [f"{file}:echo"], "function_tool_path": file}, "two tools have the name 'echo'"),
    ):
        with pytest.raises(ConfigError, match=message):
            load_here("tools", params)


def test_arguments_of_tools_without_tools_name_the_key_to_set() -> None:
    with pytest.raises(ValueError, match=r"multi_turn\.tool_config_path"):
        play_here(
            "tools", {}, (), {"extra_info": {"tools_kwargs": {"calc": {"create_kwargs": {}}}}}
        )


def test_selection_of_tools_by_the_row(file: str) -> None:
    chosen = {"tool_selection": ["numbers"], "tools_kwargs": {"numbers": None}}
    [step] = use(file, turn_of("echo", text="x"), extra_info=chosen)
    assert step.messages[0]["content"] == "error: unknown tool 'echo'; known: numbers"
    with pytest.raises(ValueError, match="unknown tool 'x'"):
        use(file, extra_info={"tool_selection": ["x"]})
    with pytest.raises(ValueError, match="did you mean 'echo'"):
        use(file, extra_info={"tools_kwargs": {"ech": {}}})


@pytest.mark.parametrize(
    ("side", "expected"),
    [
        ("left", "0123...(truncated)"),
        ("right", "(truncated)...6789"),
        ("middle", "01...(truncated)...89"),
    ],
)
def test_truncation(side: Side, expected: str, file: str) -> None:
    assert truncated("0123456789", 4, side) == expected
    assert truncated("0123", 4, side) == "0123"
    limits = {"max_tool_response_length": 4, "tool_response_truncate_side": side}
    [step] = use(file, turn_of("echo", text="0123456789"), **limits)
    assert step.messages[0]["content"] == expected


def test_entries_that_parquet_adds_are_dropped() -> None:
    given = {"a": {"create_kwargs": {"x": None, "y": [{"z": None}]}}, "b": None}
    assert without_none(given) == {"a": {"create_kwargs": {"y": [{}]}}}


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("2 ** 100", str(2**100)),
        ("123456789 * 987654321", "121932631112635269"),
        ("0.1 + 0.2", "0.3"),
        ("7 / 2", "3.5"),
        ("6 / 2", "3"),
        ("-7 // 2 + 7 % 3", "-3"),
        ("2 ^ 3 × (4 − 1)", "24"),
        ("1 / 3", "0.333333333333"),
        ("4 ** 0.5", "2"),
        ("1_000 + 1e3", "2000"),
    ],
)
def test_calculator(expression: str, value: str) -> None:
    assert calculate(expression) == value


@pytest.mark.parametrize(
    "expression",
    [
        "9 ** 9 ** 9",
        "(2 ** 9000) ** 2",
        "1 / 0",
        "__import__('os')",
        "x + 1",
        "True + 1",
        "'a' * 3",
        "1 +",
        "(" * 900,
        "1" * 2000,
        "10.5 ** 99999.5",
        "(-8) ** 0.5",
        "1e999999999",
        "",
    ],
)
def test_calculator_refuses(expression: str) -> None:
    with pytest.raises(ValueError):
        calculate(expression)
