"""Tests of classes of SkyRL-Gym and TRL, which run unmodified and without these packages."""

from __future__ import annotations

import asyncio
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from rlctl.errors import ConfigError
from rlctl.runtime.agents.environments.pool import EnvironmentFailed, EnvironmentPool, Timeouts
from rlctl.runtime.agents.environments.protocol import Step, ToolCall, Turn

SKYRL = """
from typing import Any, Dict
from skyrl_gym.envs.base_text_env import BaseTextEnv, BaseTextEnvStepOutput, ConversationType

class Guess(BaseTextEnv):
    def __init__(self, env_config: Any, extras: Dict[str, Any] = {}):
        super().__init__()
        assert extras["reward_spec"] == extras["reward_model"]
        self.truth = extras["reward_spec"]["ground_truth"]
        self.max_turns = extras.get("max_turns", 3)
        self.bonus = env_config.reward.bonus

    def init(self, prompt: ConversationType):
        return [{"role": "system", "content": "guess"}, *prompt], {}

    def step(self, action: str) -> BaseTextEnvStepOutput:
        self.turns += 1
        done = action == self.truth or self.turns >= self.max_turns
        reward = 1.0 + self.bonus if action == self.truth else 0.0
        if done:
            return BaseTextEnvStepOutput(observations=[], reward=reward, done=True, metadata={})
        hint = {"role": "user", "content": "no"}
        return BaseTextEnvStepOutput(
            observations=[hint], reward=reward, done=False, metadata={"turn": self.turns}
        )

    def get_metrics(self):
        return {"turns": self.turns, "name": "x"}

    def close(self):
        print("closed", self.turns)
"""
TRL = '''
class Counter:
    def __init__(self):
        self.value = 0

    def reset(self, start=0, **kwargs) -> str | None:
        self.value = start
        return f"The counter is {start}."

    def increment(self, step: int) -> int:
        """Increment the counter.

        Args:
            step: Number to add.
        """
        self.value += step
        return self.value

    async def read(self) -> str:
        """Read the counter."""
        return f"it is {self.value}"

    def _hidden(self):
        pass

    def get_reward(self) -> float:
        return float(self.value)

class Echo:
    def reset(self):
        return "Say something."

    def echo(self, text: str) -> str:
        """Repeat a text."""
        return text

FACTORIES = {"counter": Counter, "echo": Echo}

class Untyped:
    def reset(self):
        pass

    def tool(self, x):
        """Do."""

class Nothing:
    pass
'''


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "guess.py").write_text(SKYRL)
    (tmp_path / "counter.py").write_text(TRL)
    return tmp_path


def play(
    environment: str, params: Mapping[str, Any], row: Mapping[str, Any], turns: Sequence[Turn]
) -> tuple[Any, list[Step], Any]:
    """Return what `reset` gave, the steps and the score of an episode in a worker process."""

    async def run(pool: EnvironmentPool) -> tuple[Any, list[Step], Any]:
        remote = await pool.open(row, "k")
        steps = [await remote.step(turn) for turn in turns]
        score = await remote.score()
        await remote.close()
        return (remote.messages, remote.tools), steps, score

    limits = Timeouts(300, 300)
    with EnvironmentPool(environment, params, timeouts=limits, logs=Path()) as pool:
        return asyncio.run(run(pool))


@pytest.mark.parametrize(
    ("environment", "params"),
    [("guess.py:Guess", {}), ("skyrl", {"env_class": "guess.py:Guess"})],
)
def test_class_of_skyrl_gym(
    folder: Path, environment: str, params: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "skyrl_gym", raising=False)
    prompt = [{"role": "user", "content": "?"}]
    row = {"prompt": prompt, "ground_truth": "7", "extra_info": {"index": 1}}
    params = {**params, "env_config": {"reward": {"bonus": 0.5}}}
    reset, steps, score = play(environment, params, row, [Turn("3"), Turn("7")])
    assert reset == ([{"role": "system", "content": "guess"}, *prompt], [])
    assert steps == [
        Step([{"role": "user", "content": "no"}], 0.0, False, (), {"metadata": {"turn": 1}}),
        Step([], 1.5, True),
    ]
    assert score == {"turns": 2.0, "score": 0.0}
    assert "closed 2" in Path("environment-0.log").read_text()
    assert "skyrl_gym" not in sys.modules
    _, steps, _ = play(environment, {**params, "max_turns": 1}, row, [Turn("3")])
    assert steps[0].done


