"""`rlctl prep` and `rlctl data`: files, summaries and errors."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner, Result

from rlctl.cli import app
from rlctl.cli.commands.prep import next_command
from rlctl.data_prep.rows import read_rows
from rlctl.errors import ConfigError, NotFoundError, RlctlError, UsageError
from rlctl.recipes.compose import compose
from rlctl.recipes.search_path import library_recipes
from tests.models import tiny_tokenizer
from tests.plugin_folders import can_train


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(each) for each in arguments])


def error(*arguments: object) -> RlctlError:
    result = run(*arguments)
    assert isinstance(result.exception, RlctlError), result.output
    assert result.stdout == ""
    return result.exception


@pytest.fixture
def model(tmp_path: Path) -> Path:
    tiny_tokenizer().save_pretrained(tmp_path / "model")
    return tmp_path / "model"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "source"
    folder.mkdir()
    for split in ("train", "test"):
        records = [{"question": "x" * (100 * i), "answer": f"#### {i}"} for i in range(1, 5)]
        (folder / f"{split}.jsonl").write_text("\n".join(map(json.dumps, records)))
    return folder


def test_gsm8k_drops_and_counts_long_prompts(tmp_path: Path, source: Path, model: Path) -> None:
    out = tmp_path / "out"
    arguments = ("prep", "gsm8k", "--source", source, "--out", out, "--model", model)
    arguments += ("--max-prompt-length", 430)
    result = run(*arguments, "--json")
    assert result.exit_code == 0, result.output
    summary = json.loads(result.stdout)["train"]
    # One token per byte: the question, a space and the instruction (66), "user" and two line ends
    # (6), three special tokens, "assistant" and a line end (10).
    lengths = [100 * i + 1 + 66 + 6 + 3 + 10 for i in range(1, 5)]
    tokens = {"min": lengths[0], "median": lengths[2], "p95": lengths[3], "max": lengths[3]}
    assert summary["prompt_tokens"] == tokens
    assert (summary["num_rows"], summary["num_dropped"]) == (3, 1)
    assert [row.extra_info["index"] for row in read_rows(out / "train.parquet")] == [0, 1, 2]
    result = run(*arguments)
    assert result.stdout == ""
    shown = result.stderr.replace("\n", "")
    assert "train.parquet: 3 rows, 1 longer than 430 tokens dropped" in shown
    assert re.search(r"\d+-\d+ +1 +█", result.stderr)


def test_errors_leave_no_file(tmp_path: Path, source: Path, model: Path) -> None:
    out = tmp_path / "out"
    arguments = ("prep", "gsm8k", "--source", source, "--out", out)
    assert isinstance(error(*arguments, "--max-prompt-length", 5), UsageError)
    assert isinstance(error(*arguments, "--model", tmp_path), ConfigError)
    short = error(*arguments, "--model", model, "--max-prompt-length", 5)
    assert "the shortest has 186" in str(short)
    (source / "test.jsonl").write_text("{")
    assert "test.jsonl:1" in str(error(*arguments))
    assert "level 0 has" in str(error("prep", "arithmetic", "--out", out, "--level", 0))
    keys = ("--prompt-key", "q", "--answer-key", "a")
    missing = error("prep", "jsonl", tmp_path / "none", *keys, "--out", out)
    assert isinstance(missing, NotFoundError)
    assert not out.exists()


def test_rows_of_packages_that_are_not_installed_are_refused(tmp_path: Path) -> None:
    out = ("--out", tmp_path / "data")
    assert "No module named 'verifiers'" in str(error("prep", "verifiers", "words", *out))
    assert "reasoning-gym is not installed" in str(error("prep", "reasoning_gym", "legs", *out))
    assert not (tmp_path / "data").exists()


def test_data_show(tmp_path: Path, model: Path) -> None:
    run("prep", "arithmetic", "--out", tmp_path, "--train", 5, "--val", 5)
    file = tmp_path / "train.parquet"
    rows = read_rows(file)
    words = ("data", "show", file, "--model", model, "-n", 2, "--start", 1, "--json")
    entries = json.loads(run(*words).stdout)
    assert [entry["row"] for entry in entries] == [1, 2]
    for entry in entries:
        row = rows[entry["row"]]
        text = row.prompt[0]["content"]
        assert entry["rendered"] == f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"
        assert entry["num_tokens"] == len(text) + 19
        assert (entry["ground_truth"], entry["extra_info"]) == (row.ground_truth, row.extra_info)
        assert entry["style"] == "rule"
    shown = run("data", "show", file, "-n", 1)
    assert rows[0].prompt[0]["content"] in shown.stdout.replace("\n", " ")
    assert f"ground truth: {rows[0].ground_truth}" in shown.stdout
    assert "5 rows" in shown.stderr.replace("\n", " ")
    assert isinstance(error("data", "show", tmp_path / "none.parquet"), NotFoundError)
    assert isinstance(error("data", "show", file, "--start", 5), UsageError)
    assert isinstance(error("data", "show", file, "--prompt-key", "question"), ConfigError)
    assert isinstance(error("data", "show", file, "--model", tmp_path), ConfigError)


def test_help_has_an_example_and_imports_nothing_heavy() -> None:
    code = (
        "import re, sys\n"
        "from typer.testing import CliRunner\n"
        "from rlctl.cli import app\n"
        "sets = [('prep', name) for name in ('gsm8k', 'arithmetic', 'jsonl')]\n"
        "for group, name in [*sets, ('data', 'show'), ('reward', 'test')]:\n"
        "    shown = CliRunner().invoke(app, [group, name, '--help']).stdout\n"
        "    assert re.search('Examples?:\\\\s+rlctl', shown), name\n"
        "heavy = {'torch', 'ray', 'transformers', 'pyarrow', 'hydra', 'pandas'}\n"
        "assert not heavy & sys.modules.keys()\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(
    "words",
    [
        "arithmetic --train 64 --val 8 --out data/sums",
        "arithmetic --train 64 --val 8 --out data/tools --level 4 --tools calculator",
        pytest.param("gridworld --train 32 --val 8", marks=pytest.mark.plugin("agents")),
        "shapes --train 64 --val 8 --out 'my data'",
        pytest.param(
            "preferences arithmetic --train 64 --val 8 --out data/pairs",
            marks=pytest.mark.plugin("objectives"),
        ),
        "jsonl mine.jsonl --prompt-key q --answer-key a --out data/mine",
    ],
)
def test_the_next_command_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.jsonl").write_text('{"q": "2 + 3?", "a": "5"}\n', encoding="utf-8")
    done = run("prep", *shlex.split(words))
    (line,) = re.findall(r"^next: rlctl (.*)$", done.stderr, re.MULTILINE)
    command = shlex.split(line)
    tail = ["--dry-run", "--json"] if command[0] == "train" else ["--json"]
    planned = run(*command, *tail)
    assert planned.exit_code == 0, planned.output
    if command[0] == "train":
        folder = re.findall(r"--out '?([\w/ ]+)", words) or ["data/gridworld"]
        config = compose(command[3], command[4:]).config
        assert config.data.train_files == (f"{folder[0].strip()}/train.parquet",)
        assert config.data.val_files == (f"{folder[0].strip()}/val.parquet",)


def test_recipes_of_gsm8k_read_the_folder_that_prep_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: Path
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    done = run("prep", "gsm8k", "--source", source)
    assert done.exit_code == 0, done.output
    small = "data.train_batch_size=4 actor_rollout_ref.actor.ppo_mini_batch_size=4"
    assert done.stderr.endswith(f"next: rlctl train ppo --recipe gsm8k_ppo {small}\n")
    files = {split: tmp_path / f"data/gsm8k/{split}.parquet" for split in ("train", "test")}
    whole = next_command("ppo --recipe gsm8k_ppo", files, 7473)
    assert whole == "rlctl train ppo --recipe gsm8k_ppo"
    recipes = [name for name in library_recipes() if name.startswith("gsm8k_")]
    assert len(recipes) >= 7
    for name in filter(can_train, recipes):
        data = compose(name).config.data
        files = [Path(file).expanduser() for file in (*data.train_files, *(data.val_files or ()))]
        assert [file.name for file in files] == ["train.parquet", "test.parquet"]
        assert all(file.is_file() for file in files), name
    done = run("prep", "gsm8k", "--source", source, "--out", "~/else")
    assert f"data.val_files={tmp_path}/else/test.parquet" in done.stderr.replace("\n", "")
    tools = run("prep", "gsm8k", "--source", source, "--tools", "calculator", "--out", "~/tools")
    assert f"next: rlctl data show {tmp_path}/tools/train.parquet" in tools.stderr


@pytest.mark.parametrize(
    ("words", "folder"),
    [
        ("gsm8k --source {source}", "data/gsm8k"),
        ("arithmetic --train 8 --val 2", "data/arithmetic"),
    ],
)
def test_rows_with_tools_do_not_replace_plain_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: Path, words: str, folder: str
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    command = ["prep", *shlex.split(words.format(source=source))]
    assert run(*command).exit_code == 0
    plain = (tmp_path / folder / "train.parquet").read_bytes()
    done = run(*command, "--tools", "calculator")
    assert f"next: rlctl data show {folder}_tools/train.parquet" in done.stderr.replace(
        f"{tmp_path}/", ""
    )
    assert (tmp_path / folder / "train.parquet").read_bytes() == plain
    there = run(*command, "--tools", "calculator", "--out", folder)
    assert there.exit_code == 0, "a folder that is named is used"
    assert (tmp_path / folder / "train.parquet").read_bytes() != plain


@pytest.mark.plugin("objectives")
@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
@pytest.mark.parametrize("chat", [False, True])
def test_the_error_names_the_command_that_reads_pairs_of_trl(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suffix: str, chat: bool
) -> None:
    """TRL's and UltraFeedback's columns: `prompt`, `chosen` and `rejected`, texts or chats."""
    monkeypatch.chdir(tmp_path)
    asked = [{"role": "user", "content": "2 + 3 ="}]

    def answered(text: str) -> Any:
        return [*asked, {"role": "assistant", "content": text}] if chat else text

    record = {"prompt": "2 + 3 =", "chosen": answered("#### 5"), "rejected": answered("#### 6")}
    if suffix == "jsonl":
        Path("pairs.jsonl").write_text(f"{json.dumps(record)}\n" * 4, encoding="utf-8")
    else:
        pq.write_table(pa.Table.from_pylist([record] * 4), "pairs.parquet")
    train = ["train", "dpo", "--recipe", "dpo", "data.val_files=null", "data.train_batch_size=4"]
    train += ["actor_rollout_ref.actor.ppo_mini_batch_size=4", "--inline", "--dry-run"]
    refused = run(*train, f"data.train_files=pairs.{suffix}").exception
    assert isinstance(refused, ConfigError)
    [hint] = {problem.hint for problem in refused.problems}
    assert run(*shlex.split(str(hint).removeprefix("convert it: rlctl "))).exit_code == 0
    done = run(*train, "data.train_files=data/mine/train.parquet")
    assert done.exit_code == 0, done.output
