"""Rows of data files in Arrow, and the lengths of their prompts: equal to those of Python rows."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from threading import Event
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rlctl.data_prep import records, rows
from rlctl.data_prep.rows import PromptRow, read_rows, write_rows
from rlctl.errors import ConfigError
from rlctl.quickstart import real_path
from rlctl.recipes import schema
from rlctl.runtime.data import prompt_lengths, row_table
from rlctl.runtime.data.loader import PromptSet
from rlctl.runtime.data.row_table import Rows
from rlctl.runtime.data.tokenizer import encode_prompt, load_tokenizer
from rlctl.runtime.data.unusable_prompts import truncate
from tests.configs import configured

TOKENIZER = load_tokenizer(real_path("quickstart"))


def made(count: int, **extra: Any) -> list[PromptRow]:
    return [
        PromptRow(
            f"source {number % 3}",
            [{"role": "user", "content": "1 + " * (number % 7) + f"{number}é"}],
            str(number),
            extra_info={"index": number, **extra},
            agent_name="tool_agent" if number == 5 else "",
        )
        for number in range(count)
    ]


def data(*settings: str) -> schema.Data:
    return configured("ppo", (), settings).data


@pytest.fixture(autouse=True)
def large_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Treat every file as large, in batches of three rows."""
    monkeypatch.setattr(row_table, "LARGE_BYTES", 0)
    for module in (records, rows, prompt_lengths):
        monkeypatch.setattr(module, "BATCH_ROWS", 3)
    monkeypatch.setenv("RLCTL_CACHE", str(tmp_path / "cache"))


def plain(path: Path) -> None:
    write_rows(path, made(11))


def as_json_text(path: Path) -> None:
    mixed = [1, "two", [3], {"four": 4}]
    write_rows(path, [PromptRow("s", row.prompt, mixed[i % 4], extra_info={f"k{i}": i})
                      for i, row in enumerate(made(11))])  # fmt: skip


def dictionaries(path: Path) -> None:
    write_rows(path, made(11))
    table = pq.read_table(path)
    source = table["data_source"].dictionary_encode()
    pq.write_table(table.set_column(0, "data_source", source), path, row_group_size=4)


def lines(path: Path) -> None:
    found = [
        {
            "data_source": row.data_source,
            "prompt": row.prompt,
            "reward_model": {"ground_truth": row.ground_truth},
            "extra_info": row.extra_info | {"nan": [1.5, None, "\U0001f600"]},
            "tools": ["calculator"] if row.agent_name else [],
        }
        for row in made(11)
    ]
    text = json.dumps(found) if path.suffix == ".json" else "\n\n".join(map(json.dumps, found))
    path.write_text(text, encoding="utf-8")


@pytest.mark.parametrize(
    ("write", "name"),
    [
        (plain, "x.parquet"),
        (as_json_text, "x.parquet"),
        (dictionaries, "x.parquet"),
        (lines, "x.jsonl"),
        (lines, "x.json"),
    ],
)
def test_cached_rows_equal_those_of_the_file(
    write: Any, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / name)
    expected = read_rows(tmp_path / name)
    for number in range(2):
        found = Rows.load(tmp_path / name, data())
        assert list(found) == expected
        assert [found[i] for i in range(len(found))] == expected
        assert list(found[2:9].select(np.array([0, 3, 6]))) == expected[2:9:3]
        assert found.count_sources().total() == len(expected)
        if number == 0:  # the second time, the file is not read
            monkeypatch.setattr(row_table, "read_batches", None)


def test_rows_of_several_files_have_their_first_rows_of_each_kind(tmp_path: Path) -> None:
    for name in "ab":
        write_rows(tmp_path / f"{name}.parquet", made(20))
    every = made(20) + made(20)
    joined = Rows.concat([Rows.load(tmp_path / f"{name}.parquet", data()) for name in "ab"])
    assert list(joined) == every
    assert joined[4:].count_sources() == Counter(row.data_source for row in every[4:])
    assert joined[4:].first_of_each_kind(2) == [every[i] for i in (4, 5, 6, 7, 8, 9, 11, 25)]
    held = [joined[i] for i in (3, 30, 3)]
    assert held[0] is held[2]
    assert joined.positions_of(held) == [3, 30, 3]


