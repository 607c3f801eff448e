"""One episode: the policy's turns and the replies of its environment, token by token.

Ids are only appended: what the policy wrote is never tokenized again, and the ids of replies come
from the chat template's text between two turns (`ChatBridge`).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from transformers import PreTrainedTokenizerBase

from rlctl.data_prep.agent_columns import SINGLE_TURN
from rlctl.data_prep.images import images_in, with_parts
from rlctl.data_prep.message_parts import text_of
from rlctl.episodes import Episode, Message, Use
from rlctl.errors import ConfigError
from rlctl.plugins.agents.chat_bridge import ChatBridge
from rlctl.plugins.agents.environments.environment_pool import (
    EnvironmentFailed,
    EnvironmentPool,
    RemoteEnvironment,
)
from rlctl.plugins.agents.environments.protocol import Row, Step
from rlctl.plugins.agents.environments.scripted import opening
from rlctl.plugins.agents.parsers.base import ToolParser
from rlctl.plugins.agents.tokens import Tokens
from rlctl.plugins.result_check import check_result
from rlctl.recipes import schema
from rlctl.runtime.generation.schedule import Schedule
from rlctl.runtime.rollout.engine import random_stream
from rlctl.runtime.rollout.requests import Completion, Decoding, Request, next_key
from rlctl.runtime.rollout.sampling_params import SamplingConfig
from rlctl.runtime.serving.chat import Message as ChatMessage
from rlctl.runtime.serving.chat import Turn


class State(StrEnum):
    """State of an episode; the names are verl's where it has them."""

    PENDING = "pending"
    GENERATING = "generating"
    PROCESSING_TOOLS = "processing_tools"
    INTERACTING = "interacting"
    FINISHED = "finished"
    FAILED = "failed"


@dataclass(frozen=True)
class EpisodeSettings:
    """Parts and limits that the episodes of a run share."""

    tokenizer: PreTrainedTokenizerBase
    bridge: ChatBridge
    parser: ToolParser
    environments: EnvironmentPool
    multi_turn: schema.MultiTurn
    timeouts: schema.AgentTimeouts
    default_agent: str  # kind of the episodes of rows that name none
    max_prompt_length: int
    max_response_length: int
    sampling: SamplingConfig
    fixed: bool  # turns join at set steps of the engine: see `Schedule`
    num_threads: int  # OpenMP threads of the engines that run in this process
    max_failed_share: float  # of a batch's episodes
    # Of programs: roles of messages that the template appends without a change of earlier tokens.
    kept_roles: frozenset[str] | None = None  # None: there is no program


@dataclass(frozen=True)
class EpisodeTask:
    """Start of one episode of a batch."""

    row: Row
    number: int  # in the batch
    prompt_ids: list[int]  # of the row without tools
    decoding: Decoding
    seed: int
    images: tuple[bytes, ...] = ()  # files of the row's images


def turn_seed(seed: int, turn: int) -> int:
    """Return the random stream of a turn. The first turn has the row's stream."""
    return random_stream(seed, turn) if turn else seed


