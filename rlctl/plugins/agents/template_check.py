"""Proof at start that appended ids are what the chat template gives for the whole conversation.

An episode appends ids: prompt, response, bridge, response and so on. A server that continues the
same conversation renders all of its messages again at each turn. Both are the same context if every
rendering is the one before, plus the turn, plus the bridge. Probe conversations of the
kinds that the run needs show it on the run's template:

    prompt_is_kept      system prompt and tools do not change when messages follow
    generation_prompt   a turn in the history begins as the policy's turn began
    thinking_is_kept    thoughts of earlier turns are not removed
    history_is_kept     other text of earlier turns does not change
    end_of_turn         a turn in the history ends with a stop token
    turn_is_kept        the text of a turn is written
    tools_are_shown     the prompt has the tools
    tool_calls          calls are written
    tool_results        results are written, with the ids of the bridge
    user_turns          a user's messages are written, with the ids of the bridge
    plain_text          special tokens in the text of a message stay text

The template may write a turn in another way than the policy did (spaces in JSON, text next to a
call that Llama 3 leaves out): the turn is never rendered, it keeps the policy's tokens.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from rlctl.errors import ConfigError, Problem, raise_problems
from rlctl.plugins.agents.chat_bridge import ChatBridge
from rlctl.runtime.serving.chat import Message, ToolCall, ToolSchema, Turn, to_call, to_schema

TOOL = "tool"
USER = "user"

_TOWN = {
    "type": "object",
    "properties": {"town": {"type": "string", "description": "name of the town"}},
    "required": ["town"],
}
_TOOLS = [
    to_schema(name, f"Return the {name} of a town.", _TOWN) for name in ("weather", "population")
]
_THOUGHT = "Towns are small."
_THINKING = f"<think>\n{_THOUGHT}\n</think>\n\n"
_QUESTION: Message = {"role": USER, "content": "How is the weather?"}
_HINTS = {
    "thinking_is_kept": "use a template that keeps thoughts of earlier turns "
    "(actor_rollout_ref.model.custom_chat_template), or an environment without turns of a user",
    "generation_prompt": "use a template that begins each turn alike "
    "(actor_rollout_ref.model.custom_chat_template), or other data.apply_chat_template_kwargs",
    "tools_are_shown": "use a template with tools (actor_rollout_ref.model.custom_chat_template), "
    "or describe them in the prompt",
    "end_of_turn": "use a template that ends turns with a stop token "
    "(actor_rollout_ref.model.custom_chat_template), or add the token to eos_token_id in "
    "generation_config.json if it ends nothing else",
}
_HINT = "use a template that only appends (actor_rollout_ref.model.custom_chat_template)"


class _Broken(Exception):
    """Property that a probe shows to be broken, and the reason."""

    def __init__(self, name: str, what: str) -> None:
        super().__init__(name, what)
        self.name = name
        self.what = what


def check_chat_template(bridge: ChatBridge, replies: Collection[str]) -> None:
    """Raise ConfigError with the broken properties of the run's chat template.

    `replies` are the roles of the messages that may follow a turn: TOOL, USER or both.
    """
    tools = _TOOLS if TOOL in replies else []
    prompt = bridge.render([_QUESTION], tools)
    problems: dict[str, str] = {}
    if not all(tool["function"]["name"] in prompt for tool in tools):
        problems["tools_are_shown"] = "the prompt does not contain the tools"
    for turns in _probes(bridge, replies, prompt):
        try:
            _check_probe(bridge, turns, tools)
        except _Broken as broken:
            problems.setdefault(broken.name, broken.what)
    raise_problems(
        [
            Problem(
                f"the chat template lacks the property {name}: {what}",
                bridge.source,
                _HINTS.get(name, _HINT),
            )
            for name, what in problems.items()
        ]
    )


_Exchange = tuple[Message, list[Message]]  # a turn of the policy, and the messages that follow it


def _probes(
    bridge: ChatBridge, replies: Collection[str], prompt: str
) -> Iterator[Sequence[_Exchange]]:
    """Yield conversations of the kinds that can occur, with thoughts if the policy may think."""
    written = prompt.rstrip()
    thoughts = ["", _THINKING]
    if written.endswith("<think>"):
        thoughts = [_THINKING]
    elif written.endswith("</think>"):
        thoughts = [""]
    knows_thoughts = "think>" in str(bridge.tokenizer.chat_template)
    for thought in thoughts:
        said = (_said(f"{thought}It is warm."), [_user("And tomorrow?")])
        if USER in replies:
            yield [said, said]
        # Other templates may leave out text next to a call.
        if TOOL in replies and (knows_thoughts or not thought):
            called = _called(thought, "weather")
            yield [called, called]
            if bridge.several_calls:
                yield [_called(thought, "weather", "population")]
            if USER in replies:
                yield [called, said, called]


def _said(text: str) -> Message:
    return {"role": "assistant", "content": text}


def _user(text: str) -> Message:
    return {"role": USER, "content": text}


def _called(text: str, *names: str) -> _Exchange:
    """Return a turn that calls tools, and their results."""
    ids = [f"call{number:05d}" for number in range(len(names))]
    calls = [to_call(*call, {"town": "Ghent"}) for call in zip(ids, names, strict=True)]
    results = [
        {"role": TOOL, "tool_call_id": call_id, "name": name, "content": f"fine {name}"}
        for call_id, name in zip(ids, names, strict=True)
    ]
    return {"role": "assistant", "content": text, "tool_calls": calls}, results


def _check_probe(bridge: ChatBridge, turns: Sequence[_Exchange], tools: list[ToolSchema]) -> None:
    """Raise _Broken for the first property that a conversation does not have."""
    history = [_QUESTION]
    before = bridge.render(history, tools)
    prompt: int | None = None
    for turn, replies in turns:
        opening = _num_equal(before, bridge.render(history, tools, generation_prompt=False))
        if prompt is None:
            prompt = opening
        history = [*history, turn, *replies]
        name = "tool_results" if replies[0]["role"] == TOOL else "user_turns"
        try:
            after = bridge.render(history, tools)
        except ConfigError as error:
            raise _Broken(name, error.problems[0].message) from error
        _check_history(before, after, history, prompt, opening)
        _check_turn(bridge, before, after, turn, replies)
        before = after


def _check_history(
    before: str, after: str, history: Sequence[Message], prompt: int, opening: int
) -> None:
    """Check that `after` begins with `before`.

    `prompt` is the length of the first prompt, `opening` the place of the generation prompt.
    """
    thoughts = sum(_THOUGHT in message["content"] for message in history)
    same = _num_equal(before, after)
    if after.count(_THOUGHT) < thoughts:
        name = "thinking_is_kept"
    elif same == len(before):
        return
    elif same >= opening:
        name = "generation_prompt"
    elif same >= prompt:
        name = "history_is_kept"
    else:
        name = "prompt_is_kept"
    start = max(0, same - 30)
    if same == len(before):
        raise _Broken(name, f"a turn that begins with a thought became {_excerpt(after[same:])}")
    raise _Broken(
        name,
        f"{_excerpt(before[start:])} became {_excerpt(after[start:])} when messages followed",
    )


def _check_turn(
    bridge: ChatBridge, before: str, after: str, turn: Message, replies: Sequence[Message]
) -> None:
    """Check the text after `before`: the turn, its end and the messages that follow it."""
    end = bridge.end_of_turn(after, len(before))
    written = after[len(before) : end[0] if end else None]
    if end is None or any(reply["content"] in written for reply in replies):
        stops = ", ".join(
            sorted(bridge.tokenizer.convert_ids_to_tokens(list(bridge.stop_token_ids)))
        )
        raise _Broken("end_of_turn", f"none of {stops} ends the turn in {_excerpt(written)}")
    if turn["content"].rpartition("</think>")[2].strip() not in written:
        raise _Broken("turn_is_kept", f"{turn['content']!r} became {_excerpt(written)}")
    for call in turn.get("tool_calls", ()):
        if call["function"]["name"] not in written:
            raise _Broken("tool_calls", f"a turn with a call became {_excerpt(written)}")
    role = replies[0]["role"]
    name = "tool_results" if role == TOOL else "user_turns"
    for reply in replies:
        if reply["content"] not in after[end[1] :]:
            raise _Broken(name, f"{reply['content']!r} is not in {_excerpt(after[end[0] :])}")
    stop, *expected = bridge.encode(after[end[0] :])
    ids = _bridge_ids(bridge, stop, turn, replies)
    if ids != expected or bridge.encode(after)[-len(ids) - 1 :] != [stop, *ids]:
        short, long = (
            _excerpt(str(bridge.tokenizer.decode(part_ids))) for part_ids in (ids, expected)
        )
        raise _Broken(name, f"the bridge is {short}, the conversation has {long}")
    _check_plain_text(bridge, stop, turn, replies)


def _check_plain_text(
    bridge: ChatBridge, stop: int, turn: Message, replies: Sequence[Message]
) -> None:
    """Check that special tokens in a reply add none to the bridge."""
    markup = bridge.markup(replies[0]["role"])
    hostile = [{**reply, "content": " ".join([reply["content"], *markup])} for reply in replies]
    found, expected = (
        [
            number
            for number in _bridge_ids(bridge, stop, turn, messages)
            if number in markup.values()
        ]
        for messages in (hostile, replies)
    )
    if found != expected:
        wrong, right = (
            _excerpt(" ".join(bridge.tokenizer.convert_ids_to_tokens(numbers)))
            for numbers in (found, expected)
        )
        raise _Broken("plain_text", f"a text with special tokens gives {wrong} instead of {right}")


def _bridge_ids(
    bridge: ChatBridge, stop: int, turn: Message, replies: Sequence[Message]
) -> list[int]:
    calls = [
        ToolCall(call["id"], call["function"]["name"], call["function"]["arguments"])
        for call in turn.get("tool_calls", ())
    ]
    tools = _TOOLS if replies[0]["role"] == TOOL else []
    return bridge.bridge_ids([stop], Turn(turn["content"], tuple(calls)), replies, tools)


def _num_equal(one: str, other: str) -> int:
    """Return the number of characters with which both texts begin."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((number for number, (a, b) in pairs if a != b), min(len(one), len(other)))


def _excerpt(text: str) -> str:
    return repr(text if len(text) <= 80 else f"{text[:77]}...")