@pytest.mark.parametrize(
    ("environment", "params"),
    [("counter.py:Counter", {}), ("trl", {"factory": "counter.py:Counter"})],
)
def test_class_of_trl(folder: Path, environment: str, params: dict[str, Any]) -> None:
    row = {"prompt": [], "extra_info": {"start": 5}}
    calls = (ToolCall("1", "increment", {"step": 2}), ToolCall("2", "_hidden", {}))
    turns = [Turn("", calls), Turn("", (ToolCall("3", "read", {}),)), Turn("bye")]
    params = {**params, "max_parallel_calls": 2}
    (messages, tools), steps, score = play(environment, params, row, turns)
    assert messages == "The counter is 5."
    assert [tool["function"]["name"] for tool in tools] == ["increment", "read"]
    assert tools[0]["function"]["parameters"]["properties"] == {
        "step": {"type": "integer", "description": "Number to add."}
    }
    assert [m["content"] for step in steps for m in step.messages] == [
        "7",
        "error: unknown tool '_hidden'; known: increment, read",
        "it is 7",
    ]
    assert (steps[-1].done, score) == (True, 7.0)
    with EnvironmentPool(environment, params) as pool:
        assert [tool["function"]["name"] for tool in pool.tools] == ["increment", "read"]


@pytest.mark.parametrize(
    ("environment", "params"),
    [
        ("counter.py:FACTORIES", {}),
        ("trl", {"factory": {"counter": "counter.py:Counter", "echo": "counter.py:Echo"}}),
    ],
)
def test_dictionary_of_classes_of_trl(
    folder: Path, environment: str, params: dict[str, Any]
) -> None:
    """The row's `extra_info.environment` chooses the class."""
    for name, message, tools in (
        ("counter", "The counter is 0.", ["increment", "read"]),
        ("echo", "Say something.", ["echo"]),
    ):
        row = {"prompt": [], "extra_info": {"environment": name}}
        (opening, schemas), _, _ = play(environment, params, row, [Turn("bye")])
        assert opening == message
        assert [tool["function"]["name"] for tool in schemas] == tools
    with pytest.raises(EnvironmentFailed, match="is None; known: counter, echo"):
        play(environment, params, {"prompt": [], "extra_info": {}}, [])


def test_wrong_classes(folder: Path) -> None:
    for name, message in (
        ("counter.py:Untyped", "'x' of the tool 'tool' has no type hint"),
        ("counter.py:Nothing", "is no environment"),
        ("skyrl", "skyrl needs a value for env_class"),
    ):
        with pytest.raises(ConfigError, match=message):
            EnvironmentPool(name)


def test_examples_of_the_documentation(folder: Path) -> None:
    text = (Path(__file__).parents[3] / "docs" / "environments.md").read_text()
    tool, environment = re.findall(r"```python\n(.*?)```", text, re.DOTALL)[:2]
    Path("tools.py").write_text(f"{tool}\nRATES = {{'USD': 1.5}}\n")
    Path("game.py").write_text(environment)
    call = ToolCall("1", "convert", {"amount": 3, "currency": "USD"})
    params = {"function_tool_path": "tools.py"}
    (_, tools), [step], _ = play("tools", params, {}, [Turn("", (call,))])
    assert tools[0]["function"]["description"] == "Convert an amount of euros."
    assert step.messages[0]["content"] == "4.50 USD"
    turns = [Turn("50"), Turn("42")]
    (reset, _), steps, score = play("game.py:HigherOrLower", {}, {"ground_truth": "42"}, turns)
    assert reset == "Guess a number from 1 to 100."
    assert [each.done for each in steps] == [False, True]
    assert (steps[0].messages[0]["content"], steps[0].reward, score) == ("lower", -0.01, 1.0)
