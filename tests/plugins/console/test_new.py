"""`rlctl new`: files for a user's own data, suggestions, questions, errors."""

from __future__ import annotations

import csv
import io
import json
import os
import re
import sys
import termios
import threading
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from typer.testing import CliRunner, Result

from rlctl.__main__ import main
from rlctl.cli.console import stdout
from rlctl.cli.stderr import stderr
from rlctl.data_prep.decoded_images import pattern
from rlctl.data_prep.raw_data import final_answer, find_raw
from rlctl.data_prep.rows import PromptRow, read_rows, write_rows
from rlctl.errors import ConfigError, ConflictError, NotFoundError, RlctlError, UsageError
from rlctl.plugins.console.commands import new
from rlctl.plugins.console.project import model_trial
from rlctl.plugins.console.project.model_trial import run_trial
from rlctl.plugins.console.project.project_files import Schedule, reward_source
from rlctl.plugins.user_code import import_file
from rlctl.quickstart import VISION
from rlctl.recipes.compose import compose
from rlctl.runtime import evaluate as evaluate_module
from rlctl.tracking.tracker import Sample

RECORDS = [
    {"id": f"r{number}", "Question": f"How much is {number} + 1?", "answer": str(number + 1)}
    for number in range(40)
]


def run(*arguments: object, trial: str = "--no-try") -> Result:
    return CliRunner().invoke(new.app, [*(str(each) for each in arguments), trial])


def error(*arguments: object) -> RlctlError:
    result = run(*arguments)
    assert isinstance(result.exception, RlctlError), result.output
    return result.exception


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sums.jsonl").write_text("\n".join(map(json.dumps, RECORDS)))
    return tmp_path


def test_suggestions_make_a_project_that_is_ready_to_start(here: Path) -> None:
    done = run("mine", "--data", "sums.jsonl", "--yes", "--json", "--devices", 2)
    assert done.exit_code == 0, done.output
    made = json.loads(done.stdout)
    assert made["command"] == "rlctl train grpo --recipe mine/mine.yaml"
    assert made["dry_run"]["reward_rows"] == 10
    assert [each["ground_truth"] for each in made["rows"]] == ["1", "2", "3"]
    assert "How much is 0 + 1?" in made["rows"][0]["rendered"]
    config = compose("mine/mine.yaml", []).config
    assert (config.data.train_batch_size, config.trainer.n_gpus_per_node) == (8, 2)
    assert config.actor_rollout_ref.model.path == "quickstart"
    assert len(read_rows("mine/train.parquet")) == 36
    assert {row.extra_info["split"] for row in read_rows("mine/val.parquet")} == {"val"}
    score = import_file(here / "mine/reward.py", "reward").compute_score
    assert score("sums", "It is 7, or $1,008.0", "1008")["score"] == 1.0
    with pytest.raises(UsageError, match="missing options"):
        raise error("mine2", "--data", "sums.jsonl")
    conflict = error("mine", "--data", "sums.jsonl", "--yes")
    assert isinstance(conflict, ConflictError)
    assert "mine/mine.yaml, mine/reward.py, mine/train.parquet, mine/val.parquet" in str(conflict)
    settings = ["--reward", "own", "--algorithm", "ppo", "--instruction", "Be brief."]
    done = run("mine", "--data", "sums.jsonl", "--yes", "--force", *settings)
    assert done.exit_code == 0, done.output
    assert "start      rlctl train ppo --recipe mine/mine.yaml" in done.stdout
    started = "no errors: `rlctl train ppo --recipe mine/mine.yaml` starts the run"
    assert started in " ".join(done.stderr.split())
    assert read_rows("mine/train.parquet")[0].prompt[0]["content"].endswith("1? Be brief.")


