"""`rlctl runs` and `rlctl show` of runs that the real tracker wrote, also with episodes."""

import json
import re
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pexpect
import pytest

from rlctl.__main__ import main
from rlctl.cli.commands.train import common_settings
from rlctl.cli.options import RUNS_VARIABLE
from rlctl.errors import ConfigError
from rlctl.runs.record import failure_of
from rlctl.runs.run_dir import RunDir
from rlctl.tracking.tracker import Sample
from tests.recorded import called, plain_environment, record
from tests.tracking.test_transcripts import EPISODE, SAMPLE

ACC = "val-core/arithmetic/acc/mean@1"


def sample(text: str, right: bool) -> Sample:
    return Sample(
        "What is 1 + 1?", text, "2", float(right), {"acc": float(right)}, 3, "stop", "arithmetic"
    )


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("work") / "runs"
    failure = failure_of(ConfigError("no column\nis here", hint="add one"))
    for minute, (name, state) in enumerate(
        [("first", "finished"), ("second", "failed"), ("third", "finished")]
    ):
        run = RunDir.create(root, "demo", name, "ppo")
        rows = {0: {ACC: 0.25}, 1: {"critic/score/mean": 0.5, "actor/ppo_kl": float("nan")}}
        samples = {}
        if state == "finished":
            rows[2] = {"critic/score/mean": 1.0, ACC: 0.75, "perf/total_num_tokens": 1234}
            texts = {"#### 2 [bold]": True, "#### 3": False, "\x1b[31m#### 4": False}
            samples = {2: [sample(text, right) for text, right in texts.items()]}
        record(run.path, rows, samples)
        created, ended = f"2026-01-01T10:0{minute}:00+00:00", f"2026-01-01T10:0{minute}:30+00:00"
        run.update(
            state=state,
            exit_code=int(state == "failed"),
            created=created,
            ended=ended,
            seconds=30.0,
            total_steps=2,
            failure=failure if state == "failed" else None,
        )
    (root / "demo" / "third" / "run.json").write_text("{")
    return root


