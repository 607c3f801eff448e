"""Episode that an agent program plays: its requests become training rows.

A request that extends a conversation of the episode appends to that row's ids. Any other, as when
the agent forks or compacts its history, begins a row. Ids that the policy wrote are never tokenized
again within a row; in the prompt of a later row they are part of the text of its messages.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any

from rlctl import episodes
from rlctl.errors import ConfigError
from rlctl.plugins.agents.environments.environment_pool import EnvironmentFailed, Timeouts
from rlctl.plugins.agents.environments.program import ENDPOINT
from rlctl.plugins.agents.episode import EpisodeRun, State, turn_seed
from rlctl.plugins.agents.programs.program_conversations import Conversation, continued, stopped
from rlctl.plugins.agents.tokens import Tokens
from rlctl.runtime.rollout.requests import Completion, Request, next_key
from rlctl.runtime.serving.chat import Message, Turn
from rlctl.runtime.serving.chat_api import ChatReply, LogProb
from rlctl.runtime.serving.chat_request import ApiError, ChatRequest, normalized

if TYPE_CHECKING:
    from rlctl.runtime.serving.endpoint import Endpoint

_TOO_LONG = "context_length_exceeded"  # OpenAI's code


class ProgramRun(EpisodeRun):
    """Coroutine of an episode in which a program talks with the policy, and its rows."""

    def __init__(self, endpoint: Endpoint, *args: Any) -> None:
        """Prepare the episode; see `EpisodeRun` for the other arguments."""
        super().__init__(*args)
        self._endpoint = endpoint
        self._key: str | None = None  # None: the program does not run
        self._conversations: list[Conversation] = []
        self._requests: set[asyncio.Task[Any]] = set()
        self._num_requests = 0
        self._is_closed = False

    @property
    def rows(self) -> list[Tokens]:
        """Training rows in the order in which they began; one without a response if none did."""
        return [conversation.tokens for conversation in self._conversations] or super().rows

    async def _play(self) -> str:
        """Start the episode's host; the program itself runs in `_score`."""
        limits = self.settings.timeouts
        self._key = self._endpoint.open(self)
        row = {
            **self.task.row,
            ENDPOINT: {"base_url": self._endpoint.base_url, "api_key": self._key},
        }
        self._environment = await self.settings.environments.open(
            row, str(next_key()), Timeouts(limits.call_s, limits.episode_s)
        )
        return "done"

    async def _score(self) -> float | dict[str, float] | None:
        """Let the program play the episode and return its score."""
        self.state = State.INTERACTING
        try:
            score = await super()._score()
        except EnvironmentFailed as failure:
            failure.text = failure.text.removeprefix("score: ")
            raise
        if not self._conversations:
            raise EnvironmentFailed("error", "the program ended without a response of the policy")
        return score

    async def _close(self) -> None:
        self._is_closed = True
        if self._key is not None:
            self._endpoint.close(self._key)
        for task in self._requests:
            task.cancel()
        await super()._close()

    async def complete(self, request: ChatRequest) -> ChatReply:
        task = asyncio.current_task()
        assert task is not None, "a handler of the server"
        self._requests.add(task)
        try:
            return await self._complete(request)
        finally:
            self._requests.discard(task)
            if not self._is_closed:  # a request that the end of the episode has cancelled
                self.state = State.GENERATING if self._requests else State.INTERACTING

    async def _complete(self, request: ChatRequest) -> ChatReply:
        limit = self.settings.multi_turn.max_assistant_turns
        if self._num_requests == limit:
            raise ApiError(400, f"the policy has written its {limit} turns", "max_turns")
        ids = self._text_ids(request)
        kept = self.settings.kept_roles or ()
        stops = self.task.decoding.stop_token_ids
        found = continued(self._conversations, request, ids, kept, stops)
        conversation = found or self._begun(request, ids)
        fresh, bridge = self._added(conversation, request, ids)
        room = self.settings.max_response_length - len(conversation.tokens.response_ids)
        if bridge is None or (room := room - len(bridge)) < 1:
            raise ApiError(
                400,
                f"the conversation has no room for a response: data.max_response_length="
                f"{self.settings.max_response_length} includes earlier turns and replies",
                _TOO_LONG,
            )
        number = self._num_requests
        began = time.monotonic()
        self._num_requests += 1
        self.state = State.GENERATING
        conversation.is_busy = True
        try:
            completion, stop = await self._turn(conversation, bridge, room, number, request)
        finally:
            conversation.is_busy = False
        if found is None:
            self._conversations.append(conversation)
        num_ids = len(bridge) if found else len(conversation.tokens.prompt_ids)
        self._record_messages(fresh, num_ids)
        seconds = time.monotonic() - began
        return self._record(conversation, request, completion, number, stop, seconds)

    def _text_ids(self, request: ChatRequest) -> list[int] | None:
        """Return the ids of a text to continue, None for messages. Raises ApiError."""
        prompt = request.prompt
        bridge = self.settings.bridge
        if prompt is None:
            return None
        if bridge.has_images:
            raise ApiError(400, "a model with images has no completions", param="prompt")
        if isinstance(prompt, str):
            longest = self.settings.max_prompt_length + self.settings.max_response_length
            if bridge.is_longer(prompt, longest):
                raise ApiError(400, f"the prompt has {len(prompt)} characters", _TOO_LONG)
            return self.settings.tokenizer.encode(prompt)
        if not 0 <= min(prompt) <= max(prompt) < len(self.settings.tokenizer):
            raise ApiError(400, "prompt has an id that is no token of the policy", param="prompt")
        return [*prompt]

    def _begun(self, request: ChatRequest, ids: list[int] | None) -> Conversation:
        """Return a new conversation. Raises ApiError for messages without a valid prompt."""
        bridge = self.settings.bridge
        limit = self.settings.max_prompt_length
        length = f"{len(ids or ())} tokens"
        if ids is None:
            try:
                rendered = bridge.render(request.messages, request.tools)
                if request.tools and rendered == bridge.render(request.messages, []):
                    raise ApiError(400, "the chat template does not write tools", param="tools")
            except ConfigError as error:
                raise ApiError(400, str(error), param="messages") from None
            length = f"{len(rendered)} characters"
            if not bridge.is_longer(rendered, limit):
                ids = bridge.encode(rendered)
                length = f"{len(ids)} tokens"
        if ids is None or len(ids) > limit:
            text = f"the prompt has {length}, more than data.max_prompt_length={limit} tokens"
            raise ApiError(400, text, _TOO_LONG)
        return Conversation(Tokens(ids), [], request.tools)

    def _added(
        self, conversation: Conversation, request: ChatRequest, ids: list[int] | None
    ) -> tuple[list[Message], list[int] | None]:
        """Return what a request adds: messages, and ids after the last turn; None: too many."""
        is_new = conversation.completion is None
        if ids is not None:
            added = ids if is_new else ids[len(conversation.ids) :]
            messages: list[Message] = []
            if added:
                messages.append({"role": "user", "content": self._decode(added)})
            return messages, [] if is_new else added
        fresh = request.messages[len(conversation.messages) :]
        texts = "".join(message["content"] for message in fresh)
        room = self.settings.max_response_length - len(conversation.tokens.response_ids)
        if not is_new and self.settings.bridge.is_longer(texts, room):
            return fresh, None
        return fresh, self._bridge(conversation, fresh)

    def _bridge(self, conversation: Conversation, fresh: list[Message]) -> list[int]:
        """Return the ids between the last turn and the next; none before the first turn."""
        last = conversation.completion
        if last is None:
            return []
        try:
            return self.settings.bridge.bridge_ids(
                last.response_ids[-1:].tolist(), conversation.turn, fresh, conversation.tools
            )
        except ConfigError as error:
            raise ApiError(400, str(error), param="messages") from None

    async def _turn(
        self,
        conversation: Conversation,
        bridge: list[int],
        room: int,
        number: int,
        request: ChatRequest,
    ) -> tuple[Completion, str | None]:
        """Generate a turn and append it; a request that is cancelled appends nothing.

        Returns the turn, and the stop text of `request` that ended it.
        """
        tokens = conversation.tokens
        last = conversation.completion
        context = Tokens(tokens.prompt_ids, tokens.response_ids + bridge).context()
        completion = await self.schedule.generate(
            Request(
                key=next_key(),
                context_ids=context,
                decoding=self.task.decoding,
                max_tokens=(min(room, request.max_tokens or room),),
                seeds=(turn_seed(self.task.seed, number),),
                previous=last and last.key,
                keep=True,
                affinity=self.task.number,
                num_top=request.num_top,
            )
        )
        if request.num_top and not completion.top:
            engine = self.settings.sampling.rollout.name
            text = f"the engine {engine} reports no top_logprobs"
            raise ApiError(400, text, "unsupported_parameter", "top_logprobs")
        stops = self.task.decoding.stop_token_ids
        completion, stop = stopped(completion, request.stop, stops, self._decode)
        tokens.append_reply(bridge, conversation.num_turns - 1)
        tokens.append_turn(context, completion, conversation.num_turns)
        conversation.completion = completion
        conversation.num_turns += 1
        return completion, stop

    def _log_probs(self, completion: Completion) -> tuple[LogProb, ...]:
        """Return the log-prob of each token of a turn, the stop token included."""
        texts = [self._decode([token]) for token in completion.response_ids.tolist()]
        tops = [
            tuple((self._decode([token]), number) for token, number in top)
            for top in completion.top or [()] * len(texts)
        ]
        return tuple(map(LogProb, texts, completion.log_probs.tolist(), tops))

    def _record_messages(self, fresh: list[Message], num_ids: int) -> None:
        """Keep messages of the program, which have `num_ids` tokens."""
        messages = [
            episodes.Message(message["role"], message["content"], False, name=message.get("name"))
            for message in fresh
        ]
        if not self._messages:
            self._opening = tuple(messages)  # a transcript begins after its prompt
            return
        self._messages += messages
        self._count_reply(fresh, num_ids)

    def _record(
        self,
        conversation: Conversation,
        request: ChatRequest,
        completion: Completion,
        number: int,
        stop: str | None,
        seconds: float,
    ) -> ChatReply:
        """Return a turn as a reply, and keep it as part of its conversation."""
        text = self._add_turn(completion, seconds)
        if stop is not None:
            text = text.partition(stop)[0]
        turn = Turn(text)
        if request.tools and request.may_call:
            turn = self.settings.parser.parse(text, request.tools, self._num_calls)
        self._num_calls += len(turn.calls)
        # A call that cannot be read stays text, for the program to judge.
        parts = [turn.text, *(call.text for call in turn.malformed)]
        content = "\n".join(text for text in parts if text)
        tokens = conversation.tokens
        num_tokens = len(completion.response_ids)
        reply = ChatReply(
            number + 1,
            content,
            turn,
            completion.finish,
            len(tokens.prompt_ids) + len(tokens.response_ids) - num_tokens,
            num_tokens,
            stop,
            self._log_probs(completion) if request.logprobs else (),
            _split(conversation.ids, num_tokens) if request.return_ids else None,
        )
        conversation.turn = turn
        if request.prompt is None:
            conversation.messages = [*request.messages, normalized(reply.message)]
        return reply


def _split(ids: list[int], num_last: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the tokens before the last ones, and the last ones."""
    return tuple(ids[:-num_last]), tuple(ids[-num_last:])
