"""Environments of verifiers as agent programs: they play an episode with an OpenAI client.

The library is imported where the program runs: in the processes of `agent.python`, whose packages
may be others than rlctl's.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import Field

from rlctl import plugins
from rlctl.data_prep.verifiers_rows import check_release
from rlctl.errors import ConfigError, MissingExtraError

# A policy that writes nothing: the rollout ends, and is scored as it is.
_EMPTY = "EmptyModelResponseError"
ROW = "verifiers"  # entry of `extra_info` with the columns of the environment's data set


class VerifiersParams(plugins.Params):
    """Settings of an environment of verifiers."""

    environment: str = Field(description="id of an installed environment, such as wordle")
    arguments: dict[str, Any] = Field({}, description="arguments of its load_environment")


class VerifiersProgram:
    """Rollouts of an environment, scored by its rubric."""

    Params = VerifiersParams

    def __init__(self, params: VerifiersParams) -> None:
        """Load the environment. Raises MissingExtraError and ConfigError."""
        try:
            check_release()
            import verifiers
            from verifiers.clients import OpenAIChatCompletionsClient
        except ImportError as error:
            raise MissingExtraError(
                f"verifiers with classic environments cannot be imported: {error}",
                hint="agent.python: an interpreter that has verifiers 0.1.14 to 0.3 and openai",
            ) from error
        self._new_client = OpenAIChatCompletionsClient
        self._environment = verifiers.load_environment(params.environment, **params.arguments)
        if self._environment.requires_group_rollouts:
            raise ConfigError(
                f"the rubric of {params.environment!r} scores a group of rollouts together",
                hint="use reward functions that score one rollout",
            )

    async def __call__(self, task: Mapping[str, Any], client: Any) -> dict[str, float]:
        """Play the row's example; return its reward, and the rubric's metrics as components."""
        example = {**task["extra_info"].get(ROW, {}), "prompt": task["prompt"]}
        example.setdefault("answer", task["ground_truth"])
        example.setdefault("example_id", 0)
        output = await self._environment.run_rollout(
            example, self._new_client(client), "policy", {}
        )
        error = output["error"]
        if error is not None and error["error"] != _EMPTY:
            raise RuntimeError(f"the rollout failed: {error['error_chain_repr']}")
        return {**(output["metrics"] or {}), "score": output["reward"]}