def rlctl(root: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return called(*arguments, cwd=root.parent)


def test_runs_prints_one_line_per_run_and_warns_of_damaged_records(root):
    done = rlctl(root, "runs")
    assert done.returncode == 0
    lines = [line.split("  ") for line in done.stdout.splitlines()]
    cells = [[cell.strip() for cell in line if cell.strip()] for line in lines]
    assert cells[0] == ["run", "state", "created", "took", "step", "validation"]
    assert cells[1][:2] == ["third", "broken"]
    assert [[line[0], line[1], *line[3:]] for line in cells[2:]] == [
        ["second", "failed E-CONFIG", "30.0 s", "1/2", "25.0 % → 25.0 %"],
        ["first", "finished", "30.0 s", "2/2", "25.0 % → 75.0 %"],
    ]
    assert done.stderr.startswith("warning: demo/third: not a run record")


def test_runs_json_limit_and_state(root):
    everything = json.loads(rlctl(root, "runs", "--json").stdout)
    assert [run["name"] for run in everything] == ["third", "second", "first"]
    expected = {"state": "finished", "exit_code": 0, "recipe": "ppo", "problem": None}
    expected |= {"created": "2026-01-01T10:00:00+00:00", "ended": "2026-01-01T10:00:30+00:00"}
    expected |= {"step": 2, "total_steps": 2, "tokens": 1234, "metric": ACC}
    expected |= {"first": 0.25, "last": 0.75, "best": 0.75, "best_step": 2}
    assert {name: everything[2][name] for name in expected} == expected
    assert everything[0]["problem"].startswith("not a run record")
    assert [
        run["name"] for run in json.loads(rlctl(root, "runs", "--json", "--state", "failed").stdout)
    ] == ["second"]
    limited = rlctl(root, "runs", "-n", "1")
    assert len(limited.stdout.splitlines()) == 2
    assert "2 more; --all shows them" in limited.stderr
    assert len(rlctl(root, "runs", "-n", "1", "--all").stdout.splitlines()) == 4


def test_a_failed_run_shows_its_cause(root):
    text = re.sub(r" +", " ", rlctl(root, "show", "second").stdout)
    assert "failure no column is here (E-CONFIG)" in text
    assert "help add one" in text
    (only,) = json.loads(rlctl(root, "runs", "--where", "failure != null", "--json").stdout)
    assert only["failure"] == {
        "code": "E-CONFIG",
        "message": "no column is here",
        "hint": "add one",
    }


def test_show(root):
    done = rlctl(root, "show", "fir")
    assert (done.returncode, done.stderr) == (0, "")
    text = done.stdout
    assert text.splitlines()[0] == "first  finished"
    assert f"25.0 % → 75.0 %, best 75.0 % at step 2  ({ACC})" in text
    assert "30.0 s, 1.23k tokens" in text
    assert "critic/score/mean" in text
    assert "▁█" in text
    full = json.loads(rlctl(root, "show", "first", "--json").stdout)
    assert full["metrics"]["critic/score/mean"] == {
        "first": 0.5,
        "last": 1.0,
        "min": 0.5,
        "max": 1.0,
        "count": 2,
    }
    assert full["record"]["recipe"] == "ppo"


def test_piped_tables_are_not_wrapped_or_padded(root):
    RunDir(root / "demo" / "first").update(command=["rlctl", "train", "ppo", "x" * 500])
    lines = rlctl(root, "show", "first").stdout.splitlines()
    assert max(map(len, lines)) > 500
    assert [line for line in lines if line != line.rstrip()] == []


@pytest.mark.parametrize(("changes", "colours"), [({}, True), ({"NO_COLOR": "1"}, False)])
def test_samples_go_through_a_pager_on_a_terminal(root, changes, colours):
    terminal = {"PAGER": "sed s/^/paged:/", "TERM": "xterm-256color", "LESS": ""}
    arguments = ["-m", "rlctl", "show", "first", "--grep", "bold"]
    child = pexpect.spawn(
        sys.executable,
        arguments,
        cwd=str(root.parent),
        env=plain_environment(**terminal, **changes),
        encoding="utf-8",
        dimensions=(9, 80),
        timeout=600,
    )
    child.expect(pexpect.EOF)
    seen = child.before or ""
    assert "paged:" in seen
    assert "#### 2" in seen
    assert ("\x1b[30;43mbold" in seen) == colours  # matches are highlighted
    assert ("\x1b[1;32mright" in seen) == colours


def test_show_prints_alarms(root):
    RunDir(root / "demo" / "second").event(
        "alarm",
        step=7,
        name="kl",
        message="KL runaway: 3 a token",
        hint="less",
        value=3.0,
        limit=0.5,
    )
    assert "alarm    step 7 on: KL runaway: 3 a token" in re.sub(
        r" {2,}", "    ", rlctl(root, "show", "second").stdout
    )
    shown = json.loads(rlctl(root, "show", "second", "--json").stdout)["alarms"]
    assert [(alarm["name"], alarm["step"], alarm["over"]) for alarm in shown] == [("kl", 7, None)]


def test_show_of_a_damaged_run_prints_the_readable_part(root):
    done = rlctl(root, "show", "third")
    assert done.returncode == 0
    assert "third  broken" in done.stdout
    assert "75.0 %" in done.stdout
    assert "not a run record" in done.stderr


def test_show_of_missing_runs_and_samples(root):
    done = rlctl(root, "show", "frist")
    assert (done.returncode, done.stdout) == (4, "")
    assert done.stderr.splitlines()[0] == "error: no run is named 'frist'"
    assert done.stderr.splitlines()[2] == "  help: did you mean first?"
    assert rlctl(root, "show", "second", "--samples").returncode == 4


def test_samples(root):
    done = rlctl(root, "show", "first", "--samples")
    assert done.returncode == 0
    assert [line.split()[0] for line in done.stdout.splitlines() if " tokens " in line] == [
        "right",
        "wrong",
        "wrong",
    ]
    assert "response: #### 2 [bold]" in done.stdout  # a model's text is not parsed as markup
    assert "response: \\x1b[31m#### 4" in done.stdout  # nor sent to the terminal as control codes
    assert done.stderr == "note: 3 of 3 samples of step 2\n"
    wrong = json.loads(rlctl(root, "show", "first", "--wrong", "--step", "2", "--json").stdout)
    assert [sample["score"] for sample in wrong["samples"]] == [0.0, 0.0]
    assert rlctl(root, "show", "first", "--right", "-n", "1").stdout.count("prompt: ") == 1
    found = rlctl(root, "show", "first", "--grep", "[BOLD]")
    assert (found.stdout.count("prompt: "), found.stderr) == (1, "note: 1 of 1 samples of step 2\n")
    limited = rlctl(root, "show", "first", "--grep", "####", "-n", "2", "--json").stdout
    assert len(json.loads(limited)["samples"]) == 2
    missing = rlctl(root, "show", "first", "--grep", "zzz").stderr
    assert missing == "note: no sample of step 2 matches\n"
    assert rlctl(root, "show", "first", "--right", "--wrong").returncode == 2


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["data.seed=1"], ["data.seed=1", 'trainer.run_dir="/a b/runs"']),
        (["trainer.run_dir=here"], ["trainer.run_dir=here"]),
        (None, ['trainer.run_dir="/a b/runs"']),
    ],
)
def test_new_runs_are_where_the_other_commands_look(
    overrides: list[str] | None, expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(RUNS_VARIABLE, "/a b/runs")
    assert common_settings(overrides, "x") == [*expected, 'trainer.experiment_name="x"']


METRICS = ("agent/turns/mean", "agent/outcome/done", "tool/calculator/errors")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    run = RunDir.create(tmp_path / "runs", "p", "r", "grpo")
    samples = [replace(SAMPLE, episode=EPISODE), SAMPLE]
    record(run.path, {1: dict.fromkeys(METRICS, 0.5)}, {1: samples})
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RLCTL_RUNS", raising=False)
    return tmp_path


@pytest.mark.usefixtures("folder")
def test_episodes_are_printed_turn_by_turn(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", "r", "--samples"]) == 0
    first, second = capsys.readouterr().out.strip().split("\n\n")
    assert first.splitlines() == [
        "right  score 0.5  acc 1  12 tokens  stop  x",
        "prompt: p",
        "assistant  trained, 7 tokens, reward 0.5, 0.25 s",
        "12 * 12?",
        "tool calculator  0.125 s",
        "144",
        "assistant  trained, 5 tokens, 0.5 s",
        "#### 144",
        "outcome: timeout, 2 turns, calculator 2× (1 timeout), call 1× (1 malformed), 1.5 s",
        "error: the episode took longer than 1 s",
        "truth: t",
    ]
    assert second.splitlines()[1:] == ["prompt: p", "response: r", "truth: t"]


@pytest.mark.usefixtures("folder")
def test_json_and_search_have_the_episode(capsys: pytest.CaptureFixture[str]) -> None:
    for sought in ("LONGER THAN", "144"):
        assert main(["show", "r", "--grep", sought, "--json"]) == 0
        [shown] = json.loads(capsys.readouterr().out)["samples"]
        assert shown["episode"] == json.loads(json.dumps(asdict(EPISODE)))


@pytest.mark.usefixtures("folder")
def test_show_has_the_metrics_of_agents(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", "r"]) == 0
    out = capsys.readouterr().out
    for name in METRICS:
        assert name in out
