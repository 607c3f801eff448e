"""Agent programs for tests, and a parser of calls that the quickstart's model writes."""

from __future__ import annotations

import asyncio
import runpy
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import pytest

from rlctl.runtime.serving.chat import ToolCall, ToolSchema, Turn
from tests.architecture.source import ROOT

EXAMPLE = ROOT / "docs/examples/agents/tool_loop.py"

TOOL: ToolSchema = {
    "type": "function",
    "function": {"name": "submit", "description": "Submit.", "parameters": {"type": "object"}},
}
# The quickstart's, with a trace of tools.
TEMPLATE = (
    "{% if tools %}<|system|>{% for t in tools %}{{ t.function.name }} {% endfor %}<|end|>"
    "{% endif %}{% for m in messages %}<|{{ 'user' if m.role == 'tool' else m.role }}|>"
    "{{ m.content }}{% for c in m.tool_calls or [] %}{{ c.function.name }} "
    "{{ c.function.arguments | tojson }}{% endfor %}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


class AnswerParser:
    """Parser that reads `#### N` as a call of `submit`."""

    def parse(self, text: str, tools: Sequence[ToolSchema], offset: int = 0) -> Turn:
        before, mark, answer = text.rpartition("####")
        if not mark:
            return Turn(text)
        return Turn(before, (ToolCall(f"call{offset:05d}", "submit", {"n": answer.strip()}),))


def questions(task: Mapping[str, Any]) -> list[tuple[str, str]]:
    first = (task["prompt"][-1]["content"], task["ground_truth"])
    return [first, *((q, a) for q, a in task["extra_info"]["further"])]


def is_right(text: str | None, truth: str) -> bool:
    return (text or "").rpartition("#### ")[2].strip() == str(truth)


async def chat(task: Mapping[str, Any], client: Any) -> dict[str, float]:
    """Ask all problems in one conversation."""
    assert [each.id async for each in client.models.list()] == ["policy"]
    assert (await client.models.retrieve("policy")).id == "policy"
    messages: list[Any] = []
    right = 0
    for question, truth in questions(task):
        messages.append({"role": "user", "content": [{"type": "text", "text": question}]})
        reply = await client.chat.completions.create(
            model="policy", messages=messages, temperature=0.3
        )
        messages.append(reply.choices[0].message)
        right += is_right(reply.choices[0].message.content, truth)
    return {"score": right / len(messages), "num_right": right}


async def stream(task: Mapping[str, Any], client: Any) -> float:
    """Ask all problems in one conversation, with streaming."""
    messages: list[Any] = []
    for question, _ in questions(task):
        messages.append({"role": "user", "content": question})
        text, usage = "", None
        async for chunk in await client.chat.completions.create(
            model="policy", messages=messages, stream=True, stream_options={"include_usage": True}
        ):
            text += chunk.choices[0].delta.content or "" if chunk.choices else ""
            usage = chunk.usage or usage
        assert usage is not None
        messages.append({"role": "assistant", "content": text})
    return 1.0


async def fork_at_once(task: Mapping[str, Any], client: Any) -> float:
    """Ask a problem twice at the same time, continue both, and compact the second."""
    return await fork(task, client, at_once=True)


async def fork(task: Mapping[str, Any], client: Any, at_once: bool = False) -> float:
    """Do the same by one request after the other, whose order decides on the random streams."""

    async def ask(messages: list[Any]) -> list[Any]:
        reply = await client.chat.completions.create(model="policy", messages=messages)
        return [*messages, reply.choices[0].message.model_dump()]

    (first, _), (second, _), (third, _), *_ = questions(task)
    begun = [{"role": "user", "content": first}]
    if at_once:
        left, right = await asyncio.gather(ask(begun), ask(begun))
    else:
        left, right = await ask(begun), await ask(begun)
    await ask([*left, {"role": "user", "content": second}])
    await ask([*right, {"role": "user", "content": second}])
    await ask([{"role": "user", "content": third}])
    return 0.5


async def tools(task: Mapping[str, Any], client: Any) -> float:
    """Let the model submit its answers by calls, streamed in every second turn."""
    messages: list[Any] = [{"role": "user", "content": questions(task)[0][0]}]
    num_calls = 0
    for question, _ in questions(task)[1:]:
        reply = await client.chat.completions.create(
            model="policy", messages=messages, tools=[TOOL], max_completion_tokens=60
        )
        message = reply.choices[0].message
        messages.append(message.model_dump(exclude_none=True))
        if not message.tool_calls:
            assert reply.choices[0].finish_reason in ("stop", "length")
            messages.append({"role": "user", "content": question})
        for call in message.tool_calls or []:
            assert reply.choices[0].finish_reason == "tool_calls"
            assert call.function.name == "submit"
            num_calls += 1
            messages.append({"role": "tool", "tool_call_id": call.id, "content": question})
    return float(num_calls)


async def streamed_call(task: Mapping[str, Any], client: Any) -> float:
    messages = [{"role": "user", "content": questions(task)[0][0]}]
    names = []
    async for chunk in await client.chat.completions.create(
        model="policy", messages=messages, tools=[TOOL], stream=True
    ):
        for call in chunk.choices[0].delta.tool_calls or [] if chunk.choices else []:
            names.append(call.function.name)
    return float(names == ["submit"])


async def stops(task: Mapping[str, Any], client: Any) -> float:
    """End the first turn before the answer, and continue."""
    create = client.chat.completions.create
    (first, _), (second, _), *_ = questions(task)
    messages: list[Any] = [{"role": "user", "content": first}]
    reply = await create(
        model="policy", messages=messages, tools=[TOOL], tool_choice="required", stop=["x!", "####"]
    )
    [choice] = reply.choices
    assert (choice.finish_reason, choice.message.tool_calls) == ("stop", None)
    assert "#" not in (choice.message.content or "")
    messages += [choice.message, {"role": "user", "content": second}]
    reply = await create(model="policy", messages=messages, tools=[TOOL], tool_choice="none")
    assert reply.choices[0].message.tool_calls is None
    return float("####" in reply.choices[0].message.content)


async def choices(task: Mapping[str, Any], client: Any) -> dict[str, float]:
    """Ask for three turns at once with their log-probs, and continue the second."""
    (first, _), (second, _), *_ = questions(task)
    messages: list[Any] = [{"role": "user", "content": first}]
    create = client.chat.completions.create
    given = {"model": "policy", "messages": messages, "n": 3, "logprobs": True, "top_logprobs": 2}
    reply = await create(**given)
    assert [choice.index for choice in reply.choices] == [0, 1, 2]
    tokens = [choice.logprobs.content for choice in reply.choices]
    assert reply.usage.completion_tokens == sum(map(len, tokens))
    for choice, turn in zip(reply.choices, tokens, strict=True):
        assert "".join(token.token for token in turn).startswith(choice.message.content)
        for token in turn:
            best, next_best = token.top_logprobs
            assert best.logprob >= next_best.logprob
            assert token.logprob <= best.logprob + 1e-5
    streamed = [""] * 3
    async for chunk in await create(**given, stream=True):
        streamed[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
        if chunk.choices[0].logprobs is not None:
            tokens.append(chunk.choices[0].logprobs.content)
    assert all(streamed)
    messages += [reply.choices[1].message, {"role": "user", "content": second}]
    more = await create(**{**given, "n": 1})
    tokens.append(more.choices[0].logprobs.content)
    return {"score": 1.0, "total": sum(token.logprob for turn in tokens for token in turn)}


async def texts(task: Mapping[str, Any], client: Any) -> float:
    """Continue token ids, and texts that the program renders itself."""
    import openai

    create, exact = client.completions.create, {"return_token_ids": True}
    (first, _), (second, _), *_ = questions(task)
    text = f"<|user|>{first}<|end|><|assistant|>"
    reply = await create(model="policy", prompt=text, max_tokens=60, extra_body=exact, logprobs=1)
    [choice] = reply.choices
    ids = choice.prompt_token_ids + choice.token_ids
    assert (len(choice.prompt_token_ids), len(choice.token_ids)) == (
        reply.usage.prompt_tokens,
        reply.usage.completion_tokens,
    )
    assert "".join(choice.logprobs.tokens).startswith(choice.text)
    assert len(choice.logprobs.top_logprobs) == len(choice.token_ids)
    asked = await create(
        model="policy",
        prompt=f"<|user|>{second}<|end|><|assistant|>",
        max_tokens=1,
        extra_body=exact,
    )
    more = asked.choices[0].prompt_token_ids
    # The same row continues: ids after the last turn, twice, then a text that is tokenized alike.
    cut = await create(
        model="policy", prompt=[*ids, *more], max_tokens=2, extra_body=exact, stop=["never"]
    )
    assert cut.choices[0].finish_reason == "length"
    ids = cut.choices[0].prompt_token_ids + cut.choices[0].token_ids
    await create(model="policy", prompt=ids)
    text = ""
    async for chunk in await create(
        model="policy", prompt=[text or first, second], n=2, stream=True
    ):
        assert chunk.choices[0].finish_reason in ("stop", "length")
        text += chunk.choices[0].text
    assert text
    for prompt in ([10**6], "1" * 3_000_000, [3] * 1000):
        with pytest.raises(openai.BadRequestError):
            await create(model="policy", prompt=prompt)
    return 1.0


def blocking(task: Mapping[str, Any], client: Any) -> float:
    """Use the synchronous client."""
    messages: Any = [{"role": "user", "content": questions(task)[0][0]}]
    reply = client.chat.completions.create(model="policy", messages=messages, max_tokens=2)
    assert reply.choices[0].finish_reason == "length"
    assert reply.usage.completion_tokens == 2
    return 1.0


async def refused(task: Mapping[str, Any], client: Any) -> float:
    """Send requests that are refused, as their status and code show."""
    import openai

    create = client.chat.completions.create
    messages: Any = [{"role": "user", "content": questions(task)[0][0]}]
    long, longer = ([{"role": "user", "content": "1" * size}] for size in (1000, 3_000_000))
    named = {"type": "function", "function": {"name": "submit"}}
    for change, expected in (
        ({"n": 0}, (None, "n")),
        ({"top_logprobs": 2}, (None, "top_logprobs")),
        (
            {"response_format": {"type": "json_object"}},
            ("unsupported_parameter", "response_format"),
        ),
        ({"stop": [1]}, (None, "stop")),
        ({"tool_choice": named}, ("unsupported_parameter", "tool_choice")),
        ({"messages": []}, (None, "messages")),
        ({"tools": [TOOL]}, (None, "tools")),
        ({"messages": long}, ("context_length_exceeded", None)),
        ({"messages": longer}, ("context_length_exceeded", None)),
    ):
        with pytest.raises(openai.BadRequestError) as refusal:
            await create(**{"model": "policy", "messages": messages, **change})
        assert (refusal.value.code, refusal.value.param) == expected
    key = {"Authorization": f"Bearer {client.api_key}"}
    deep = await client._client.post(
        f"{client.base_url}chat/completions", content="[" * 100_000, headers=key
    )
    assert (deep.status_code, deep.json()["error"]["message"]) == (
        400,
        "the body is nested too deeply",
    )
    other = client.with_options(api_key="rlctl-unknown")
    with pytest.raises(openai.AuthenticationError) as unknown:
        await other.chat.completions.create(model="policy", messages=messages)
    assert (unknown.value.status_code, unknown.value.code) == (401, "invalid_api_key")
    with pytest.raises(openai.NotFoundError):
        await client.embeddings.create(model="policy", input="text")
    await create(model="policy", messages=messages)
    return 1.0


async def messages_api(task: Mapping[str, Any], client: Any) -> float:
    """Play one conversation with Anthropic's client, streamed in every second turn."""
    import anthropic

    given = {"model": "policy", "max_tokens": 60}
    tool = {"name": "submit", "input_schema": {"type": "object"}}
    messages: list[Any] = [{"role": "user", "content": questions(task)[0][0]}]
    num_calls = 0
    url = str(client.base_url).removesuffix("/v1/")
    async with anthropic.AsyncAnthropic(base_url=url, api_key=client.api_key) as other:
        for number, (question, _) in enumerate(questions(task)[1:]):
            if number % 2:
                async with other.messages.stream(messages=messages, tools=[tool], **given) as turn:
                    reply = await turn.get_final_message()
            else:
                reply = await other.messages.create(messages=messages, tools=[tool], **given)
            messages.append({"role": "assistant", "content": reply.content})
            calls = [each for each in reply.content if each.type == "tool_use"]
            assert reply.stop_reason == ("tool_use" if calls else "end_turn")
            num_calls += len(calls)
            results = [
                {"type": "tool_result", "tool_use_id": each.id, "content": question}
                for each in calls
            ]
            messages.append({"role": "user", "content": results or question})
        first = messages[:1]
        reply = await other.messages.create(messages=first, stop_sequences=["####"], **given)
        assert (reply.stop_reason, reply.stop_sequence) == ("stop_sequence", "####")
        named = {"type": "tool", "name": "submit"}
        with pytest.raises(anthropic.BadRequestError, match="tool_choice"):
            await other.messages.create(messages=messages, tools=[tool], tool_choice=named, **given)
    async with anthropic.AsyncAnthropic(base_url=url, api_key="rlctl-unknown") as other:
        with pytest.raises(anthropic.AuthenticationError):
            await other.messages.create(messages=messages, **given)
    return float(num_calls)


async def responses_api(task: Mapping[str, Any], client: Any) -> float:
    """Play one conversation by the Responses API, streamed in every second turn."""
    import openai

    tool = {"type": "function", "name": "submit", "parameters": {"type": "object"}}
    given = {"model": "policy", "tools": [tool], "max_output_tokens": 60}
    items: list[Any] = [{"role": "user", "content": questions(task)[0][0]}]
    num_calls = 0
    for number, (question, _) in enumerate(questions(task)[1:]):
        if number % 2:
            async with client.responses.stream(input=items, **given) as stream:
                kinds = [event.type async for event in stream]
                reply = await stream.get_final_response()
            assert (kinds[0], kinds[-1]) == ("response.created", f"response.{reply.status}")
        else:
            reply = await client.responses.create(input=items, **given)
        items += [item.model_dump(exclude_none=True) for item in reply.output]
        calls = [item for item in reply.output if item.type == "function_call"]
        assert calls or reply.output_text
        num_calls += len(calls)
        results = [
            {"type": "function_call_output", "call_id": call.call_id, "output": question}
            for call in calls
        ]
        items += results or [{"role": "user", "content": question}]
    cut = await client.responses.create(
        model="policy", input="2 + 3?", instructions="Count.", max_output_tokens=1
    )
    assert cut.incomplete_details.reason == "max_output_tokens"
    for change in ({"previous_response_id": "resp_1"}, {"tools": [{"type": "web_search"}]}):
        with pytest.raises(openai.BadRequestError) as refusal:
            await client.responses.create(**{**given, "input": items, **change})
        assert refusal.value.param in change
    return float(num_calls)


async def gives_up(task: Mapping[str, Any], client: Any) -> float:
    """Cancel a request that continues a conversation, and send it again."""
    create = client.chat.completions.create
    (first, _), (second, _), *_ = questions(task)
    messages: list[Any] = [{"role": "user", "content": first}]
    reply = await create(model="policy", messages=messages)
    messages += [reply.choices[0].message, {"role": "user", "content": second}]
    with suppress(TimeoutError):
        async with asyncio.timeout(0.02):
            await create(model="policy", messages=messages)
    await create(model="policy", messages=messages)
    return 1.0


async def documented(task: Mapping[str, Any], client: Any) -> float:
    """Play the example of the documentation."""
    return await runpy.run_path(str(EXAMPLE))["run"](task, client)


async def by_row(task: Mapping[str, Any], client: Any) -> Any:
    """Play the program that the row names."""
    return await globals()[task["extra_info"]["program"]](task, client)


async def fails(task: Mapping[str, Any], client: Any) -> float:
    messages: Any = [{"role": "user", "content": questions(task)[0][0]}]
    await client.chat.completions.create(model="policy", messages=messages)
    raise RuntimeError("the agent is broken")


async def silent(task: Mapping[str, Any], client: Any) -> float:
    return 1.0


async def sleeps(task: Mapping[str, Any], client: Any) -> float:
    await chat(task, client)
    await asyncio.sleep(3600)
    return 1.0
