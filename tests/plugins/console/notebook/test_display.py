"""Text and HTML of runs, comparisons, sweeps and progress in notebooks."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from types import ModuleType
from typing import Any

import pyarrow as pa
import pytest
import yaml

import rlctl
from rlctl.plugins.console.notebook.progress import NotebookTracker
from rlctl.runs.run import Run, read_run
from rlctl.runs.run_dir import RunDir
from rlctl.sweeps.results import results
from rlctl.tracking.alarms import Alarm
from rlctl.tracking.tracker import RunInfo
from tests.recorded import record
from tests.sweeps.test_selection import sweep

EVIL = "<script>alert(1)</script>"
ACC = "val-core/x/acc/mean@1"


class Tags(HTMLParser):
    """Tags and text of a document; its tags are closed in order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.open: list[str] = []
        self.text = ""
        self.feed(text)
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        del attrs
        self.tags.append(tag)
        self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        del attrs
        self.tags.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return written(tmp_path, "first", 0.5)


def written(root: Path, name: str, accuracy: float) -> Run:
    made = RunDir.create(root, "p", name, "ppo")
    made.write_config(yaml.safe_dump({"trainer": {"note": f"{EVIL} {name}"}}), {})
    rows = {step: {"critic/score/mean": step / 9} for step in range(1, 9)}
    record(made.path, {**rows, 9: {ACC: accuracy, "critic/score/mean": 1.0}})
    made.event("alarm", name="kl", step=3, message=EVIL, hint="")
    made.finish("failed", 1, rlctl.RlctlError(EVIL))
    return read_run(made.path)


def results_of_the_api(root: Path, run: Run) -> Iterator[Any]:
    yield run
    yield rlctl.compare([run, written(root, "second", 0.7)])
    yield results(sweep(root, "gitter", "ffw"))


def test_results_have_short_text_and_escaped_html(tmp_path: Path, run: Run) -> None:
    assert repr(run) == "<Run p/first: failed>"
    for shown in results_of_the_api(tmp_path, run):
        assert len(repr(shown)) < 100
        page = Tags(shown._repr_html_())
        assert "script" not in page.tags
        assert {"table", "td"} <= set(page.tags)
        assert "svg" in page.tags
    failed = Tags(run._repr_html_())
    assert failed.text.count(EVIL) >= 2, "cause and alarm, as text"
    assert "50.0 % → 50.0 %, best 50.0 % at step 9" in failed.text
    assert "polyline" in failed.tags


def test_what_compose_and_evaluate_return_is_short() -> None:
    assert len(repr(rlctl.compose("ppo"))) < 300


def test_a_run_has_one_colour_in_all_charts(tmp_path: Path, run: Run) -> None:
    other = RunDir.create(tmp_path, "p", "other", "ppo")
    other.write_config("trainer: {}\n", {})
    record(other.path, {1: {"val/loss": 1.0}})
    page = rlctl.compare([read_run(other.path), run])._repr_html_()
    colours = re.findall(r'color:(#\w+)">■ p/(\w+)', page)
    assert set(colours) == {("#e0702f", "first")}, "the first run has no such curve"


def test_a_run_without_anything_has_html(tmp_path: Path) -> None:
    empty = RunDir.create(tmp_path, "p", "empty", "ppo")
    assert "starting" in Tags(read_run(empty.path)._repr_html_()).text
    (empty.path / "run.json").write_text("{")
    assert "broken" in Tags(read_run(empty.path)._repr_html_()).text


def test_metrics_as_arrow_and_pandas(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    table = run.table().to_arrow()
    assert table.schema.field("step").type == pa.int64()
    assert table["step"].to_pylist() == [*range(1, 10)]
    assert table[ACC].to_pylist() == [None] * 8 + [0.5]
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(rlctl.MissingExtraError, match="a data frame needs pandas") as error:
        run.table().to_pandas()
    assert error.value.problems[0].hint == "pip install pandas"


@pytest.mark.extra("lm-eval")  # which brings pandas
def test_a_data_frame_has_the_rows(run: Run) -> None:
    frame = run.table().to_pandas()
    assert list(frame["step"]) == [*range(1, 10)]
    assert frame[ACC].isna().sum() == 8


class Output:
    """Output block of a cell, as IPython's handle of a display."""

    def __init__(self) -> None:
        self.drawn: list[str] = []

    def update(self, html: str) -> None:
        self.drawn.append(html)


def test_progress_is_one_block(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    blocks: list[Output] = []

    def display(html: str, display_id: bool) -> Output:
        assert display_id
        blocks.append(Output())
        blocks[-1].update(html)
        return blocks[-1]

    # IPython's part of a kernel, which is not installed here.
    shell = ModuleType("IPython.display")
    shell.HTML, shell.display = str, display  # pyright: ignore[reportAttributeAccessIssue]
    monkeypatch.setitem(sys.modules, "IPython", ModuleType("IPython"))
    monkeypatch.setitem(sys.modules, "IPython.display", shell)
    monkeypatch.setattr("rlctl.plugins.console.notebook.progress._BETWEEN_S", -1.0)
    tracker = NotebookTracker()
    tracker.phase("building the actor")
    tracker.start(RunInfo("id", "p", f"r{EVIL}", tmp_path, 3, {}))
    for step in (1, 2, 3):
        tracker.phase("gen")
        tracker.log(step, {"critic/score/mean": step / 3, "timing_s/step": 1.0})
    tracker.alarm(Alarm("kl", 3, 1.0, 0.5, EVIL, "", over=False))
    tracker.finish("finished")
    (block,) = blocks
    assert len(block.drawn) > 3
    last = Tags(block.drawn[-1])
    assert "building the actor" in last.text
    assert "step 3/3" in last.text
    assert EVIL in last.text
    assert "script" not in last.tags
    assert "finished" in last.text
    assert capsys.readouterr() == ("", "")