@pytest.mark.parametrize("damage", [b"", b"ARROW1 nothing", None])
def test_a_damaged_cache_is_made_again(
    damage: bytes | None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    plain(tmp_path / "x.parquet")
    settings = data(f"data.train_files=[{tmp_path}/x.parquet]")
    expected = PromptSet.load_train(settings, TOKENIZER)
    cached = [each for each in (tmp_path / "cache").rglob("*") if each.is_file()]
    assert len(cached) == 2
    for each in cached:
        content = each.read_bytes()[:-9] if damage is None else damage
        each.unlink()  # it is mapped
        each.write_bytes(content)
    for number in range(2):
        caplog.clear()
        found = PromptSet.load_train(settings, TOKENIZER)
        assert list(found.rows) == list(expected.rows)
        assert found.mean_length == expected.mean_length
        assert [("damaged" in each.message) for each in caplog.records].count(
            True
        ) == 2 - 2 * number


def test_rows_are_held_in_memory_where_the_cache_cannot_be_written(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    plain(tmp_path / "x.parquet")
    (tmp_path / "cache").write_text("a file")
    assert list(Rows.load(tmp_path / "x.parquet", data())) == made(11)
    assert "are not cached, but held in memory" in caplog.text


def test_faults_are_reported_as_without_a_cache(tmp_path: Path) -> None:
    good = {"data_source": "s", "prompt": "1", "reward_model": {"ground_truth": "1"}}
    bad = [good] * 8 + [{**good, "prompt": ""}, good, {**good, "images": [1]}, 3]
    (tmp_path / "x.jsonl").write_text("\n".join(map(json.dumps, bad)))
    with pytest.raises(ConfigError) as expected:
        read_rows(tmp_path / "x.jsonl")
    for _ in range(2):
        with pytest.raises(ConfigError) as found:
            Rows.load(tmp_path / "x.jsonl", data())
        assert found.value.problems == expected.value.problems
        assert len(found.value.problems) == 3
    assert not list((tmp_path / "cache").rglob("*.arrow"))


@pytest.mark.parametrize(
    "settings",
    [
        [],
        ["data.max_prompt_length=12", "data.filter_overlong_prompts=true"],
        [
            "data.max_prompt_length=9",
            "data.filter_overlong_prompts=false",
            "data.truncation=middle",
        ],
        ["data.train_max_samples=14"],
    ],
)
def test_prompts_equal_those_that_are_tokenized_alone(settings: list[str], tmp_path: Path) -> None:
    every = made(11) + made(11)
    for name in "ab":
        write_rows(tmp_path / f"{name}.parquet", made(11))
    config = data(f"data.train_files=[{tmp_path}/a.parquet,{tmp_path}/b.parquet]", *settings)
    limit, kept = config.max_prompt_length, []
    for row in every[: config.train_max_samples if config.train_max_samples >= 0 else None]:
        ids = encode_prompt(TOKENIZER, row.prompt)
        if len(ids) <= limit or not config.filter_overlong_prompts:
            kept.append((row, ids if len(ids) <= limit else truncate(ids, config, "")))
    for _ in range(2):
        found = PromptSet.load_train(config, TOKENIZER)
        batch = found.batch(range(len(found)))
        assert list(found.rows) == batch.rows == [row for row, _ in kept]
        assert [ids.tolist() for ids in batch.prompt_ids.rows()] == [ids for _, ids in kept]
        assert found.mean_length == np.mean([len(ids) for _, ids in kept])
        assert found.num_dropped == (22 - len(kept) if limit == 12 else 0)


def test_the_first_row_that_cannot_be_used_is_reported(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(
        real_path("quickstart"),
        chat_template="{% for m in messages %}{% if '21' in m.content %}{{ raise_exception('no') }}"
        "{% endif %}{{ m.content }}{% endfor %}",
    )
    write_rows(tmp_path / "x.parquet", made(30))
    file = f"data.train_files=[{tmp_path}/x.parquet]"
    for _ in range(2):
        with pytest.raises(ConfigError, match="the chat template rejects a prompt"):
            PromptSet.load_train(data(file), tokenizer)
        with pytest.raises(ConfigError, match="a prompt of") as caught:
            PromptSet.load_train(
                data(file, "data.max_prompt_length=12", "data.filter_overlong_prompts=false"),
                tokenizer,
            )
        number = next(
            i for i, row in enumerate(made(30)) if len(encode_prompt(tokenizer, row.prompt)) > 12
        )
        assert caught.value.problems[0].where == f"{tmp_path}/x.parquet, row {number}"


def test_lengths_depend_on_template_and_arguments(tmp_path: Path) -> None:
    write_rows(tmp_path / "x.parquet", made(11))
    found = Rows.load(tmp_path / "x.parquet", data())
    other = load_tokenizer(
        real_path("quickstart"),
        chat_template="{% for m in messages %}{{ m.content }}{% if twice %}{{ m.content }}"
        "{% endif %}{% endfor %}",
    )
    for tokenizer, kwargs in ((TOKENIZER, {}), (other, {}), (other, {"twice": True})):
        for _ in range(2):
            lengths = prompt_lengths.prompt_lengths(found, tokenizer, kwargs)
            assert lengths.tolist() == [
                len(encode_prompt(tokenizer, row.prompt, **kwargs)) for row in found
            ]


def test_schema_metadata_of_a_batch_is_kept(tmp_path: Path) -> None:
    as_json_text(tmp_path / "x.parquet")
    assert pa.types.is_string(pq.read_schema(tmp_path / "x.parquet").field("extra_info").type)
    assert Rows.load(tmp_path / "x.parquet", data())[3].ground_truth == {"four": 4}


def test_a_prompt_that_is_too_long_for_sure_is_not_tokenized(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(row_table, "LARGE_BYTES", 2**30)
    seen: list[str] = []
    exact = prompt_lengths._exact_counts

    def counts(tokenizer: Any, texts: list[str]) -> list[int]:
        seen.extend(texts)
        return exact(tokenizer, texts)

    monkeypatch.setattr(prompt_lengths, "_exact_counts", counts)
    rows = made(4)
    rows[1] = PromptRow("s", [{"role": "user", "content": "word " * 10_000}], "1")
    write_rows(tmp_path / "x.parquet", rows)
    found = PromptSet.load_train(data(f"data.train_files=[{tmp_path}/x.parquet]"), TOKENIZER)
    assert found.num_dropped == 1
    assert max(map(len, seen)) < 1000
    assert len(seen) == 3


def test_long_counts_report_their_progress(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompt_lengths, "_PROGRESS_S", 0.001)
    reported = Event()

    def counts(_: Any, texts: list[str], __: int | None) -> list[int]:
        assert reported.wait(60)
        return [1] * len(texts)

    monkeypatch.setattr(prompt_lengths, "_count_tokens", counts)
    monkeypatch.setattr(prompt_lengths.LOG, "info", lambda *_: reported.set())
    write_rows(tmp_path / "x.parquet", made(2))
    rows = Rows.load(tmp_path / "x.parquet", data())
    assert prompt_lengths.prompt_lengths(rows, TOKENIZER, {}).tolist() == [1, 1]
