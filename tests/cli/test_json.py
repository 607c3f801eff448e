"""`--json`: every command has it, its documents keep their schema, and errors are JSON, too."""

from __future__ import annotations

import json
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from jsonschema import Draft202012Validator as Validator

from rlctl.cli import LazyCommand, all_commands
from rlctl.cli.json_errors import JSON_VERSION
from tests.cli.json_schemas import ERROR, EXAMPLES, SAME, SCHEMAS, WITHOUT
from tests.e2e.command import rlctl as trained
from tests.recorded import called
from tests.settings import given

SHORT = given(batch=8, mini_batch=8, val_rows=4, response=8, steps=1, validate=1, threads=1)


def commands(path: str, command: Any) -> Iterator[tuple[str, Any]]:
    """Yield the path of each command that can be called, and the command."""
    loaded = command.load() if isinstance(command, LazyCommand) else command
    names = loaded.list_commands(None) if hasattr(loaded, "list_commands") else []
    if not names or loaded.invoke_without_command:
        yield path, loaded
    for name in names:
        yield from commands(f"{path} {name}", loaded.get_command(None, name))


EVERY = dict(pair for command in all_commands() for pair in commands(command.name or "", command))


def test_every_command_has_json_and_a_schema() -> None:
    for path, command in EVERY.items():
        options = {option for parameter in command.params for option in parameter.opts}
        has_schema = path in SCHEMAS or path.partition(" ")[0] in SAME
        assert ("--json" in options) == (path not in WITHOUT), path
        assert has_schema == (path not in WITHOUT), f"rlctl {path} --json has no schema"
    assert not SCHEMAS.keys() - EVERY.keys()
    assert not WITHOUT.keys() - EVERY.keys()


def test_no_line_of_an_example_breaks_in_a_terminal_of_80_columns() -> None:
    for path, command in EVERY.items():
        for line in (command.epilog or "").replace("\\[", "[").splitlines():
            assert not line.startswith(" ") or len(line) <= 78, f"rlctl {path} --help: {line}"


@pytest.mark.soak
@pytest.mark.parametrize("path", [path for path in EVERY if path.startswith("sweep ")])
def test_the_dry_run_among_the_examples_of_a_sweep_runs(path: str, tmp_path: Path) -> None:
    examples = EVERY[path].epilog.replace("\\\n", " ").splitlines()
    for example in (line for line in examples if "--dry-run" in line):
        done = called(*shlex.split(example)[1:], cwd=tmp_path)
        assert done.returncode == 0, f"{example}: {done.stderr}"


def test_no_command_swallows_unknown_options() -> None:
    for path, command in EVERY.items():
        settings = command.context_settings
        assert not settings.get("ignore_unknown_options"), path
        assert not settings.get("allow_extra_args"), path


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with two runs and responses."""
    here = tmp_path_factory.mktemp("json")
    words = ("--inline", "--name", "one", "trainer.save_freq=1", *SHORT)
    trained("train", "ppo", *words, cwd=here, process=True)
    runs = here / "runs" / "quickstart"
    shutil.copytree(runs / "one", runs / "two", symlinks=True)
    record = json.loads((runs / "two" / "run.json").read_text())
    (runs / "two" / "run.json").write_text(json.dumps(record | {"name": "two", "id": "two"}))
    response = {"response": "#### 4"}
    (here / "responses.jsonl").write_text("\n".join([json.dumps(response)] * 8))
    return here


def test_documents_match_their_schemas(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    wrong: dict[str, list[str]] = {}
    for path, example in EXAMPLES.items():
        done = called(*path.split(), *shlex.split(example.line), "--json")
        assert (done.returncode == 0) != example.is_error, f"{path}: {done.stderr}"
        document = json.loads(done.stdout)
        schema = ERROR if example.is_error else example.schema
        errors = [error.message for error in Validator(schema).iter_errors(document)]
        if errors:
            wrong[path] = errors[:3]
    assert not wrong


@pytest.mark.parametrize(
    ("line", "code", "exit_code"),
    [
        ("runs --state sleeping", "E-USAGE", 2),
        ("rusn", "E-USAGE", 2),
        ("show nothing", "E-NO-RUN", 4),
        ("recipes show nothing", "E-NOT-FOUND", 4),
        ("train ppo --dry-run trainer.total_epochs=x data.seed=y", "E-WRONG-VALUE", 3),
    ],
)
def test_errors_are_json_with_code_and_exit_status(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str, code: str, exit_code: int
) -> None:
    monkeypatch.chdir(tmp_path)
    plain = called(*shlex.split(line))
    done = called(*shlex.split(line), "--json")
    assert (plain.stdout, plain.returncode, done.returncode) == ("", exit_code, exit_code)
    document = json.loads(done.stdout)
    jsonschema.validate(document, ERROR)
    assert document["json"] == JSON_VERSION
    assert (document["error"]["code"], document["error"]["exit"]) == (code, exit_code)
    assert document["error"]["message"] in done.stderr
    assert ("ok" in document) == ("--dry-run" in line)
    assert len(document["problems"]) == 1 + ("data.seed" in line)
    assert called(*shlex.split(line), "--", "--json").stdout == ""


@pytest.mark.plugin("console")
def test_an_unknown_option_of_tag_is_an_error(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    for words in (["--jsn"], ["x", "--draft"], ["-x"]):
        done = called("runs", "tag", "one", *words)
        assert (done.returncode, done.stdout) == (2, "")
        assert "no such option" in done.stderr
    assert json.loads(called("runs", "tag", "one", "x", "--json").stdout)["tags"][-1] == "x"