class EpisodeRun:
    """Coroutine of one episode, and its state."""

    def __init__(
        self,
        settings: EpisodeSettings,
        task: EpisodeTask,
        schedule: Schedule,
    ) -> None:
        """Prepare the episode, which the `states` of the schedule count."""
        self.settings = settings
        self.task = task
        self.schedule = schedule
        self._state = State.PENDING
        schedule.states[self._state] += 1
        self.tokens = Tokens(task.prompt_ids, images=task.images)
        self._messages: list[Message] = []
        self._opening: tuple[Message, ...] = ()
        self._uses: list[Use] = []
        self._num_calls = 0
        self._facts: dict[str, list[float]] = {"turn_scores": [], "tool_rewards": []}
        self._environment: RemoteEnvironment | None = None
        self.was_interrupted = False  # its process was killed or stopped from outside

    @property
    def state(self) -> State:
        """State of the episode, which the schedule counts."""
        return self._state

    @state.setter
    def state(self, state: State) -> None:
        self.schedule.states[self._state] -= 1
        self.schedule.states[state] += 1
        self._state = state

    async def run(self) -> Episode:
        """Play the episode. Failures of its environment are recorded, not raised."""
        began = time.monotonic()
        score: float | dict[str, float] | None = None
        error: str | None = None
        try:
            async with asyncio.timeout(self.settings.timeouts.episode_s):
                outcome = await self._play()
                score = await self._score()
        except TimeoutError:
            limit = self.settings.timeouts.episode_s
            outcome = "timeout"
            error = f"the episode took longer than {limit:g} s"
        except EnvironmentFailed as failure:
            outcome = f"environment_{failure.kind}"
            error = failure.text
            self.was_interrupted = failure.interrupted
        except ConfigError as failure:  # the chat template rejects the environment's messages
            outcome = "environment_error"
            error = str(failure)
        finally:
            await self._close()
        self.state = State.FINISHED if error is None else State.FAILED
        components: dict[str, float] = {}
        if isinstance(score, dict):
            components = dict(score)
            score = components.pop("score", None)
        return Episode(
            outcome,
            tuple(self._messages),
            tuple(self._uses),
            time.monotonic() - began,
            score,
            components,
            error,
            sum(row.num_retokenized() for row in self.rows),
            self._opening,
            **{name: tuple(numbers) for name, numbers in self._facts.items()},
        )

    @property
    def rows(self) -> list[Tokens]:
        """Training rows of the episode."""
        return [self.tokens]

    async def _play(self) -> str:
        """Play to the end and return the outcome."""
        await self._begin()
        limits = self.settings.multi_turn
        turn = 0
        previous = None
        while True:
            completion = await self._generate(turn, previous)
            previous = completion.key
            if completion.finish == "length":
                return "length"
            if self._environment is None:
                return "stop"
            step, parsed = await self._reply()
            if step.done:
                return "done"
            turn += 1
            if turn in (limits.max_assistant_turns, limits.max_user_turns):
                return "max_turns"
            ids = self.settings.bridge.bridge_ids(
                completion.response_ids[-1:].tolist(),
                parsed,
                step.messages,
                self._environment.tools,
            )
            if len(self.tokens.response_ids) + len(ids) >= self.settings.max_response_length:
                self.tokens.finish = "length"
                return "length"
            self.tokens.append_reply(ids, turn - 1, images_in(step.messages))
            self._count_reply(step.messages, len(ids))

    async def _begin(self) -> None:
        """Start the environment and replace the prompt by the one with its tools and messages."""
        if self.task.row["agent_name"] == SINGLE_TURN:
            return
        settings = self.settings
        environment = await settings.environments.open(self.task.row, str(next_key()))
        self._environment = environment
        messages = opening(list(self.task.row["prompt"]), environment.messages)
        messages = with_parts(messages, self.task.images)
        if environment.messages is not None:
            texts = [(m["role"], str(text_of(m.get("content")) or "")) for m in messages]
            self._opening = tuple(Message(role, text, trained=False) for role, text in texts)
        ids = settings.bridge.opening_ids(messages, environment.tools)
        if len(ids) > settings.max_prompt_length:
            raise EnvironmentFailed(
                "error",
                f"the prompt has {len(ids)} tokens with its tools, more than "
                f"data.max_prompt_length={settings.max_prompt_length}",
            )
        self.tokens = Tokens(ids, images=images_in(messages))

    async def _generate(self, turn: int, previous: int | None) -> Completion:
        """Let the policy write a turn."""
        self.state = State.GENERATING
        began = time.monotonic()
        context = self.tokens.context()
        request = Request(
            key=next_key(),
            context_ids=context,
            decoding=self.task.decoding,
            max_tokens=(self.settings.max_response_length - len(self.tokens.response_ids),),
            seeds=(turn_seed(self.task.seed, turn),),
            previous=previous,
            keep=self._environment is not None,
            affinity=self.task.number,
            images=self.tokens.images,
        )
        completion = await self.schedule.generate(request)
        self.tokens.append_turn(context, completion, turn)
        self._add_turn(completion, time.monotonic() - began)
        return completion

    def _add_turn(self, completion: Completion, seconds: float) -> str:
        """Add a turn of the policy to the transcript, and return its text."""
        text = self._text(completion)
        num_tokens = len(completion.response_ids)
        self._messages.append(
            Message("assistant", text, True, num_tokens, seconds, version=completion.version)
        )
        return text

    async def _reply(self) -> tuple[Step, Turn]:
        """Let the environment reply to the last turn."""
        environment = self._environment
        assert environment is not None, "a row with one turn has none"
        text = self._messages[-1].text
        turn = Turn(text)  # an environment without tools reads the text itself
        if environment.tools:
            parser = self.settings.parser
            turn = parser.parse(text, environment.tools, self._num_calls)
            check_result(parser.parse, isinstance(turn, Turn), turn, "a Turn")
        self._num_calls += len(turn.calls)
        self.state = State.PROCESSING_TOOLS if turn.calls or turn.malformed else State.INTERACTING
        began = time.monotonic()
        step = await environment.step(turn)
        seconds = time.monotonic() - began
        for name, numbers in self._facts.items():
            given = step.info.get(name)
            if isinstance(given, list):
                numbers += given
            elif step.reward is not None:
                numbers.append(step.reward)
        if step.reward is not None:
            self.tokens.rewards[len(self.tokens.response_ids) - 1] = step.reward
            self._messages[-1] = replace(self._messages[-1], reward=step.reward)
        self._uses += [Use(use.name, use.seconds, use.error) for use in step.uses]
        replies = [(reply, str(text_of(reply["content"]))) for reply in step.messages]
        self._messages += [
            Message(reply["role"], text, False, 0, seconds, name=reply.get("name"))
            for reply, text in replies
        ]
        return step, turn

    def _count_reply(self, messages: Sequence[ChatMessage], num_ids: int) -> None:
        """Record the tokens of the last messages of the transcript, which have `num_ids`."""
        shares = self.settings.bridge.shares(messages, num_ids)
        start = -len(messages)
        for index, num_tokens in enumerate(shares, start):
            self._messages[index] = replace(self._messages[index], num_tokens=num_tokens)

    def _text(self, completion: Completion) -> str:
        """Return the text of a turn with its special tokens, but without the stop token."""
        ids = completion.response_ids.tolist()  # the tokenizer is slow with tensors
        if ids[-1] in self.task.decoding.stop_token_ids:
            del ids[-1]
        return self._decode(ids)

    def _decode(self, ids: list[int]) -> str:
        text = self.settings.tokenizer.decode(ids, skip_special_tokens=False)
        assert isinstance(text, str)  # one sequence
        return text

    async def _score(self) -> float | dict[str, float] | None:
        """Return the environment's score; None if there is no environment."""
        if self._environment is None:
            return None
        return await self._environment.score()

    async def _close(self) -> None:
        if self._environment is not None:
            await self._environment.close()