def test_without_a_terminal_all_missing_options_are_one_error() -> None:
    nothing = error()
    assert isinstance(nothing, UsageError)
    assert nothing.problems[0].message == (
        "missing options: --data FILE, --prompt-key COLUMN, --answer-key COLUMN, --reward KIND, "
        "--model DIR, --devices N"
    )
    some = error("--data", "sums.jsonl", "--model", "quickstart").problems[0]
    assert some.message == (
        "missing options: --prompt-key COLUMN, --answer-key COLUMN, --reward KIND, --devices N"
    )
    assert some.hint == (
        "nothing is asked without a terminal; --yes accepts the suggestions: "
        "--prompt-key Question --answer-key answer --reward number --devices 1"
    )


def test_chats_of_both_forms_are_split(here: Path) -> None:
    messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "so #### 4"}]
    sharegpt = [{"from": "human", "value": "q"}, {"from": "gpt", "value": "so #### 4"}]
    for name, chat in (("messages", messages), ("conversations", sharegpt)):
        records = [{"id": number, name: chat} for number in range(20)]
        (here / f"{name}.jsonl").write_text("\n".join(map(json.dumps, records)))
        done = run(f"of_{name}", "--data", f"{name}.jsonl", "--yes", "--json")
        assert done.exit_code == 0, done.output
        row = read_rows(f"of_{name}/train.parquet")[0]
        assert [each["role"] for each in row.prompt] == ["user"]
        assert (row.ground_truth, row.extra_info["answer"]) == ("4", "so #### 4")


@pytest.mark.parametrize(
    ("arguments", "kind", "message"),
    [
        (["--data", "none.csv"], NotFoundError, "the data does not exist"),
        (["--data", "mine.txt"], ConfigError, r"unknown kind, '\.txt'"),
        (["--data", "empty.jsonl"], ConfigError, "no records"),
        (["--data", "twice.csv"], ConfigError, "two columns are named 'a'"),
        (["--prompt-key", "question"], UsageError, r"no column 'question'\n.*Question"),
        (["--prompt-key", "n"], UsageError, "'n' has no text or chat\n.*id, Question"),
        (["--answer-key", "tags"], UsageError, "'tags' has no text or number"),
        (["--reward", "exakt"], UsageError, "no kind of reward 'exakt'\n.*exact, number"),
        (["--model", "nowhere"], ConfigError, "the model folder does not exist"),
    ],
)
def test_a_wrong_answer_names_what_works(
    here: Path, arguments: list[str], kind: type[RlctlError], message: str
) -> None:
    records = [each | {"n": 1, "tags": ["a"]} for each in RECORDS]
    (here / "sums.jsonl").write_text("\n".join(map(json.dumps, records)))
    (here / "mine.txt").touch()
    (here / "empty.jsonl").touch()
    (here / "twice.csv").write_text("q,a,a,,\nx,1,2,,\n")
    with pytest.raises(kind, match=message):
        raise error("mine", "--data", "sums.jsonl", "--yes", *arguments)
    assert not (here / "mine").exists()


