"""`data.skip_invalid=true`: training rows that cannot be used are left out and counted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rlctl import api
from rlctl.data_prep import records, rows
from rlctl.data_prep.row_fields import RowField
from rlctl.errors import ConfigError
from rlctl.quickstart import real_path
from rlctl.recipes.compose import compose
from rlctl.runs.record import RunRecord
from rlctl.runtime.data import prompt_lengths, row_table
from rlctl.runtime.data.loader import PromptSet
from rlctl.runtime.data.tokenizer import load_tokenizer
from rlctl.runtime.planning.dry_run import dry_run
from rlctl.tracking.jsonl import metric_rows
from tests.configs import configured
from tests.settings import given

TOKENIZER = load_tokenizer(real_path("quickstart"))
FIELD = RowField("extra_info.answer", "data.response_key")
REASONS = {
    "prompt is null": 1,
    "a message of prompt is null": 1,
    "prompt is empty": 1,
    "reward_model.ground_truth is null": 1,
    "data_source is null": 1,
    "the prompt is too long": 1,
    "extra_info.answer is null": 2,
    "extra_info.answer is empty": 1,
}


def chat(text: str | None) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text}]


def record(number: int, **changed: Any) -> dict[str, Any]:
    row = {
        "data_source": "rlctl/arithmetic",
        "prompt": chat(f"Tom has 3 apples. He buys {number} more. How many?"),
        "reward_model": {"style": "rule", "ground_truth": str(3 + number)},
        "extra_info": {"answer": f"#### {3 + number}", "index": number},
    }
    return row | changed


def usable(count: int) -> list[dict[str, Any]]:
    return [record(number) for number in range(count)]


def unusable() -> list[dict[str, Any]]:
    return [
        record(100, prompt=None),
        record(101, prompt=chat(None)),
        record(102, prompt=chat(" \n")),
        record(103, reward_model={"style": "rule", "ground_truth": None}),
        record(104, data_source=None),
        record(105, prompt=chat("word " * 2000)),
        record(106, extra_info={"answer": None, "index": 106}),
        record(107, extra_info={"answer": None, "index": 107}),
        record(108, extra_info={"answer": "", "index": 108}),
    ]


def mixed() -> list[dict[str, Any]]:
    """Return eight usable rows between nine others."""
    bad, good = unusable(), usable(8)
    return [row for pair in zip(bad, good, strict=False) for row in pair] + bad[8:]


def write(path: Path, records: list[Any]) -> None:
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(records), path)
    else:
        path.write_text("\n\n".join(map(json.dumps, records)), encoding="utf-8")


def load(path: Path, *settings: str, **kwargs: Any) -> PromptSet:
    chosen = configured("ppo", (), (f"data.train_files=[{path}]", *settings)).data
    return PromptSet.load_train(chosen, TOKENIZER, **kwargs)


@pytest.mark.parametrize("name", ["x.parquet", "x.jsonl"])
@pytest.mark.parametrize("is_cached", [False, True])
def test_unusable_rows_are_left_out_and_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, is_cached: bool
) -> None:
    if is_cached:
        monkeypatch.setattr(row_table, "LARGE_BYTES", 0)
        monkeypatch.setenv("RLCTL_CACHE", str(tmp_path / "cache"))
    for module in (records, rows, prompt_lengths):
        monkeypatch.setattr(module, "BATCH_ROWS", 3)
    write(tmp_path / name, mixed())
    expected = load(tmp_path / name, "data.skip_invalid=true", fields=[FIELD])
    for _ in range(2):
        found = load(tmp_path / name, "data.skip_invalid=true", fields=[FIELD])
        assert [row.extra_info["index"] for row in found.rows] == list(range(8))
        assert found.rows[5] == expected.rows[5]
        assert found.skipped == REASONS
        assert found.num_dropped == 1
    with pytest.raises(ConfigError):  # also after the copy without such rows was cached
        load(tmp_path / name)


def test_rows_without_faults_are_the_same_with_and_without_the_key(tmp_path: Path) -> None:
    write(tmp_path / "x.parquet", usable(5))
    found = load(tmp_path / "x.parquet", "data.skip_invalid=true", fields=[FIELD])
    assert list(found.rows) == list(load(tmp_path / "x.parquet").rows)
    assert found.skipped == {}


def test_lines_that_are_no_json_are_left_out(tmp_path: Path) -> None:
    lines = [json.dumps(row) for row in usable(3)]
    (tmp_path / "x.jsonl").write_text("\n".join([lines[0], "{", "[1]", '"\\ud83d"', *lines[1:]]))
    found = load(tmp_path / "x.jsonl", "data.skip_invalid=true")
    assert [row.extra_info["index"] for row in found.rows] == [0, 1, 2]
    assert found.skipped == {"the row is not an object": 3}


def test_long_prompts_and_those_that_the_template_rejects_are_left_out(tmp_path: Path) -> None:
    long = record(1, prompt=chat("word " * 2000))
    odd = record(2, prompt=[{"role": "user", "content": "21"}])
    write(tmp_path / "x.parquet", [record(0), long, odd])
    tokenizer = load_tokenizer(
        real_path("quickstart"),
        chat_template="{% for m in messages %}{% if m.content == '21' %}{{ raise_exception('no') }}"
        "{% endif %}{{ m.content }}{% endfor %}",
    )
    settings = ("data.skip_invalid=true", "data.filter_overlong_prompts=false")
    chosen = configured("ppo", (), (f"data.train_files=[{tmp_path}/x.parquet]", *settings)).data
    found = PromptSet.load_train(chosen, tokenizer)
    assert found.skipped == {
        "the chat template rejects the prompt": 1,
        "the prompt is too long": 1,
    }
    cut = chosen.model_copy(update={"truncation": "left"})
    assert len(PromptSet.load_train(cut, tokenizer)) == 2  # a prompt that is cut can be used


def test_limits_and_weights_count_usable_rows(tmp_path: Path) -> None:
    write(tmp_path / "x.parquet", mixed())
    found = load(tmp_path / "x.parquet", "data.skip_invalid=true", "data.train_max_samples=3")
    assert [row.extra_info["index"] for row in found.rows] == [0, 1, 2]
    files = [{"path": str(tmp_path / "x.parquet"), "weight": weight} for weight in (1, 3)]
    chosen = configured("ppo", (), (f"data.train_files={json.dumps(files)}",)).data
    skipping = chosen.model_copy(update={"skip_invalid": True})
    both = PromptSet.load_train(skipping, TOKENIZER, None, [FIELD])
    assert [(part.start, part.stop) for part in both.parts] == [(0, 8), (8, 16)]
    assert both.skipped == {reason: 2 * count for reason, count in REASONS.items()}


def test_files_without_usable_rows_are_an_error(tmp_path: Path) -> None:
    write(tmp_path / "x.parquet", [record(1, prompt=None), record(2)])
    assert len(load(tmp_path / "x.parquet", "data.skip_invalid=true")) == 1
    write(tmp_path / "y.parquet", [record(1, data_source=""), record(2, data_source="")])
    with pytest.raises(ConfigError, match=r"no row is left .*data_source is empty: 2"):
        load(tmp_path / "y.parquet", "data.skip_invalid=true")


def test_validation_rows_are_never_left_out(tmp_path: Path) -> None:
    write(tmp_path / "x.parquet", mixed())
    settings = ("data.skip_invalid=true", f"data.val_files=[{tmp_path}/x.parquet]")
    chosen = configured("ppo", (), settings).data
    with pytest.raises(ConfigError, match="column 'prompt' is None"):
        PromptSet.load(chosen.val_files or (), chosen, TOKENIZER, -1, "test")


def test_plan_record_and_resumed_run_leave_out_the_same_rows(tmp_path: Path) -> None:
    write(tmp_path / "train.parquet", mixed())
    write(tmp_path / "val.parquet", usable(2))
    settings = [
        *given(train=tmp_path / "train.parquet", val=tmp_path / "val.parquet"),
        *given(runs=tmp_path / "runs", project="p", logger=[], batch=4, mini_batch=4, response=8),
        *given(steps=2, save=1, validate=-1, validate_first=False),
        "data.skip_invalid=true",
    ]
    recipe = compose("sft", [*settings, *given(name="a")])
    assert dry_run(recipe, inline=True, strict=False).batches.skipped_rows == REASONS
    run = api.train(recipe, inline=True).path
    assert RunRecord.read(run / "run.json").skipped_rows == REASONS
    forked = api.resume(run, from_step=1, fork="b", inline=True).path
    (first,) = [row for row in metric_rows(run / "metrics.jsonl") if row["step"] == 2]
    (again,) = [row for row in metric_rows(forked / "metrics.jsonl") if row["step"] == 2]
    assert again["train/loss"] == first["train/loss"]
    record_file = run / "run.json"
    raw = json.loads(record_file.read_text())
    raw["skipped_rows"] = {"prompt is null": 3}
    record_file.write_text(json.dumps(raw))
    with pytest.raises(ConfigError, match="leaves out other rows than before"):
        api.resume(run, ["trainer.total_training_steps=3"], inline=True)
