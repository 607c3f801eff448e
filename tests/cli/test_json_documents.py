"""`--json` of commands that need a running run, a copy, a sweep or another library's script."""

from __future__ import annotations

import asyncio
import io
import json
import os
import shlex
import shutil
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any
from urllib.request import HTTPCookieProcessor, build_opener

import jsonschema
import pytest

from rlctl.data_prep.rows import PromptRow, write_rows
from rlctl.process import DriverProcess
from rlctl.runs.run_dir import RunDir
from rlctl.sweeps.sweep_record import Outcome, SweepDir, SweepRecord, Trial, TrialTable
from tests.cli.json_schemas import ERROR, EXAMPLES
from tests.cli.test_engines import ENGINES, PoolStatus, Stage
from tests.plugin_folders import can_run, folder_of_command, marks_of
from tests.recorded import called, exportable

_VERL = (
    "python3 -m verl.trainer.main_ppo data.seed=3 data.nope=1 "
    "critic.model.fsdp_config.param_offload=True\n"
)


def document(line: str, code: int = 0) -> Any:
    """Return the JSON that a command line prints."""
    done = called(*shlex.split(line), "--json")
    assert done.returncode == code, done.stderr
    return json.loads(done.stdout)


def engines_list(here: Path) -> Any:
    """Two engines of a running run, one of which has no speed yet."""
    PoolStatus(ENGINES, []).write(RunDir.create(here / "runs", "p", "r", "ppo").attempt)
    return document("engines list r")


def engines_add(here: Path) -> Any:
    """A request that the run has done."""
    return _changed(here, "engines add r")


def engines_drain(here: Path) -> Any:
    """A request that the run has done."""
    return _changed(here, "engines drain r 2")


def _changed(here: Path, line: str) -> Any:
    run = RunDir.create(here / "runs", "p", "r", "ppo")
    PoolStatus(ENGINES, []).write(run.attempt)
    end = Stage(run).reply("done", "it is done")
    try:
        done = document(line)
    finally:
        end()
    assert done == {"run": "r", "done": True, "message": "it is done"}
    late = document(f"{line} --timeout 0")
    assert late == {"run": "r", "done": False, "message": None}
    return done


def env_test(here: Path) -> Any:
    """An episode of two turns."""
    (here / "moves.txt").write_text("right\ndown\n")
    return document("env test gridworld --scripted moves.txt")


def import_verl(here: Path) -> Any:
    """A script with one setting that is refused."""
    (here / "verl.sh").write_text(_VERL)
    done = called("import", "verl", "verl.sh", "--json")
    assert done.returncode == 3
    found = json.loads(done.stdout)
    assert "seed: 3" in found["recipe"]
    jsonschema.validate(found, ERROR)  # of the refused setting, in the same document
    return found


def sweep_best(here: Path) -> Any:
    """The better one of two trials."""
    made_sweep(here)
    found = document("sweep best s")
    assert (found["number"], found["overrides"], found["value"]) == (1, ["data.seed=2"], 0.5)
    return found


def made_sweep(here: Path) -> SweepDir:
    """Return a sweep with two finished trials, of which the second is better."""
    process = DriverProcess.current()
    settings = {"seeds": 1, "mode": "max"}
    record = SweepRecord(
        name="s",
        project="p",
        verb="ppo",
        recipe="ppo",
        base="ppo_trainer",
        fixed=[],
        axes=["data.seed=1,2"],
        settings=settings,
        config_sha256="0",
        total_steps=1,
        first_seed=1,
        command=[],
        cwd=str(here),
        created="2026-01-01T00:00:00+00:00",
        process=process,
    )
    sweep = SweepDir.create(here / "runs", record)
    values = enumerate((0.25, 0.5))
    outcomes = [
        Outcome(Trial(number, [f"data.seed={number + 1}"]), "finished", value, {1: value})
        for number, value in values
    ]
    sweep.write_table(TrialTable(outcomes, {}))
    return sweep


def logs(here: Path) -> Any:
    """One line of each of two processes: a document per line."""
    run = RunDir.create(here / "runs", "p", "r", "ppo")
    (run.attempt / "main-0.log").write_text("first ä\n")
    (run.attempt / "main-1.log").write_text("second\n")
    done = called("logs", "r", "--json")
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert lines == [
        {"process": "main-0", "line": "first ä"},
        {"process": "main-1", "line": "second"},
    ]
    return lines[0]