def test_every_format_has_the_same_rows(here: Path) -> None:
    table = pa.Table.from_pylist(RECORDS)
    for split, rows in (("train", table), ("validation", table.slice(0, 3))):
        (here / "saved" / split).mkdir(parents=True)
        (here / "saved" / split / "dataset_info.json").write_text("{}")
        file = here / "saved" / split / "data-00000-of-00001.arrow"
        with pa.OSFile(str(file), "wb") as sink, pa.ipc.new_stream(sink, rows.schema) as stream:
            stream.write_table(rows)
    with (here / "sums.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, list(RECORDS[0]))
        writer.writeheader()
        writer.writerows(RECORDS)
    (here / "flat").mkdir()
    (here / "flat" / "part-0.json").write_text(json.dumps(RECORDS))
    for source in ("sums.jsonl", "sums.csv", "saved", "flat", "saved:validation"):
        raw = find_raw(source, None)
        assert list(raw.records) == RECORDS[: len(raw.records)], source
        assert bool(raw.validation) == (source == "saved"), source
    with pytest.raises(NotFoundError, match="no files of the split 'test'"):
        find_raw("saved:test", None)


def test_rows_of_verls_layout_keep_their_fields(here: Path) -> None:
    row = PromptRow("math", [{"role": "user", "content": "q"}], "1", extra_info={"level": 3})
    write_rows(here / "rows.parquet", [row] * 4)
    done = run("mine", "--data", "rows.parquet", "--val", "rows.parquet", "--yes", "--json")
    assert done.exit_code == 0, done.output
    (first, *_) = read_rows("mine/val.parquet")
    assert (first.data_source, first.ground_truth, first.extra_info["level"]) == ("math", "1", 3)


def test_columns_and_final_answers_are_found(here: Path) -> None:
    chat = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    (here / "x.json").write_text(json.dumps([{"messages": chat, "x": "so \\boxed{1}"}] * 2))
    raw = find_raw("x.json", None)
    assert raw.suggest_prompt() == "messages"
    assert raw.suggest_answer("messages") == "messages"
    alone = replace(raw, records=[{"x": "so"}])
    assert alone.suggest_answer("messages") == "x"
    options = ["--answer-key", "x", "--reward", "exact", "--json"]
    done = run("mine", "--data", "x.json", "--yes", *options)
    assert done.exit_code == 0, done.output
    (row,) = read_rows("mine/train.parquet")
    asked = 'q End with "Answer:" and the answer alone.'
    assert (row.prompt, row.ground_truth) == ([{"role": "user", "content": asked}], "1")
    assert final_answer("2 + 2 = 4\n#### 4") == "4"
    assert final_answer("so \\boxed{\\frac{1}{2}} and") == "\\frac{1}{2}"
    assert final_answer(" plain ") == "plain"


@pytest.mark.parametrize(
    ("kind", "right", "wrong", "truth"),
    [
        ("exact", "I think so. Answer: Paris.", "Answer: London", "paris"),
        ("number", "3 and 4 make 7.", "7, no, 8", "7"),
        ("math", "\\boxed{0.5}", "\\boxed{2}", "\\frac{1}{2}"),
        ("own", "it is paris", "it is not", "Paris"),
    ],
)
def test_each_stub_scores(here: Path, kind: str, right: str, wrong: str, truth: str) -> None:
    (here / "reward.py").write_text(reward_source(kind))
    score: Any = import_file(here / "reward.py", "reward").compute_score
    results = [score("d", text, truth, extra_info={})["score"] for text in (right, wrong)]
    assert results == [1.0, 0.0]


def on_a_terminal(typed: str, *words: str) -> tuple[int, str]:
    """Call `rlctl` in this process on a pseudo-terminal; return the exit code and the output."""
    ours, theirs = os.openpty()
    settings = termios.tcgetattr(theirs)
    settings[3] &= ~termios.ECHO
    termios.tcsetattr(theirs, termios.TCSANOW, settings)
    os.write(ours, typed.encode())
    shown: list[bytes] = []

    def read() -> None:
        with suppress(OSError):  # the other end is closed
            while True:
                shown.append(os.read(ours, 1024))

    reader = threading.Thread(target=read)
    reader.start()
    with os.fdopen(theirs, "r+b", buffering=0) as file, pytest.MonkeyPatch.context() as patch:
        for name in ("stdin", "stdout", "stderr"):
            patch.setattr(sys, name, io.TextIOWrapper(file, encoding="utf-8", write_through=True))
        for console in (stdout, stderr):
            console.cache_clear()
        code = main(words)
        for stream in (sys.stdin, sys.stdout, sys.stderr):
            stream.detach()
    for console in (stdout, stderr):
        console.cache_clear()
    reader.join()
    os.close(ours)
    return code, b"".join(shown).decode()


def test_questions_are_asked_on_a_terminal() -> None:
    """Answer all questions, two of them wrongly first."""
    answers = ("nothing.csv", "sums.jsonl", "2", "", "exact", "", "0", "", "y")
    code, shown = on_a_terminal("\n".join((*answers, "")), "new", "--no-try")
    assert code == 0, shown
    for expected in (
        "Data: ",
        "does not exist",
        "Data: ",
        r"3 +answer",
        r"prompts \[Question\]: ",
        r"answers \[answer\]: ",
        r"Rewarded: .*\[number\]: ",
        r"Model: .*\[quickstart\]: ",
        r"GPUs.*\[1\]: ",
        "no number of devices",
        r"GPUs.*\[1\]: ",
        r"How much is 0 \+ 1\? End with",
        r"to sums\? \[Y/n\]: ",
        "start +rlctl train grpo --recipe sums/sums.yaml",
    ):
        found = re.search(expected, shown)
        assert found is not None, (expected, shown)
        shown = shown[found.end() :]


def test_images_of_records_are_in_the_project(here: Path) -> None:
    (here / "a.png").write_bytes(pattern(16, 16))
    records = [{"q": f"What is it? {number}", "a": "red", "image": "a.png"} for number in range(20)]
    (here / "seen.jsonl").write_text("\n".join(map(json.dumps, records)))
    columns = ("--prompt-key", "q", "--answer-key", "a")
    done = run("mine", "--data", "seen.jsonl", "--yes", *columns)
    assert done.exit_code == 0, done.output
    assert compose("mine/mine.yaml", []).config.actor_rollout_ref.model.path == VISION
    (row, *_) = read_rows("mine/train.parquet")
    assert row.images == (pattern(16, 16),)
    assert row.prompt[0]["content"].startswith("<image>What is it? 0")
    assert "image" not in row.extra_info


def test_the_current_folder_gives_its_name(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (here / "sub").mkdir()
    monkeypatch.chdir(here / "sub")
    done = run(".", "--data", "../sums.jsonl", "--yes", "--json")
    assert done.exit_code == 0, done.output
    assert compose("sub.yaml", []).config.trainer.project_name == "sub"


def test_the_command_quotes_the_name_of_the_folder() -> None:
    done = run("my sums", "--data", "sums.jsonl", "--yes")
    assert done.exit_code == 0, done.output
    command = "rlctl train grpo --recipe 'my sums/my sums.yaml'"
    assert f"start      {command}" in done.stdout
    assert f"# Start: {command}\n" in Path("my sums/my sums.yaml").read_text(encoding="utf-8")


def test_a_table_of_excel_makes_a_project(here: Path) -> None:
    lines = ["Frage;Antwort;Quelle"]
    lines += [f"Größe von {number} + 1?;{number + 1};Heft" for number in range(60)]
    lines[11:13] = ["Ohne Antwort?;;Heft", ";7;Heft"]
    (here / "aufgaben.csv").write_bytes("\r\n".join([*lines, ";;", ""]).encode("cp1252"))
    done = run("x", "--data", "aufgaben.csv", "--yes", "--json")
    assert done.exit_code == 0, done.output
    rows = [*read_rows("x/train.parquet"), *read_rows("x/val.parquet")]
    assert len(rows) == 58
    assert rows[0].prompt[0]["content"] == "Größe von 0 + 1?"
    lines[1:40] = ["Ohne Antwort?;;Heft"] * 39
    (here / "leer.csv").write_text("\n".join(lines))
    wrong = error("y", "--data", "leer.csv", "--yes").problems[0]
    assert (wrong.message, wrong.where) == ("'Antwort' is null", "leer.csv:2 and 38 more records")
    assert not (here / "y").exists()


@pytest.mark.parametrize(
    ("rows", "devices", "expected"),
    [
        (1, 1, (1, 50, 5)),
        (2, 1, (2, 50, 5)),
        (36, 1, (8, 52, 5)),
        (255, 1, (32, 56, 5)),
        (255, 3, (30, 56, 5)),
        (255, 64, (128, 50, 5)),
        (9_000, 1, (128, 70, 7)),
        (1_000_000, 8, (128, 100, 10)),
    ],
)
def test_the_schedule_is_long_enough_to_learn(
    rows: int, devices: int, expected: tuple[int, int, int]
) -> None:
    schedule = Schedule.of_rows(rows, devices)
    assert (schedule.batch, schedule.steps, schedule.every) == expected


def test_the_model_is_tried_before_training() -> None:
    done = run("mine", "--data", "sums.jsonl", "--yes", "--json", trial="--try")
    assert done.exit_code == 0, done.output
    trial = json.loads(done.stdout)["trial"]
    assert (trial["rows"], trial["responses"], trial["skipped"]) == (4, 16, None)
    assert f"16 responses to 4 rows score {trial['mean_score']:.3g} on average" in done.stderr
    hopeless = "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
    Path("mine/reward.py").write_text(f"{hopeless}    return 0.0\n", encoding="utf-8")
    trial = run_trial(Path("mine/mine.yaml"))
    assert (trial.mean_score, trial.rows_with_score) == (0.0, 0)


def test_equal_scores_long_responses_and_failures_are_reported(
    capsys: pytest.CaptureFixture[str],
) -> None:
    sample = Sample("q", "so\n so", "7", 0.0, {}, 9, "length", "sums", failed=True)
    trial = model_trial.report([sample] * 8, 9)
    assert (trial.rows, trial.rows_with_score, trial.truncated) == (2, 0, 8)
    shown = capsys.readouterr().err
    assert "all of them score 0, and from equal scores nothing is learned" in shown
    assert "The first response is 'so so', the right answer '7'" in shown
    assert "8 of 8 responses were cut off at 9 tokens: data.max_response_length" in shown
    assert "the reward function failed on 8 of 8 responses" in shown
    model_trial.report([sample, replace(sample, score=1.0, finish="stop", failed=False)] * 4, 9)
    shown = capsys.readouterr().err
    assert "score 0.5 on average, 2 of 2 rows have one above 0" in shown
    assert "warning" not in shown.replace("the reward function failed", "")[:40]


def test_a_trial_that_cannot_be_made_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("mine", "--data", "sums.jsonl", "--yes").exit_code == 0
    recipe = Path("mine/mine.yaml")

    def endless(config: Any) -> Any:
        while True:
            time.sleep(0.01)

    with monkeypatch.context() as patch:
        patch.setattr(model_trial, "LIMIT_S", 1)
        patch.setattr(evaluate_module, "evaluate", endless)
        assert run_trial(recipe).skipped == "it took more than 1 s"
    with monkeypatch.context() as patch:
        patch.setattr(model_trial, "MAX_BYTES", 1)
        assert "too slow on a CPU" in (run_trial(recipe).skipped or "")
    recipe.write_text(
        recipe.read_text(encoding="utf-8").replace('path: "quickstart"', 'path: "no/model"'),
        encoding="utf-8",
    )
    assert run_trial(recipe).skipped == "no/model is not on this machine"
    assert "note: not tried: no/model is not on this machine\n" in capsys.readouterr().err


def test_columns_of_any_name_have_a_default_on_a_terminal(here: Path) -> None:
    records = [
        {"note": "x", "satz": f"Wie viel ist {number} plus 1?", "zahl": number + 1}
        for number in range(20)
    ]
    (here / "odd.jsonl").write_text("\n".join(map(json.dumps, records)))
    code, shown = on_a_terminal("\n\n\n\n\nn\n", "new", "--data", "odd.jsonl", "--no-try")
    assert code == 1
    assert "Column of the prompts [satz]: " in shown
    assert "Column of the right answers [zahl]: " in shown
    assert shown.count("kind") == 1
    assert "missing options: --prompt-key" in str(error("--data", "odd.jsonl", "--yes"))
