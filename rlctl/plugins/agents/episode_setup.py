"""Construction of what episodes share, from a configuration, and the check of an episode."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from rlctl import plugins
from rlctl.data_prep.images import with_parts
from rlctl.data_prep.rows import PromptRow
from rlctl.errors import ConfigError
from rlctl.plugins.agents.chat_bridge import ChatBridge
from rlctl.plugins.agents.environments.environment_pool import EnvironmentFailed, EnvironmentPool
from rlctl.plugins.agents.environments.scripted import opening
from rlctl.plugins.agents.episode import EpisodeSettings
from rlctl.plugins.agents.template_check import TOOL, USER, check_chat_template
from rlctl.recipes import schema
from rlctl.runtime.base.image_processor import processor_of
from rlctl.runtime.base.rank_info import RankInfo
from rlctl.runtime.data.image_prompts import ImagePrompts
from rlctl.runtime.data.tokenizer import stop_token_ids
from rlctl.runtime.rollout.auto import reads_images
from rlctl.runtime.rollout.sampling_params import SamplingConfig
from rlctl.runtime.sandbox.isolation import missing_isolation
from rlctl.runtime.serving.chat import Message, ToolSchema

LOG = logging.getLogger(__name__)

_ROLLOUT = "actor_rollout_ref.rollout"


def episode_settings(
    config: schema.Config,
    tokenizer: PreTrainedTokenizerBase,
    sampling: SamplingConfig,
    rank_info: RankInfo,
    logs: Path | None,
) -> EpisodeSettings:
    """Return what the episodes of a run share; close its `environments` at the end.

    Starts the processes of the environments; what they print goes to files in `logs`, or to stderr.
    Raises ConfigError for an environment or a tool that cannot be loaded.
    """
    rollout = config.actor_rollout_ref.rollout
    bridge = _chat_bridge(config, tokenizer, sampling.stop_token_ids)
    parser = plugins.load("tool_parsers", rollout.multi_turn.format)()
    kept = None if rollout.agent.program is None else kept_roles(bridge)
    schedule = rollout.agent.schedule
    return EpisodeSettings(
        tokenizer=tokenizer,
        bridge=bridge,
        parser=parser,
        # Last: an error after the start of its processes would leave them.
        environments=EnvironmentPool.from_config(rollout, logs),
        multi_turn=rollout.multi_turn,
        timeouts=rollout.agent.timeouts,
        default_agent=rollout.agent.default_agent_loop,
        max_prompt_length=config.data.max_prompt_length,
        max_response_length=config.data.max_response_length,
        sampling=sampling,
        fixed=rank_info.device == "cpu" if schedule == "auto" else schedule == "fixed",
        num_threads=rank_info.num_threads,
        max_failed_share=rollout.agent.max_failed_share,
        kept_roles=kept,
    )


def _chat_bridge(
    config: schema.Config, tokenizer: PreTrainedTokenizerBase, stops: tuple[int, ...]
) -> ChatBridge:
    """Return the bridge of a run; messages have images if model and engine read them."""
    rollout = config.actor_rollout_ref.rollout
    model = config.actor_rollout_ref.model
    processor = processor_of(model.path, model.trust_remote_code)
    images = None
    if processor is not None and reads_images(rollout, model, config.trainer.device):
        images = ImagePrompts(model, tokenizer)
    return ChatBridge(tokenizer, stops, config.data.apply_chat_template_kwargs, images)


def check_episodes(
    config: schema.Config,
    tokenizer: PreTrainedTokenizerBase,
    row: PromptRow,
) -> None:
    """Start the environment of `row`, and prove that the chat template keeps earlier tokens.

    Raises ConfigError for an environment that does not start, a template that changes earlier turns
    and a prompt that is too long with its tools.
    """
    rollout = config.actor_rollout_ref.rollout
    if "python" in rollout.agent.params.get("tools", ()) and (missing := missing_isolation()):
        LOG.warning("%s", missing)
    _check_program(rollout.agent)
    stops = stop_token_ids(tokenizer, config.actor_rollout_ref.model.path)
    bridge = _chat_bridge(config, tokenizer, stops)
    agent = rollout.agent.model_copy(update={"num_workers": 1})
    with EnvironmentPool.from_config(rollout.model_copy(update={"agent": agent})) as pool:
        try:
            messages, tools = asyncio.run(_begin(pool, row))
        except EnvironmentFailed as error:
            raise ConfigError(
                f"the environment fails on the first row: {error.text}",
                where=f"{_ROLLOUT}.agent",
                hint="`rlctl env test` runs it alone",
            ) from None
    if rollout.agent.program is not None:
        return  # it writes the prompts, and a template that changes earlier turns begins rows
    replies: set[str] = set()
    if tools:
        replies.add(TOOL)
    if rollout.agent.environment or rollout.multi_turn.interaction_config_path or not tools:
        replies.add(USER)
    check_chat_template(bridge, replies)
    length = len(bridge.opening_ids(messages, tools))
    if length > config.data.max_prompt_length:
        raise ConfigError(
            f"the first prompt has {length} tokens with its tools, more than "
            f"data.max_prompt_length={config.data.max_prompt_length}",
            hint=f"data.max_prompt_length={length} or more",
        )


def _check_program(agent: schema.Agent) -> None:
    """Raise ConfigError for a program together with an environment or its settings.

    A program that is a plug-in has settings.
    """
    is_plugin = agent.program in plugins.names("programs")
    removals = [f"~{_ROLLOUT}.agent.params.{name}" for name in agent.params if not is_plugin]
    if agent.environment is not None:
        removals.insert(0, f"{_ROLLOUT}.agent.environment=null")
    if agent.program is not None and removals:
        raise ConfigError(
            "agent.program and agent.environment with its params exclude each other",
            where=f"{_ROLLOUT}.agent.program={agent.program}",
            hint=" ".join(removals),
        )


def kept_roles(bridge: ChatBridge) -> frozenset[str]:
    """Return the roles of messages after which the chat template keeps all earlier tokens."""
    for roles in ({TOOL, USER}, {TOOL}, {USER}):
        try:
            check_chat_template(bridge, roles)
        except ConfigError:
            continue
        return frozenset(roles)
    return frozenset()


async def _begin(
    pool: EnvironmentPool, row: PromptRow
) -> tuple[Sequence[Message], Sequence[ToolSchema]]:
    """Return the messages and tools with which an episode of `row` begins."""
    environment = await pool.open(asdict(row), "0")
    try:
        messages = with_parts(opening(list(row.prompt), environment.messages), row.images)
        return messages, environment.tools
    finally:
        await environment.close()
