"""Tool-call parsers: every call of a turn is found, with a reason if it is malformed."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlctl import plugins
from rlctl.errors import ConfigError
from rlctl.plugins.agents.parsers.base import ToolParser
from rlctl.runtime.serving.chat import MalformedCall, ToolCall, Turn

NAMES = ("hermes", "llama3_json", "mistral", "pythonic", "qwen3_coder")
Calls = list[tuple[str, dict[str, Any]]]

PROPERTIES = {
    "text": {"type": "string"},
    "count": {"type": "integer"},
    "share": {"type": "number"},
    "exact": {"type": "boolean"},
    "rows": {"type": "array"},
    "options": {"type": "object"},
    "limit": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
    "free": {},
}
TOOLS = [
    {
        "type": "function",
        "function": {"name": "find", "parameters": {"type": "object", "properties": PROPERTIES}},
    }
]


def parser(name: str) -> ToolParser:
    return plugins.load("tool_parsers", name)()


def parse(name: str, text: str, offset: int = 0) -> Turn:
    return parser(name).parse(text, TOOLS, offset)


def calls_of(turn: Turn) -> Calls:
    return [(call.name, call.arguments) for call in turn.calls]


def reason(turn: Turn) -> str:
    assert not turn.calls
    (malformed,) = turn.malformed
    return malformed.reason


def hermes(calls: Calls) -> str:
    parts = [json.dumps({"name": n, "arguments": a}, ensure_ascii=False) for n, a in calls]
    return "\n".join(f"<tool_call>\n{part}\n</tool_call>" for part in parts)


def llama3_json(calls: Calls) -> str:
    return "; ".join(json.dumps({"name": n, "parameters": a}) for n, a in calls)


def mistral(calls: Calls) -> str:
    return "".join(f"[TOOL_CALLS]{n}[ARGS]{json.dumps(a)}" for n, a in calls)


def mistral_list(calls: Calls) -> str:
    return "[TOOL_CALLS] " + json.dumps([{"name": n, "arguments": a} for n, a in calls])


def pythonic(calls: Calls) -> str:
    written = [f"{n}({', '.join(f'{k}={v!r}' for k, v in a.items())})" for n, a in calls]
    return f"[{', '.join(written)}]"


def qwen3_coder(calls: Calls) -> str:
    def value(given: Any) -> str:
        return given if isinstance(given, str) else json.dumps(given, ensure_ascii=False)

    return "\n".join(
        f"<tool_call>\n<function={name}>\n"
        + "".join(f"<parameter={k}>\n{value(v)}\n</parameter>\n" for k, v in arguments.items())
        + "</function>\n</tool_call>"
        for name, arguments in calls
    )


FORMATS: dict[str, tuple[str, Callable[[Calls], str]]] = {
    "hermes": ("hermes", hermes),
    "llama3_json": ("llama3_json", llama3_json),
    "mistral": ("mistral", mistral),
    "mistral list": ("mistral", mistral_list),
    "pythonic": ("pythonic", pythonic),
    "qwen3_coder": ("qwen3_coder", qwen3_coder),
}
TWO: Calls = [
    ("find", {"text": 'tides "high" {in} Åre\n\t[5]', "count": 3, "exact": True}),
    ("find", {"options": {"a": [1, {"b": None}]}, "share": -0.5}),
]


def test_all_parsers_are_plugins() -> None:
    assert tuple(plugins.names("tool_parsers")) == NAMES
    with pytest.raises(ConfigError, match="unknown tool parser 'hermse'"):
        plugins.load("tool_parsers", "hermse")


@pytest.mark.parametrize("case", FORMATS)
def test_several_calls_are_read_with_their_types_and_the_text_around_them(case: str) -> None:
    name, render = FORMATS[case]
    thought = "<think>\nA call: <tool_call> or [TOOL_CALLS] or [f(a=1)].\n</think>"
    for before in ("", f"{thought}\n\nI look {{it}} up [1]. "):
        turn = parse(name, f"{before}{render(TWO)}", offset=7)
        assert calls_of(turn) == TWO
        assert [call.id for call in turn.calls] == ["call00007", "call00008"]
        assert turn.text == before.strip()
        assert not turn.malformed
    if case != "mistral":
        assert parse(name, f"{render(TWO)}\nDone.").text == "Done."


@pytest.mark.parametrize("name", NAMES)
def test_a_turn_without_calls_is_its_text(name: str) -> None:
    text = ' The result is {"total": 5}, [1] or [link](address) <b>.\n'
    assert parse(name, text) == Turn(text)


@pytest.mark.parametrize("case", FORMATS)
def test_a_truncated_call_is_malformed(case: str) -> None:
    name, render = FORMATS[case]
    text = render(TWO[:1])
    for cut in (len(text) // 2, len(text) - 1):
        turn = parse(name, text[:cut])
        assert not turn.calls
        assert len(turn.malformed) == 1
        assert turn.malformed[0].text in text
        assert turn.malformed[0].reason


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("hermes", '<tool_call>{"name": "f",}</tool_call>', "not valid JSON"),
        ("hermes", '<tool_call>{"arguments": {}}</tool_call>', """has no "name", its keys are"""),
        ("hermes", '<tool_call>{"name": 3}</tool_call>', "name of the tool must be a text, not 3"),
        ("hermes", '<tool_call>["f"]</tool_call>', "must be a JSON object, not ['f']"),
        ("hermes", '<tool_call>{"name": "f", "arguments": [1]}</tool_call>', "not [1]"),
        ("hermes", '<tool_call>{"name": "f"} really</tool_call>', "text between the JSON and"),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": NaN}}</tool_call>', "NaN"),
        ("hermes", r'<tool_call>{"name": "\ud800"}</tool_call>', "invalid unicode escape"),
        ("hermes", "<tool_call>" + "[" * 99_999, "nested too deeply"),
        ("hermes", "</tool_call>", "without <tool_call>"),
        ("llama3_json", '<|python_tag|>find.call(text="x")', "not valid JSON"),
        ("llama3_json", '<|python_tag|>{"a": 1}', """has no "name", its keys are ['a']"""),
        ("llama3_json", '{"name": "find", "parameters": 3}', "arguments must be a JSON object"),
        ("mistral", "[TOOL_CALLS][]", "list of calls is empty"),
        ("mistral", "[TOOL_CALLS]find[ARGS]{", "arguments of find are not valid JSON"),
        ("pythonic", "[find(3)]", "arguments of find need their names"),
        ("pythonic", "[find(text=open('x'))]", "argument text must be a literal"),
        ("pythonic", "[find(options={1: 2})]", "keys of the argument options must be texts"),
        ("pythonic", "[find(**{'a': 1})]", "must be written out"),
        ("pythonic", "[find(a=1, a=2)]", "argument a of find is given twice"),
        ("pythonic", "[find(share=1e999)]", "cannot be sent as JSON"),
        ("pythonic", "[find(x)(y=1)]", "is not the name of a tool"),
        ("pythonic", "[find(count=" + "-" * 5_000 + "1)]", ""),
        ("pythonic", "<|python_start|>print(1)<|python_end|>", "not valid Python|list"),
        ("qwen3_coder", "<tool_call>find</tool_call>", "not followed by <function=NAME>"),
        ("qwen3_coder", "<function=>\n</function>", "no <function=NAME>"),
        ("qwen3_coder", "<function=f>\nx\n</function>", "0 complete parameters"),
        ("qwen3_coder", "<tool_call><function=f></function>", "not closed by </tool_call>"),
        ("qwen3_coder", "<function=f>" + "<parameter=a>1</parameter>" * 2 + "</function>", "twice"),
        (
            "qwen3_coder",
            "<function=find><parameter=count>many</parameter></function>",
            "argument count must be of type integer, not 'many'",
        ),
    ],
)  # fmt: skip
def test_a_malformed_call_has_a_reason(name: str, text: str, expected: str) -> None:
    found = reason(parse(name, text))
    assert any(each in found for each in expected.split("|"))


@pytest.mark.parametrize("name", ["hermes", "qwen3_coder", "mistral"])
def test_calls_after_a_malformed_one_are_read(name: str) -> None:
    opening = {
        "hermes": "<tool_call>{",
        "qwen3_coder": "<tool_call><function=x",
        "mistral": "[TOOL_CALLS]?",
    }
    turn = parse(name, opening[name] + FORMATS[name][1](TWO))
    assert calls_of(turn) == TWO
    assert [each.text for each in turn.malformed] == [opening[name]]


def test_one_of_several_calls_may_be_malformed() -> None:
    assert calls_of(parse("pythonic", "[find(count=1), 3, find(count=2)]")) == [
        ("find", {"count": 1}),
        ("find", {"count": 2}),
    ]
    turn = parse("mistral", '[TOOL_CALLS] [{"name": "find"}, {"nam": "find"}]')
    assert calls_of(turn) == [("find", {})]
    assert turn.malformed == (
        MalformedCall('{"nam": "find"}', """the call has no "name", its keys are ['nam']"""),
    )


NESTED = '{"type": "function", "function": {"name": "find", "arguments": {"count": 1}}}'
COUNT = "<function=find><parameter=count>{}</parameter></function>"


def test_variants_that_models_write() -> None:
    one = [("find", {"count": 1})]
    for name, text in [
        ("hermes", '<tool_call>{"name":"find","arguments":"{\\"count\\": 1}"}</tool_call>'),
        ("hermes", f"<tool_call>{NESTED}</tool_call>"),
        ("llama3_json", '<|python_tag|>{"type": "x", "name": "find", "parameters": {"count": 1}}'),
        ("llama3_json", NESTED),
        ("mistral", '[TOOL_CALLS]find{"count": 1}'),
        ("mistral", '[TOOL_CALLS]find[CALL_ID]a1b2c3d4e[ARGS]{"count": 1}'),
        ("mistral", '[TOOL_CALLS] {"name": "find", "arguments": {"count": 1}}'),
        ("pythonic", "<|python_start|>[find(count=1)]<|python_end|>"),
        ("pythonic", "[\n  find(count=+1),\n]"),
        ("qwen3_coder", f"{COUNT.format('1.0')}</tool_call>"),
        ("qwen3_coder", f"<tool_call>{COUNT.format('1')}</tool_call>"),
    ]:  # fmt: skip
        turn = parse(name, text)
        assert calls_of(turn) == one, text
        assert turn.text == ""
        assert not turn.malformed
    assert calls_of(parse("pythonic", "[a.find(exact=true, free=null, rows=(1, -2))]")) == [
        ("a.find", {"exact": True, "free": None, "rows": [1, -2]})
    ]


def test_the_model_may_number_its_calls() -> None:
    text = '[TOOL_CALLS] [{"name": "find", "id": "a1b2c3d4e"}, {"name": "find", "id": "short"}]'
    assert [call.id for call in parse("mistral", text).calls] == ["a1b2c3d4e", "call00001"]


def test_tags_in_arguments_are_text() -> None:
    inner = "</tool_call><tool_call> [TOOL_CALLS] [f(x=1)] <parameter=a> ; {"
    for case, (name, render) in FORMATS.items():
        turn = parse(name, render([("find", {"text": inner})]))
        assert turn == Turn("", (ToolCall("call00000", "find", {"text": inner}),)), case


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("text", "12", "12"),
        ("count", "12", 12),
        ("share", "3", 3),
        ("exact", "True", True),
        ("limit", "null", None),
        ("limit", "None", None),
        ("limit", "4", 4),
        ("options", '{"a": {"b": "}"}}', {"a": {"b": "}"}}),
        ("rows", "[1, [2]]", [1, [2]]),
        ("free", "12", "12"),
        ("unknown", "12", "12"),
        ("text", "\n a\n\nb \n", "\n a\n\nb \n"),
    ],
)
def test_qwen3_coder_values_have_the_types_of_the_schema(key: str, text: str, value: Any) -> None:
    call = f"<function=find>\n<parameter={key}>\n{text}\n</parameter>\n</function>"
    assert calls_of(parse("qwen3_coder", call)) == [("find", {key: value})]


WORDS = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
VALUES = st.fixed_dictionaries(
    {},
    optional={
        "text": WORDS,
        "count": st.integers(),
        "share": st.floats(allow_nan=False, allow_infinity=False),
        "exact": st.booleans(),
        "rows": st.lists(st.one_of(WORDS, st.none(), st.integers()), max_size=3),
        "options": st.dictionaries(WORDS, st.lists(st.booleans(), max_size=2), max_size=2),
        "limit": st.one_of(st.none(), st.integers()),
    },
)


@pytest.mark.parametrize("case", FORMATS)
@settings(max_examples=20, deadline=None)
@given(calls=st.lists(st.tuples(st.sampled_from(["find", "a_b"]), VALUES), min_size=1, max_size=3))
def test_rendered_calls_are_read(case: str, calls: Calls) -> None:
    name, render = FORMATS[case]
    if name == "qwen3_coder":  # values of unknown tools are texts
        calls = [("find", arguments) for _, arguments in calls]
    turn = parse(name, render(calls))
    assert calls_of(turn) == calls
    assert not turn.malformed


FRAGMENTS = st.sampled_from(
    ["<tool_call>", "</tool_call>", "<function=", "f>", "</function>", "<parameter=a>", "{", "}",
     "</parameter>", "[TOOL_CALLS]", "[ARGS]", "[f(", "a=", ")]", "<|python_tag|>", "</think>",
     '{"name": "f"', ', "arguments": {}', "\\ud800", "\x00", "\n", "'''", "-", ";", "**", '"', "'"]
)  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=40, deadline=None)
@given(text=st.lists(st.one_of(FRAGMENTS, st.text(max_size=4)), max_size=15).map("".join))
def test_no_text_raises(name: str, text: str) -> None:
    turn = parse(name, text)
    assert isinstance(turn.text, str)
    for call in turn.calls:
        json.dumps(call.arguments, allow_nan=False, ensure_ascii=False).encode()
    if not turn.calls and not turn.malformed:
        assert turn.text == text
