"""Conversations for SFT: tokens and turns of each family's chat template, and faults of rows."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rlctl.data_prep.rows import PromptRow
from rlctl.errors import ConfigError
from rlctl.plugins.objectives.chats import ChatsParams, chats
from rlctl.plugins.objectives.dataset_class import DatasetClassParams, dataset_class
from rlctl.recipes.compose import compose
from rlctl.runtime.data.readers import Source
from tests import templates
from tests.e2e.command import rlctl

TURN_END = ("<end_of_turn>", "<|end|>", "<|user|>", "<|END_OF_TURN_TOKEN|>", "<|end_of_text|>")
CALL = {"id": "call00000", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
TOOL = {
    "type": "function",
    "function": {"name": "add", "description": "Add.", "parameters": {"type": "object"}},
}
CHAT = [
    {"role": "user", "content": "One?"},
    {"role": "assistant", "content": " hello 1"},
    {"role": "user", "content": "Two?"},
    {"role": "assistant", "content": "2"},
]
WITH_TOOLS = [
    {"role": "user", "content": "One?"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "content": "12", "tool_call_id": "call00000", "name": "add"},
    {"role": "assistant", "content": "It is 12."},
]


def of_roles(user: str, assistant: str, end: str, start: str = "", opening: str = "") -> str:
    """Return a template of texts around the messages of each role."""
    return (
        f"{{{{- {opening!r} }}}}"
        "{%- for message in messages %}{%- if message.role == 'assistant' %}"
        f"{{{{- {assistant!r} + {start!r} + message.content | trim + {end!r} }}}}"
        "{%- else %}"
        f"{{{{- {user!r}.replace('ROLE', message.role) + message.content | trim }}}}"
        "{%- endif %}{%- endfor %}"
        f"{{%- if add_generation_prompt %}}{{{{- {assistant!r} }}}}{{%- endif %}}"
    )


@dataclass(frozen=True)
class Family:
    """A chat template in the style of a family, and what its rows learn."""

    template: str
    eos: str
    learned: tuple[tuple[str, ...], ...] = ((" hello 1", "2"),)  # by row, without `eos`
    calls: tuple[tuple[str, ...], ...] = ()  # with tools; empty: it has none


TRIMMED = (("hello 1", "2"),)
QWEN_CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
FAMILIES = {
    "qwen2.5": Family(
        templates.CHATML,
        "<|im_end|>",
        calls=((QWEN_CALL, "It is 12."),),
    ),
    "qwen3": Family(
        templates.QWEN3,
        "<|im_end|>",
        (("<think>\n\n</think>\n\n hello 1",), ("<think>\n\n</think>\n\n2",)),
        (
            (f"<think>\n\n</think>\n\n{QWEN_CALL}",),
            ("<think>\n\n</think>\n\nIt is 12.",),
        ),
    ),
    "llama3": Family(
        templates.LLAMA3,
        "<|eot_id|>",
        TRIMMED,
        (('{"name": "add", "parameters": {"a": 1}}', "It is 12."),),
    ),
    "mistral": Family(
        templates.MISTRAL,
        "</s>",
        ((" hello 1", " 2"),),
        (('[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1}}]', " It is 12."),),
    ),
    "deepseek": Family(templates.DEEPSEEK, "<|im_end|>", calls=(('add {"a": 1};', "It is 12."),)),
    "zephyr": Family(of_roles("<|ROLE|>\n", "<|assistant|>\n", "</s>\n"), "</s>", TRIMMED),
    "gemma2": Family(
        of_roles("<start_of_turn>ROLE\n", "<start_of_turn>model\n", "<end_of_turn>\n", "", "<s>"),
        "<end_of_turn>",
        TRIMMED,
    ),
    "phi3": Family(of_roles("<|ROLE|>\n", "<|assistant|>\n", "<|end|>\n"), "<|end|>", TRIMMED),
    "llama2": Family(
        of_roles("<s>[INST] ", " [/INST]", " </s>", " "), "</s>", ((" hello 1 ", " 2 "),)
    ),
    "vicuna": Family(
        of_roles(" USER: ", " ASSISTANT:", "</s>", " ", "A chat."), "</s>", ((" hello 1", " 2"),)
    ),
    "command_r": Family(
        of_roles("<|START|>ROLE ", "<|START|>bot ", "<|END_OF_TURN_TOKEN|>", "", "<s>"),
        "<|END_OF_TURN_TOKEN|>",
        ((" hello 1", "2"),),  # one token spans the header's space,
    ),
    "granite": Family(
        of_roles("<|role|>ROLE<|sep|>", "<|role|>assistant<|sep|>", "<|end_of_text|>\n"),
        "<|end_of_text|>",
        TRIMMED,
    ),
}
WITH_CALLS = [name for name, family in FAMILIES.items() if family.calls]


def source(path: Path, family: Family = FAMILIES["qwen2.5"], *overrides: str) -> Source:
    tokenizer = templates.chat_tokenizer(family.template, family.eos)
    tokenizer.add_special_tokens({"additional_special_tokens": list(TURN_END)})
    data = compose("sft", ["data.max_prompt_length=2000", *overrides]).config.data
    return Source(path, tokenizer, data, data.skip_invalid)


def read(source: Source, *records: dict[str, Any], **params: Any) -> list[PromptRow]:
    """Return the rows of a JSONL file of `records`."""
    source.path.write_text("".join(f"{json.dumps(record)}\n" for record in records))
    rows = list(chats(source, params=ChatsParams(**params)))
    return [row for row in rows if row is not None]


def learned(source: Source, row: PromptRow) -> list[str]:
    """Return the texts whose tokens are learned."""
    ids, mask = row.extra_info["input_ids"], row.extra_info["loss_mask"]
    texts, before = list[list[int]](), 0
    for token, value in zip(ids, mask, strict=True):
        if value and not before:
            texts.append([])
        if value:
            texts[-1].append(token)
        before = value
    return [str(source.tokenizer.decode(each)) for each in texts]


def check(source: Source, rows: list[PromptRow], chat: Any, tools: Any, expected: Any) -> None:
    """Compare the rows with `expected`, and with the template of the messages up to each turn."""
    end = source.tokenizer.eos_token
    assert [learned(source, row) for row in rows] == [
        [f"{text}{end}" for text in texts] for texts in expected
    ]
    turns = [number for number, message in enumerate(chat, 1) if message["role"] == "assistant"]
    for row, texts in zip(rows, expected, strict=True):
        done, turns = turns[: len(texts)], turns[len(texts) :]
        whole = str(
            source.tokenizer.apply_chat_template(chat[: done[-1]], tools=tools, tokenize=False)
        )
        ids = source.tokenizer.encode(whole, add_special_tokens=False)
        own = row.extra_info["input_ids"]
        assert own == ids[: len(own)]
        assert not str(source.tokenizer.decode(ids[len(own) :])).strip()


@pytest.mark.parametrize("name", FAMILIES)
def test_turns_have_the_tokens_of_the_template(name: str, tmp_path: Path) -> None:
    family = FAMILIES[name]
    given = source(tmp_path / "chats.jsonl", family)
    check(given, read(given, {"messages": CHAT}), CHAT, None, family.learned)


@pytest.mark.parametrize("name", WITH_CALLS)
@pytest.mark.parametrize("as_text", [True, False])
def test_calls_have_the_tokens_of_the_template(name: str, as_text: bool, tmp_path: Path) -> None:
    family = FAMILIES[name]
    given = source(tmp_path / "chats.jsonl", family)
    chat = json.loads(json.dumps(WITH_TOOLS))
    if as_text:
        chat[1]["tool_calls"][0]["function"]["arguments"] = '{"a": 1}'
    rows = read(given, {"messages": chat, "tools": json.dumps([TOOL]) if as_text else [TOOL]})
    chat[1]["content"] = ""
    chat[1]["tool_calls"][0]["function"]["arguments"] = (
        '{"a": 1}' if name == "deepseek" else {"a": 1}
    )
    check(given, rows, chat, [TOOL], family.calls)
    assert not any("None" in given.tokenizer.decode(row.extra_info["input_ids"]) for row in rows)


def test_null_content_stays_null_where_the_template_reads_it(tmp_path: Path) -> None:
    template = (
        "{% for m in messages %}"
        "{% if m.tool_calls and m.content is none %}<|assistant|>CALL<|im_end|>"
        "{% elif m.role == 'assistant' %}<|assistant|>{{ m.content }}<|im_end|>"
        "{% else %}<|im_start|>{{ m.content }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    given = source(tmp_path / "chats.jsonl", Family(template, "<|im_end|>"))
    (row,) = read(given, {"messages": WITH_TOOLS})
    assert learned(given, row) == ["CALL<|im_end|>", "It is 12.<|im_end|>"]


def test_masks_of_messages_come_before_the_setting(tmp_path: Path) -> None:
    given = source(tmp_path / "chats.jsonl")
    masked = [{**CHAT[1], "loss_mask": 0}, {**CHAT[3], "weight": 1}]
    chat = [CHAT[0], masked[0], CHAT[2], masked[1]]
    (row,) = read(given, {"messages": chat})
    assert learned(given, row) == ["2<|im_end|>"]
    (row,) = read(given, {"messages": CHAT}, turns="last")
    assert learned(given, row) == ["2<|im_end|>"]
    (row,) = read(given, {"messages": [CHAT[0], {**CHAT[1], "loss_mask": 1}, *CHAT[2:]]})
    assert learned(given, row) == [" hello 1<|im_end|>", "2<|im_end|>"]


def test_columns_of_verl_in_parquet(tmp_path: Path) -> None:
    family = FAMILIES["qwen3"]
    given = source(tmp_path / "chats.parquet", family)
    thinking = [CHAT[0], {"role": "assistant", "content": "<think>\nWell.\n</think>\n\nYes."}]
    records = [
        {"chat": WITH_TOOLS, "functions": [TOOL], "think": None},
        {"chat": thinking, "functions": None, "think": True},
        {"chat": CHAT[:2], "functions": None, "think": False},
    ]
    pq.write_table(pa.Table.from_pylist(records), given.path)
    params = ChatsParams(messages_key="chat", tools_key="functions", enable_thinking_key="think")
    rows = [row for row in chats(given, params=params) if row is not None]
    assert [learned(given, row) for row in rows[2:]] == [
        ["<think>\nWell.\n</think>\n\nYes.<|im_end|>"],
        [" hello 1<|im_end|>"],  # the generation prompt has the empty thought
    ]
    assert learned(given, rows[0]) == [f"{family.calls[0][0]}<|im_end|>"]
    assert "null" not in given.tokenizer.decode(rows[0].extra_info["input_ids"])


@pytest.mark.parametrize(
    ("chat", "said"),
    [
        (None, "'messages' is None, expected a chat"),
        ([CHAT[0]], "no turn of the assistant to learn"),
        ([CHAT[0], {"role": "assistant", "content": None}], "neither content nor tool_calls"),
        ([CHAT[0], {"role": "assistant", "content": [{"type": "image"}]}], "expected a text"),
        ([{**CHAT[0], "loss_mask": 1}, CHAT[1]], "loss_mask of message 0 is 1"),
        ([CHAT[0], {**CHAT[1], "loss_mask": 0.5}], "loss_mask of message 1 is 0.5"),
    ],
)
def test_rows_that_cannot_be_learned_are_errors(chat: Any, said: str, tmp_path: Path) -> None:
    given = source(tmp_path / "chats.jsonl")
    with pytest.raises(ConfigError) as caught:
        read(given, {"messages": CHAT}, {"messages": chat})
    (problem,) = caught.value.problems
    assert said in problem.message
    assert problem.where == f"{given.path}:2"
    skips = source(given.path, FAMILIES["qwen2.5"], "data.skip_invalid=true")
    assert len(read(skips, {"messages": CHAT}, {"messages": chat})) == 1


def test_long_conversations_are_left_out_or_cut(tmp_path: Path) -> None:
    limits = ("data.max_prompt_length=4", "data.max_response_length=8")
    path = tmp_path / "chats.jsonl"
    assert read(source(path, FAMILIES["vicuna"], *limits), {"messages": CHAT}) == []
    chat = [{"role": "user", "content": ""}, {"role": "assistant", "content": "x" * 50}]
    right = (*limits, "data.truncation=right")
    short = source(path, FAMILIES["phi3"], "data.max_prompt_length=20", *right[1:])
    (row,) = read(short, {"messages": chat})
    assert len(row.extra_info["input_ids"]) == 28
    with pytest.raises(ConfigError, match=r"data\.truncation=right cuts"):
        read(
            source(path, FAMILIES["vicuna"], *limits, "data.filter_overlong_prompts=false"),
            {"messages": CHAT},
        )


def test_sft_learns_turns_with_the_settings_of_verl(tmp_path: Path) -> None:
    path = tmp_path / "chats.jsonl"
    chat = [
        {"role": "user", "content": "Tom has 3 apples. He buys 5 more."},
        {"role": "assistant", "content": "3 + 5 = 8 ; #### 8"},
        {"role": "user", "content": "Ann has 4 eggs. She finds 5 more."},
        {"role": "assistant", "content": "4 + 5 = 9 ; #### 9"},
    ]
    path.write_text(f"{json.dumps({'messages': chat})}\n" * 4)
    settings = [
        *("train", "sft", "--inline", f"data.train_files={path}", f"data.val_files={path}"),
        *("model.partial_pretrain=quickstart", "data.train_batch_size=4", "trainer.test_freq=2"),
        *("data.max_prompt_length=96", "data.max_response_length=64", "optim.lr=1e-3"),
        *("trainer.total_training_steps=2", "data.multiturn.enable=true"),
    ]
    rlctl(*settings, cwd=tmp_path)
    (metrics,) = (tmp_path / "runs").rglob("metrics.jsonl")
    rows = map(json.loads, metrics.read_text().splitlines())
    first, last = (row["val/loss"] for row in rows if "val/loss" in row)
    assert last < first


@pytest.mark.parametrize(
    ("settings", "reader", "params"),
    [
        (["data.multiturn.enable=true"], "chats", {}),
        (["data.multiturn.enable=false"], None, {}),
        (["data.multiturn.enable=true", "data.multiturn.tools_key=t"], "chats", {"tools_key": "t"}),
        (["data.messages_key=m"], "chats", {"messages_key": "m"}),
        (
            ["data.custom_cls.path=own.py", "data.custom_cls.name=Own"],
            "dataset_class",
            {"path": "own.py", "name": "Own"},
        ),
    ],
)
def test_settings_of_verl(settings: list[str], reader: str | None, params: dict[str, str]) -> None:
    data = compose("sft", settings).config.data
    assert (data.reader, data.reader_params) == (reader, params)


def test_a_data_set_class_gives_tokens(tmp_path: Path) -> None:
    file = tmp_path / "own.py"
    file.write_text(
        "class Own:\n"
        "    def __init__(self, parquet_files, tokenizer, config):\n"
        "        self.ids = tokenizer.encode('hello 1')\n"
        "        assert config.max_length == config.get('max_prompt_length') + 512\n"
        "    def __len__(self): return 1\n"
        "    def __getitem__(self, index):\n"
        "        mask = [0] + [1] * (len(self.ids) - 1)\n"
        "        kept = [1] * len(self.ids) + [0]\n"
        "        ids = self.ids + [0]\n"
        "        return {'input_ids': ids, 'loss_mask': mask + [0], 'attention_mask': kept}\n"
    )
    given = source(tmp_path / "x", FAMILIES["qwen2.5"], "data.max_response_length=512")
    (row,) = dataset_class(given, DatasetClassParams(path=str(file), name="Own"))
    assert row is not None
    assert learned(given, row) == [" 1"]
    assert row.extra_info["loss_mask"] == [0, 1, 1][: len(row.extra_info["input_ids"])]


def test_a_data_set_class_gives_prompts(tmp_path: Path) -> None:
    file = tmp_path / "own.py"
    file.write_text(
        "class Own:\n"
        "    def __init__(self, data_files, **more):\n"
        "        self.text = open(data_files[0]).read()\n"
        "        assert more['processor'] is None and more['max_samples'] == -1\n"
        "    def __len__(self): return 2\n"
        "    def __getitem__(self, index):\n"
        "        row = {'raw_prompt': [{'role': 'user', 'content': self.text}]}\n"
        "        truth = {'style': 'rule', 'ground_truth': str(index)}\n"
        "        return row | {'data_source': 'own', 'reward_model': truth} if index < 2 else {}\n"
    )
    given = source(tmp_path / "text.txt")
    given.path.write_text("One?")
    rows = list(dataset_class(given, DatasetClassParams(path=str(file), name="Own")))
    assert rows == [
        PromptRow("own", [{"role": "user", "content": "One?"}], str(number)) for number in (0, 1)
    ]
    file.write_text(file.read_text().replace("index < 2", "index < 1"))
    file.rename(other := tmp_path / "other.py")
    with pytest.raises(ConfigError, match="column 'data_source' is None") as caught:
        list(dataset_class(given, DatasetClassParams(path=str(other), name="Own")))
    assert caught.value.problems[0].where == f"{other}:Own[1]"


def test_data_show_prints_what_a_reader_makes_of_a_file(tmp_path: Path) -> None:
    (tmp_path / "chats.jsonl").write_text(json.dumps({"messages": CHAT}) + "\n")
    words = ("data", "show", "chats.jsonl", "data.reader=chats")
    lines = rlctl(*words, cwd=tmp_path).stdout.splitlines()
    assert lines[0].endswith(" learned")
    assert [line.partition(":")[0] for line in lines[1:5]] == ["context", "learned"] * 2
    assert lines[2] == "learned:  hello 1<|end|>"
    last = "data.reader_params.turns=last"
    (row,) = json.loads(rlctl(*words, last, "--json", cwd=tmp_path).stdout)
    assert [part["learned"] for part in row["parts"]] == [False, True]
    assert row["parts"][1]["text"] == "2<|end|>"
    past = rlctl(*words, "--start", "1", cwd=tmp_path, code=2)
    assert "--start 1 is past the last row" in past.stderr
    (tmp_path / "own.py").write_text(
        "class Own:\n"
        "    def __init__(self, files, **more):\n"
        "        pass\n"
        "    def __len__(self): return 1\n"
        "    def __getitem__(self, index):\n"
        "        row = {'raw_prompt': [{'role': 'user', 'content': 'One?'}]}\n"
        "        truth = {'style': 'rule', 'ground_truth': '1'}\n"
        "        return row | {'data_source': 'own', 'reward_model': truth}\n"
    )
    own = ("data.custom_cls.path=own.py", "data.custom_cls.name=Own")
    assert "<|user|>One?<|end|>" in rlctl(*words[:3], *own, cwd=tmp_path).stdout
    assert "choose a reader" in rlctl(*words[:3], "data.seed=1", cwd=tmp_path, code=2).stderr