def debug(here: Path) -> Any:
    """The processes of a run that this process drives."""
    RunDir.create(here / "runs", "p", "r", "ppo")
    found = document("debug r")
    assert found[0]["pid"] == os.getpid()
    return found


def board(here: Path) -> Any:
    """The line of a board that listens: its address with the token answers."""
    from rlctl.plugins.console.board.serve import Listening, serve

    out = io.StringIO()

    async def line() -> Any:
        listening = Listening("127.0.0.1", 0, "t" * 40, read_only=True)
        serving = asyncio.create_task(serve(here, listening, open_page=False, as_json=True))
        while not out.getvalue() and not serving.done():
            await asyncio.sleep(0.01)
        found = json.loads(out.getvalue())
        browser = build_opener(HTTPCookieProcessor())
        page = await asyncio.to_thread(browser.open, found["url"])
        assert page.status == 200
        serving.cancel()
        return found

    with redirect_stdout(out):
        return asyncio.run(line())


def runs_pull(here: Path) -> Any:
    """A copy of a run with a checkpoint."""
    run = exportable(here / "made").path
    shutil.copytree(run, here / "copies" / "p" / "r")
    found = document(f"runs pull file://{here}/copies/p/r")
    assert (Path(found["path"]) / "run.json").is_file()
    return found


DOCUMENTS: list[Callable[[Path], Any]] = [
    engines_list,
    engines_add,
    engines_drain,
    env_test,
    import_verl,
    sweep_best,
    logs,
    debug,
    board,
    runs_pull,
]


def path_of(make: Callable[[Path], Any]) -> str:
    """Return the path of the command of a function above."""
    return make.__name__.replace("_", " ")


CASES = [pytest.param(make, marks=marks_of(folder_of_command(path_of(make)))) for make in DOCUMENTS]


@pytest.mark.parametrize("make", CASES, ids=path_of)
def test_a_document_matches_its_schema(
    make: Callable[[Path], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("XDG_STATE_HOME", "XDG_CONFIG_HOME"):
        monkeypatch.setenv(name, str(tmp_path / name))
    jsonschema.validate(make(tmp_path), EXAMPLES[path_of(make)].schema)


def test_each_command_has_a_document_here_or_there() -> None:
    failing = {path for path, example in EXAMPLES.items() if example.is_error}
    assert failing == {path for path in map(path_of, DOCUMENTS) if can_run(path)}


_BROKEN = (
    "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n    1 / 0\n"
)


def test_a_document_and_an_error_are_one_document(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_rows("rows.parquet", [PromptRow("s", [{"role": "user", "content": "a"}], "1")])
    (tmp_path / "answers.jsonl").write_text('{"response": "1"}\n')
    (tmp_path / "score.py").write_text(_BROKEN)
    found = document(
        "reward test --reward score.py:compute_score --data rows.parquet --responses answers.jsonl",
        1,
    )
    jsonschema.validate(found, EXAMPLES["reward test"].schema)
    jsonschema.validate(found, ERROR)
    assert "ZeroDivisionError" in found["error"]["message"]
    found = document("explain E-OOM nothing-of-this-name", 4)
    jsonschema.validate(found, ERROR)


def test_prep_counts_invalid_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "q.jsonl").write_text(
        '{"q": "a", "a": "1"}\n{"q": "", "a": "2"}\n{"q": "c", "a": "3"}\n'
    )
    pair = {"prompt": "a", "chosen": "b", "rejected": "c"}
    (tmp_path / "p.jsonl").write_text(
        json.dumps(pair) + "\n" + json.dumps({**pair, "chosen": None})
    )
    for line in (
        "prep jsonl q.jsonl --prompt-key q --answer-key a --out q --val-fraction 0.5",
        "prep preferences p.jsonl --out p",
    ):
        found = document(f"{line} --skip-invalid")
        jsonschema.validate(found, EXAMPLES["prep arithmetic"].schema)
        assert sum(split["num_skipped"] for split in found.values()) == 1
        plain = called(*shlex.split(line), "--skip-invalid")
        assert plain.stderr.count("1 invalid record left out") == 1
