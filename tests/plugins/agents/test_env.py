"""`rlctl env`: lists, descriptions, and episodes with scripted turns."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from rlctl.data_prep.rows import PromptRow, write_rows
from rlctl.errors import ConfigError, NotFoundError, RlctlError, UsageError
from rlctl.plugins.agents.commands import env
from tests.plugins.agents.quiz import write_quiz

CALLS = """
{"text": "hm", "calls": [{"name": "calculator", "arguments": {"expression": "2**70"}}]}
<tool_call>{"name": "calculator", "arguments": {"expression": "1/0"}}</tool_call>
"It is\\n42."

It is 43.
"""
MINE = '''
from rlctl.plugins.agents.environments.protocol import Step
class Mine:
    """Environment of a test."""
    tools = []
    async def reset(self, row):
        return "more"
    async def step(self, turn):
        raise LookupError("broken")
    async def score(self):
        return 1.0
    async def close(self):
        pass
'''

TOOL_FILE = '''
from rlctl.plugins.agents.environments.function_tools import function_tool
@function_tool
def convert(amount: float) -> float:
    """Convert an amount.

    Args:
        amount: Euros.
    """
    return amount
class Counter:
    """Tool with a state in each episode."""
    schema = {"type": "function", "function": {"name": "counter", "parameters": {}}}
    is_lenient = False
    async def session(self, episode):
        return self
'''


def run(*arguments: str, code: int = 0) -> Any:
    result = CliRunner().invoke(env.app, [*arguments, "--json"])
    if isinstance(result.exception, RlctlError):
        raise result.exception
    assert result.exit_code == code, result.output
    return json.loads(result.stdout)


def test_ls_and_show() -> None:
    listed = {each["name"]: each for each in run("ls")}
    assert listed["calculator"]["kind"] == "tool"
    assert listed["gridworld"]["description"].startswith("Grid with a goal")
    shown = run("show", "gridworld")
    assert {"name": "size", "default": 4, "description": "width and height of the grid"} in shown[
        "settings"
    ]
    for arguments in (["calculator"], ["tools", "tools=[calculator]"]):
        [tool] = run("show", *arguments)["tools"]
        assert tool["function"]["name"] == "calculator"
    assert run("show", "tools")["tools"] == []
    with pytest.raises(ConfigError, match="unknown environment 'grid'"):
        run("show", "grid")


def test_ls_has_the_environments_of_verifiers(tmp_path: Path) -> None:
    """They are distributions that require verifiers and define `load_environment`."""
    site = tmp_path / "lib/python3.11/site-packages"
    for name, requires, text in (
        ("my-words", "verifiers>=0.1.14", "def load_environment(): ..."),
        ("trainer", "verifiers", ""),
        ("other", "verifiers-extras", "def load_environment(): ..."),
    ):
        folder = site / f"{name.replace('-', '_')}-1.0.dist-info"
        folder.mkdir(parents=True)
        (folder / "METADATA").write_text(
            f"Name: {name}\nVersion: 1.0\nSummary: Words.\nRequires-Dist: {requires}\n"
        )
        (site / f"{name.replace('-', '_')}.py").write_text(text)
    listed = run("ls", "--python", str(tmp_path / "bin/python"))
    found = [row for row in listed if row["kind"] == "verifiers"]
    assert found == [{"name": "my-words", "kind": "verifiers", "description": "Words."}]


def test_show_prints_the_schema_of_a_tool_in_a_file(tmp_path: Path) -> None:
    path = tmp_path / "tools.py"
    path.write_text(TOOL_FILE)
    for name in ("convert", "Counter"):
        [tool] = run("show", f"{path}:{name}")["tools"]
        assert tool["function"]["name"] == name.lower()


def test_episodes_with_scripted_turns(tmp_path: Path) -> None:
    (tmp_path / "calls.txt").write_text(CALLS)
    script = ["--scripted", str(tmp_path / "calls.txt"), "--episodes", "3"]
    first, second, third = run("test", "tools", "tools=[calculator]", *script)
    assert [message["content"] for message in first["messages"]] == [
        "hm",
        str(2**70),
        "",
        "error: ValueError: division by zero",
        "It is\n42.",
    ]
    assert [turn["uses"][0]["error"] for turn in first["turns"][:2]] == [None, "raised"]
    assert (first["outcome"], first["score"], first["error"]) == ("done", None, None)
    assert len(second["messages"]) == 1
    assert third["messages"] == first["messages"]


def test_failures_exit_with_one(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(MINE)
    (tmp_path / "script").write_text("hello")
    row = PromptRow("s", [{"role": "user", "content": "prompt"}], "1")
    write_rows(tmp_path / "rows.parquet", [row])
    options = ["--scripted", str(tmp_path / "script"), "--data", str(tmp_path / "rows.parquet")]
    [episode] = run("test", f"{tmp_path}/mine.py:Mine", *options, code=1)
    assert episode["messages"][0]["content"] == "prompt\nmore"
    error = f"error: step: LookupError: broken ({tmp_path}/mine.py:9)"
    assert (episode["outcome"], episode["error"]) == ("failed", error)
    result = CliRunner().invoke(env.app, ["test", f"{tmp_path}/mine.py:Mine", *options])
    assert result.exit_code == 1
    assert "LookupError: broken" in result.output


def test_wrong_arguments(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="nothing to test was given"):
        run("test", "--model", "quickstart")
    with pytest.raises(UsageError, match="ENV and --program exclude each other"):
        run("test", "gridworld", "--program", "agent.py:run", "--model", "quickstart")
    with pytest.raises(UsageError, match="--program needs a model"):
        run("test", "--program", "agent.py:run")
    with pytest.raises(NotFoundError):
        run("test", "gridworld", "--scripted", "missing")
    with pytest.raises(UsageError, match="has no value"):
        run("test", "gridworld", "size")
    with pytest.raises(ConfigError, match="size of gridworld"):
        run("test", "gridworld", "size=x")
    (tmp_path / "script").write_text('{"text": ')
    with pytest.raises(ConfigError, match="no JSON"):
        run("test", "gridworld", "--scripted", str(tmp_path / "script"))


def test_episodes_with_a_model(tmp_path: Path) -> None:
    file = write_quiz(tmp_path, 2, num_problems=2)
    words = ["test", "tests.plugins.agents.quiz:Quiz", "--model", "quickstart", "--data", str(file)]
    options = [*words, "--episodes", "2", "-s", "data.max_response_length=256"]
    first, second = run(*options)
    assert "<|user|>" in first["prompt"]
    roles = ["assistant", "user", "assistant"]
    for each in (first, second):
        assert [message["role"] for message in each["messages"]] == roles
        assert (each["outcome"], each["score"], each["error"]) == ("done", 0.0, None)
    program = ["test", "--program", "tests.plugins.agents.programs:chat", *words[2:]]
    [asked] = run(*program, "-s", "data.max_response_length=256")
    assert [message["role"] for message in asked["messages"]] == roles
    texts = [[message["text"] for message in each["messages"]] for each in (asked, first)]
    assert texts[0] == texts[1]
    sleeping = ["test", "--program", "tests.plugins.agents.programs:sleeps", *words[2:]]
    [slow] = run(*sleeping, "--timeout", "1", "-s", "data.max_response_length=256", code=1)
    assert slow["error"] == "the episode took longer than 1 s"
    shown = CliRunner().invoke(env.app, [*words, "-s", "data.max_response_length=256"]).output
    assert "assistant  trained, " in shown
    assert "outcome: done, 2 turns, " in shown


def test_a_prompt_may_be_the_environments(tmp_path: Path) -> None:
    [episode] = run("test", "gridworld", "size=3", "--model", "quickstart")
    assert "at 0 0, goal 2 2" in episode["prompt"]
    with pytest.raises(UsageError, match="exclude each other"):
        run("test", "gridworld", "--model", "quickstart", "--scripted", str(tmp_path))
    with pytest.raises(UsageError, match="no effect without --model"):
        run("test", "gridworld", "-s", "data.max_response_length=256")
