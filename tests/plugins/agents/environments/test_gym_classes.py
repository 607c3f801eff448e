"""Tests of classes of SkyRL-Gym and TRL, which run unmodified and without these packages."""

from __future__ import annotations

import importlib.metadata
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from rlctl.data_prep.verifiers_rows import VerifiersParams, check_release, verifiers
from rlctl.errors import ConfigError, MissingExtraError, UsageError
from rlctl.plugins.agents.environments.protocol import Step
from rlctl.plugins.agents.programs.verifiers_program import VerifiersParams as ProgramParams
from rlctl.plugins.agents.programs.verifiers_program import VerifiersProgram
from rlctl.runtime.serving.chat import ToolCall, Turn
from tests.plugins.agents.environments.episodes import load_here, names_of, play, play_here, turn_of

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
def folder(here: Path) -> Path:
    (here / "guess.py").write_text(SKYRL)
    (here / "counter.py").write_text(TRL)
    return here


def test_class_of_skyrl_gym(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "skyrl_gym", raising=False)
    prompt = [{"role": "user", "content": "?"}]
    row = {"prompt": prompt, "ground_truth": "7", "extra_info": {"index": 1}}
    params = {"env_config": {"reward": {"bonus": 0.5}}}
    turns = [Turn("3"), Turn("7")]
    for played in (
        play("guess.py:Guess", params, turns, row),
        play_here("skyrl", {"env_class": "guess.py:Guess", **params}, turns, row),
    ):
        assert played.messages == [{"role": "system", "content": "guess"}, *prompt]
        assert played.tools == []
        assert played.steps == [
            Step([{"role": "user", "content": "no"}], 0.0, False, (), {"metadata": {"turn": 1}}),
            Step([], 1.5, True),
        ]
        assert played.score == {"turns": 2.0, "score": 0.0}
    assert "closed 2" in Path("environment-0.log").read_text(encoding="utf-8")
    assert "skyrl_gym" not in sys.modules
    [step] = play_here("guess.py:Guess", {**params, "max_turns": 1}, turns[:1], row).steps
    assert step.done


def test_class_of_trl(folder: Path) -> None:
    row = {"prompt": [], "extra_info": {"start": 5}}
    calls = (ToolCall("1", "increment", {"step": 2}), ToolCall("2", "_hidden", {}))
    turns = [Turn("", calls), turn_of("read"), Turn("bye")]
    params = {"max_parallel_calls": 2}
    for played in (
        play("counter.py:Counter", params, turns, row),
        play_here("trl", {"factory": "counter.py:Counter", **params}, turns, row),
    ):
        assert played.messages == "The counter is 5."
        assert names_of(played.tools) == ["increment", "read"]
        assert played.tools[0]["function"]["parameters"]["properties"] == {
            "step": {"type": "integer", "description": "Number to add."}
        }
        hidden = "error: unknown tool '_hidden'; known: increment, read"
        assert played.texts == ["7", hidden, "it is 7"]
        assert (played.steps[-1].done, played.score) == (True, 7.0)
    assert names_of(load_here("counter.py:Counter", params)) == ["increment", "read"]


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
        played = play_here(environment, params, [Turn("bye")], row)
        assert played.messages == message
        assert names_of(played.tools) == tools
    with pytest.raises(ValueError, match="is None; known: counter, echo"):
        play_here(environment, params, row={"prompt": [], "extra_info": {}})


def test_wrong_classes(folder: Path) -> None:
    for name, message in (
        ("counter.py:Untyped", "'x' of the tool 'tool' has no type hint"),
        ("counter.py:Nothing", "is no environment"),
    ):
        with pytest.raises(ConfigError, match=message):
            load_here(name, {})


def test_registered_environments_of_skyrl_gym_need_the_package(folder: Path) -> None:
    with pytest.raises(MissingExtraError, match="'gsm8k' is registered by the package skyrl-gym"):
        load_here("skyrl", {"env_class": "gsm8k"})
    with pytest.raises(ValueError, match="neither the row nor"):
        play_here("skyrl", {}, [], {"prompt": []})
    with pytest.raises(MissingExtraError):
        play_here("skyrl", {}, [], {"prompt": [], "extra_info": {"env_class": "gsm8k"}})


def test_examples_of_the_documentation(folder: Path) -> None:
    text = (Path(__file__).parents[4] / "docs" / "environments.md").read_text()
    tool, environment = re.findall(r"```python\n(.*?)```", text, re.DOTALL)[:2]
    Path("tools.py").write_text(f"{tool}\nRATES = {{'USD': 1.5}}\n", encoding="utf-8")
    Path("game.py").write_text(environment, encoding="utf-8")
    turn = turn_of("convert", amount=3, currency="USD")
    played = play_here("tools", {"function_tool_path": "tools.py"}, [turn])
    assert played.tools[0]["function"]["description"] == "Convert an amount of euros."
    assert played.texts == ["4.50 USD"]
    turns = [Turn("50"), Turn("42")]
    played = play_here("game.py:HigherOrLower", {}, turns, {"ground_truth": "42"})
    assert played.messages == "Guess a number from 1 to 100."
    assert [step.done for step in played.steps] == [False, True]
    assert (played.texts[0], played.steps[0].reward, played.score) == ("lower", -0.01, 1.0)


@pytest.mark.parametrize(
    ("release", "is_played"),
    [
        ("0.1.9.post3", False),
        ("0.1.14", True),
        ("0.2.0", True),
        ("0.3.1.dev7", True),
        ("0.4.0", False),
        ("1.0", False),
    ],
)
def test_the_range(release: str, is_played: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda _: release)
    if is_played:
        check_release()
        return
    with pytest.raises(MissingExtraError, match=rf"its release is {release}, and .* 0\.1\.14 to"):
        VerifiersProgram(ProgramParams(environment="wordle"))


def test_another_interpreter_names_its_release(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "verifiers-0.4.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: verifiers\nVersion: 0.4.0\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(UsageError, match=r"ImportError: its release is 0\.4\.0"):
        verifiers(VerifiersParams(environment="wordle", python=sys.executable))
