"""Proof of the chat template: broken properties are named, others pass."""

from __future__ import annotations

from typing import Any

import pytest

from rlctl.errors import ConfigError
from rlctl.runtime.agents.chat_bridge import ChatBridge
from rlctl.runtime.agents.environments.protocol import Turn
from rlctl.runtime.agents.template_check import TOOL, USER, check_chat_template
from rlctl.runtime.data.tokenizer import load_tokenizer
from tests.agents.templates import (
    CHATML,
    DEEPSEEK,
    GEMMA4,
    LLAMA3,
    MISTRAL,
    QWEN3,
    chat_tokenizer,
)

BOTH = (TOOL, USER)
END = "<|im_end|>"


def broken(
    template: str, replies: tuple[str, ...] = BOTH, eos: str = END, **kwargs: Any
) -> dict[str, str]:
    """Return the broken properties and the messages about them."""
    tokenizer = chat_tokenizer(template, eos)
    try:
        check_chat_template(ChatBridge(tokenizer, [tokenizer.eos_token_id], kwargs), replies)
    except ConfigError as error:
        start = "the chat template lacks the property "
        messages = [problem.message.removeprefix(start) for problem in error.problems]
        return dict(each.split(": ", 1) for each in messages)
    return {}


def changed(old: str, new: str, template: str = CHATML) -> str:
    assert template.count(old) == 1
    return template.replace(old, new)


@pytest.mark.parametrize("replies", [(TOOL,), (USER,), BOTH])
def test_templates_that_only_append_pass(replies: tuple[str, ...]) -> None:
    assert broken(CHATML, replies) == {}
    assert broken(LLAMA3, replies, eos="<|eot_id|>") == {}


def test_a_turn_may_continue_after_results() -> None:
    tokenizer = chat_tokenizer(GEMMA4)
    stops = [tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids("<|eot_id|>")]
    bridge = ChatBridge(tokenizer, stops)
    check_chat_template(bridge, BOTH)
    result = {"role": TOOL, "content": "fine"}
    assert tokenizer.decode(bridge.bridge_ids(stops[1:], Turn(""), [result], [])) == "fine;"


def test_several_calls_that_a_template_leaves_out_are_not_probed() -> None:
    one = changed("message.tool_calls or [] %}", "(message.tool_calls or [])[:1] %}")
    assert broken(one) == {}


def test_thoughts_that_a_user_removes_are_found() -> None:
    assert broken(QWEN3, (TOOL,)) == {}
    for replies in ((USER,), BOTH):
        found = broken(QWEN3, replies)
        assert (
            "a turn that begins with a thought became 'It is warm.<|im_end|>"
            in found["thinking_is_kept"]
        )
    (name,) = broken(QWEN3, (TOOL,), enable_thinking=False)
    assert name == "generation_prompt"
    opening = changed(
        "{{ header('assistant') }}{% endif %}", "{{ header('assistant') }}<think>\n{% endif %}"
    )
    assert broken(opening, (USER,)) == {}


def test_tools_before_the_last_user_are_found() -> None:
    for replies in ((TOOL,), (USER,)):
        assert broken(MISTRAL, replies, eos="</s>") == {}
    (name,) = broken(MISTRAL, BOTH, eos="</s>")
    assert name == "prompt_is_kept"


def test_prompts_without_tools_are_found() -> None:
    assert set(broken(DEEPSEEK)) == {"tools_are_shown"}
    assert broken(DEEPSEEK, (USER,)) == {}


@pytest.mark.parametrize(
    ("template", "name", "message"),
    [
        (
            changed("{%- endfor %}<|im_end|>\n{% elif message.role == 'tool' %}",
                    "{%- endfor %}<s>\n{% elif message.role == 'tool' %}"),
            "end_of_turn",
            "none of <|im_end|> ends the turn in 'It is warm.<s>",
        ),
        (
            changed("{{- header(message.role) }}{{ message.content }}",
                    "{{- header(message.role) }}{{ message.content }}"
                    "{% if not loop.last %} (earlier){% endif %}"),
            "prompt_is_kept",
            "became",
        ),
        (
            changed("{{- header('assistant') }}{{ message.content }}",
                    "{{- header('assistant') }}"
                    "{% if loop.revindex < 4 %}{{ message.content }}{% endif %}"),
            "history_is_kept",
            "became",
        ),
        (
            changed("{{- header('assistant') }}{{ message.content }}",
                    "{{- header('assistant') }}"),
            "turn_is_kept",
            "'It is warm.' became ''",
        ),
        (
            changed("message.role == 'tool' %}", "message.role == 'function' %}"),
            "tool_results",
            "'fine weather' is not in",
        ),
        (
            changed("{{ message.content }}\n</tool_response>",
                    "{{ raise_exception('no results') }}\n</tool_response>"),
            "tool_results",
            "rejects a prompt with the roles user, assistant, tool: no results",
        ),
        (
            changed("{%- for call in message.tool_calls or [] %}", "{%- for call in [] %}"),
            "tool_calls",
            "a turn with a call became ''",
        ),
        (
            changed("{{ message.content }}\n</tool_response>",
                    "{{ message.content }} of {{ tools | length }}\n</tool_response>"),
            "tool_results",
            "the bridge is",
        ),
        (
            changed("{{ message.content }}\n</tool_response>",
                    "{{ message.content }}{{ message.content | length }}\n</tool_response>"),
            "",
            "",
        ),
        (
            changed("{{ message.content }}\n</tool_response>",
                    "{{ message.content }}{% for each in message.content %}"
                    "{% if each == '[' %}[INST]{% endif %}{% endfor %}\n</tool_response>"),
            "plain_text",
            "a text with special tokens gives",
        ),
    ],
)  # fmt: skip
def test_the_broken_property_is_named(template: str, name: str, message: str) -> None:
    found = broken(template)
    assert (name in found) if name else not found
    assert message in found.get(name, "")


def test_a_message_has_the_template_and_what_works() -> None:
    tokenizer = chat_tokenizer(QWEN3)
    tokenizer.name_or_path = "some/model"
    with pytest.raises(ConfigError) as caught:
        check_chat_template(ChatBridge(tokenizer, [tokenizer.eos_token_id]), [USER])
    (problem,) = caught.value.problems
    assert problem.where == "some/model"
    assert "custom_chat_template" in str(problem.hint)


def test_the_quickstart_model_has_conversations_without_tools() -> None:
    tokenizer = load_tokenizer("quickstart")
    bridge = ChatBridge(tokenizer, [tokenizer.eos_token_id])
    check_chat_template(bridge, [USER])
    with pytest.raises(ConfigError, match="tools_are_shown"):
        check_chat_template(bridge, [TOOL])
