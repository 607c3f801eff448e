"""Digests of metrics: equal to those of the rows, and extended by what a file has gained."""

import dataclasses
import json
import random
from pathlib import Path

import pytest

from rlctl.monitoring.run_summary import RunSummary
from rlctl.runs import metrics_digest as digesting
from rlctl.runs.digests import METRICS, SERIES
from rlctl.runs.index import Index
from rlctl.runs.metrics_digest import metrics_digest
from rlctl.tracking import metric_table
from rlctl.tracking.jsonl import read_metrics

ACC = "val-core/x/acc/mean@1"


def rows(first: int, end: int) -> list[dict[str, float | None]]:
    generator = random.Random(first)
    return [
        {"step": step, "loss": generator.random(), "timing_s/step": 2.0}
        | ({"perf/total_num_tokens": 100 + step} if step % 2 else {"rare": None})
        | ({ACC: generator.choice([0.25, 0.5])} if step % 3 == 0 else {})
        for step in range(first, end)
    ]


def append(path: Path, what: list[dict[str, float | None]]) -> None:
    with path.open("a") as file:
        file.write("".join(json.dumps(row) + "\n" for row in what))


@pytest.mark.parametrize("chunk", [1, 4, 4096])
def test_digest_equals_that_of_the_rows(tmp_path: Path, monkeypatch, chunk: int) -> None:
    monkeypatch.setattr(metric_table, "_ROWS", chunk)
    path = tmp_path / "metrics.jsonl"
    append(path, rows(1, 20))
    digest = metrics_digest(path)
    assert digest["summary"] == dataclasses.asdict(RunSummary.from_rows(read_metrics(path)))
    losses = [row["loss"] for row in read_metrics(path)]
    assert dict(zip(SERIES, digest["series"]["loss"], strict=True)) == {
        "first": losses[0],
        "last": losses[-1],
        "min": min(losses),
        "max": max(losses),
        "count": 19,
    }
    assert "rare" not in digest["series"]


def test_growth_reads_only_the_new_rows(tmp_path: Path, monkeypatch) -> None:
    path = tmp_path / "metrics.jsonl"
    append(path, rows(0, 10))
    with path.open("a") as file:
        file.write('{"step": 10, "lo')
    earlier = json.loads(json.dumps(metrics_digest(path)))
    path.write_text(path.read_text().rpartition("\n")[0] + "\nbroken\n")  # the same inode
    append(path, rows(10, 20))
    read: list[int] = []
    grown = metrics_digest(path, earlier, lambda table: read.extend(table.steps.tolist()))
    assert read == list(range(10, 20))
    assert grown == metrics_digest(path)
    assert grown["problem"] == f"skipped a broken line at {path}:11"


@pytest.mark.parametrize("change", ["rewound", "shortened", "rewritten", "missing"])
def test_other_changes_read_the_file_again(tmp_path: Path, change: str) -> None:
    path = tmp_path / "metrics.jsonl"
    append(path, rows(0, 10))
    earlier = metrics_digest(path)
    if change == "rewound":  # a new file, as a resumed run writes it
        aside = tmp_path / "aside"
        append(aside, rows(0, 5))
        aside.replace(path)
        append(path, rows(5, 30))
    elif change == "shortened":
        path.write_text("".join(path.read_text().splitlines(keepends=True)[:4]))
    elif change == "rewritten":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows(100, 130)))
    else:
        path.unlink()
    assert metrics_digest(path, earlier) == metrics_digest(path)


def test_index_extends_the_digest_of_a_live_run(tmp_path: Path, monkeypatch) -> None:
    path = tmp_path / "p" / "r" / "metrics.jsonl"
    path.parent.mkdir(parents=True)
    starts: list[int] = []
    read = digesting.metric_tables

    def spy(path, on_broken, position):
        starts.append(position.line)
        return read(path, on_broken, position)

    monkeypatch.setattr(digesting, "metric_tables", spy)
    for end in (5, 8, 8, 9):
        append(path, rows(len(path.read_text().splitlines()) if path.exists() else 0, end))
        found = Index(tmp_path).read(METRICS, {"p/r": str(path.parent)})["p/r"]
        assert found["summary"]["step"] == end - 1
    assert starts == [0, 5, 8]
    assert found == metrics_digest(path)
