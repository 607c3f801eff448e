"""Environments of SkyRL-Gym: subclasses of `BaseTextEnv` with `init(prompt)` and `step(action)`.

If the package `skyrl_gym` is not installed, worker processes offer the base class that such files
import.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from numbers import Real
from typing import Any, TypedDict

from pydantic import Field

from rlctl import plugins
from rlctl.errors import MissingExtraError
from rlctl.plugins.agents.environments.protocol import Row, Step
from rlctl.plugins.agents.environments.stand_ins import provide
from rlctl.plugins.user_code import load_named
from rlctl.runtime.sandbox.calls import call
from rlctl.runtime.serving.chat import Message, ToolSchema, Turn


class SkyRLParams(plugins.Params):
    """Settings of an environment of SkyRL-Gym."""

    env_class: str | None = Field(
        None,
        description="class: module:Class, path.py:Class or a name that skyrl_gym registers; "
        "null: the row's env_class",
    )
    env_config: dict[str, Any] = Field(
        {}, description="argument env_config; of registered names one each, by name"
    )
    max_turns: int | None = Field(None, ge=1, description="extras.max_turns of each episode")


class StepOutput(TypedDict, total=False):
    """Result of `step`: SkyRL-Gym's BaseTextEnvStepOutput."""

    observations: list[Message]
    reward: float
    done: bool
    metadata: dict[str, Any]
    postprocessed_action: str | None


class BaseTextEnv:
    """Base class with the methods of SkyRL-Gym's, for files that import it."""

    def __init__(self) -> None:
        self.turns = 0
        self.max_turns = 1
        self.tool_groups: list[Any] = []
        self.tool_to_toolgroup: dict[str, str] = {}

    def init(self, prompt: list[Message]) -> tuple[list[Message], dict[str, Any]]:
        """Return the prompt of the episode and metadata."""
        return prompt, {}

    def step(self, action: str) -> StepOutput:
        """Return the reply to a turn."""
        raise NotImplementedError

    def init_tool_groups(self, tool_groups: list[Any] | None = None) -> None:
        """Register groups of tools, each with `get_name()` and `get_tool_names()`."""
        self.tool_groups = tool_groups or []
        self.tool_to_toolgroup = {
            tool: group.get_name() for group in self.tool_groups for tool in group.get_tool_names()
        }

    def get_metrics(self) -> dict[str, Any]:
        """Return numbers about the episode."""
        return {}

    def close(self) -> None:
        """Release what the episode holds."""


class SkyRLEnvironment:
    """Class of SkyRL-Gym as an environment. Its rewards belong to the turns; the score is 0."""

    Params = SkyRLParams
    tools: Sequence[ToolSchema] = ()  # an environment of SkyRL-Gym reads the text of turns itself

    def __init__(self, params: SkyRLParams, shared: Callable[..., Any] | None = None) -> None:
        self._params = params
        self._class = shared
        self._object: Any = None

    @staticmethod
    def prepare(params: SkyRLParams) -> Callable[..., Any] | None:
        """Import the class; None if each row names a registered one."""
        provide_skyrl()
        name = params.env_class
        if name is None:
            return None
        if ":" in name:
            return load_named("environments", name, "environment")
        return _registered(name)

    async def reset(self, row: Row) -> list[Message]:
        """Build the object with the row as `extras`, and return the prompt of its `init`."""
        from omegaconf import OmegaConf

        extras = {**(row.get("extra_info") or {}), **row}
        for name in ("reward_spec", "reward_model"):  # environments of SkyRL-Gym read either
            extras.setdefault(name, {"ground_truth": row.get("ground_truth")})
        if self._params.max_turns is not None:
            extras["max_turns"] = self._params.max_turns
        prompt = list(row.get("prompt") or [])
        config = self._params.env_config
        name = self._params.env_class or extras.get("env_class")
        if name is None:
            raise ValueError("neither the row nor agent.params has env_class")
        if ":" not in name:
            config = config.get(name, {})  # as in SkyRL's environment.skyrl_gym
        self._object = await call(
            self._class or _registered(name),
            env_config=OmegaConf.create(config),  # as SkyRL: its keys are attributes
            extras=extras,
        )
        found, _ = await call(self._object.init, prompt)
        return list(found)

    async def step(self, turn: Turn) -> Step:
        """Return the observations, the reward and the end."""
        found = await call(self._object.step, turn.text)
        output: Mapping[str, Any] = found if isinstance(found, Mapping) else vars(found)
        info = {"metadata": dict(output["metadata"])} if output.get("metadata") else {}
        reward = float(output["reward"])
        if output["done"]:
            return Step([], reward, done=True, info=info)
        return Step(list(output.get("observations") or []), reward, info=info)

    async def score(self) -> dict[str, float]:
        """Return 0, and the numbers of `get_metrics` as components."""
        metrics = await call(self._object.get_metrics)
        numbers = {name: float(v) for name, v in metrics.items() if isinstance(v, Real)}
        return {**numbers, "score": 0.0}

    async def close(self) -> None:
        """Call `close` of the object."""
        if self._object is not None:
            await call(self._object.close)


def _registered(name: str) -> Callable[..., Any]:
    """Return the builder of a registered environment. Raises MissingExtraError."""
    try:
        from skyrl_gym import make
    except ImportError as error:
        raise MissingExtraError(
            f"the environment {name!r} is registered by the package skyrl-gym",
            hint="pip install skyrl-gym; your classes are module:Class or path.py:Class",
        ) from error
    return partial(make, name)


def provide_skyrl() -> None:
    """Offer the modules of skyrl_gym that environments import, unless it is installed."""
    types = {
        "BaseTextEnv": BaseTextEnv,
        "BaseTextEnvStepOutput": StepOutput,
        "ConversationType": list[Message],
        "MessageType": Message,
    }
    provide({"skyrl_gym": {}, "skyrl_gym.envs": {}, "skyrl_gym.envs.base_text_env": types})
