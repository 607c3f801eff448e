"""The registry's index, selections, comparison, labels and trash, on folders as runs leave them."""

import json
import os
import shutil
import sqlite3
import subprocess
import sys
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from rlctl.__main__ import main
from rlctl.cli.commands.compare import print_comparison
from rlctl.errors import ConflictError, NotFoundError, UsageError
from rlctl.runs import digests, trash
from rlctl.runs.compare import compare
from rlctl.runs.index import INDEX_FILE
from rlctl.runs.labels import Labels, change_tags, read_labels, set_note
from rlctl.runs.listing import RunQuery
from rlctl.runs.query_values import where
from rlctl.runs.run_dir import RunDir
from rlctl.runs.store import RunStore
from tests.forks import Forked
from tests.recorded import plain_environment

ACC = "val-core/x/acc/mean@1"


def make(root: Path, name: str, minute: int, lr: float, accuracies: list[float]) -> RunDir:
    run = RunDir.create(root, "p", name, "ppo")
    rows = [
        {"step": step, ACC: value, "critic/score/mean": value / 2}
        for step, value in enumerate(accuracies)
    ]
    run.metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (run.path / "config.yaml").write_text(
        f"actor:\n  lr: {lr}\ntrainer:\n  seed: 1\n  note: null\n"
    )
    run.update(created=f"2026-01-01T10:{minute:02d}:00+00:00", state="finished")
    return run


@pytest.fixture
def root(tmp_path: Path) -> Path:
    make(tmp_path, "a", 1, 1e-3, [0.1, 0.9, 0.5])
    make(tmp_path, "b", 2, 1e-4, [0.1, 0.2, 0.6, 0.7])
    make(tmp_path, "c", 3, 1e-4, [])
    return tmp_path


def names(store: RunStore, expression: str) -> list[str]:
    return [run.name for run in where(store.index, store.runs(), expression)]


def test_where_over_fields_metrics_and_settings(root):
    store = RunStore(root)
    assert names(store, f"{ACC} > 0.4") == ["b", "a"]
    assert names(store, f"best({ACC}) >= 0.9 and first({ACC}) == 0.1") == ["a"]
    assert names(store, "actor.lr < 1e-3") == ["c", "b"]
    assert names(store, "step == null") == ["c"]
    assert names(store, "trainer.note == null and best_step == 1") == ["a"]
    with pytest.raises(UsageError, match="no run has a metric 'val-core/x/acc/mean@2'") as caught:
        names(store, "state == 'finished' and val-core/x/acc/mean@2 > 1")
    assert "val-core/x/acc/mean@1" in (caught.value.problems[0].hint or "")
    with pytest.raises(UsageError, match="no run has a field or key 'seed'") as caught:
        names(store, "seed == 1")
    assert caught.value.problems[0].hint == "did you mean trainer.seed?"


def test_order_columns_and_the_best(root):
    page = RunQuery(None, None, f"-best({ACC})", f"+actor.lr,{ACC}", 2).page(RunStore(root))
    assert [run.name for run in page.runs] == ["a", "b"]
    assert page.columns == [{"actor.lr": 1e-3, ACC: 0.5}, {"actor.lr": 1e-4, ACC: 0.7}]
    assert (page.hidden, page.total, page.default_columns) == (1, 3, True)
    assert [
        run.name for run in RunQuery(None, None, ACC, None, None).page(RunStore(root)).runs
    ] == [
        "a",
        "b",
        "c",
    ]
    assert RunStore(root).find(f"@best:{ACC}").name == "a"
    assert RunStore(root).find(f"@best:last({ACC})").name == "b"
    with pytest.raises(NotFoundError, match="no run has a metric"):
        RunStore(root).find("@best:x/y")


def test_index_reads_only_changed_files(root, monkeypatch):
    read: list[str] = []

    def spy(part):
        def digest(path: Path, *earlier):
            read.append(str(path.relative_to(root)))
            return digests_of[part.file](path, *earlier)

        return digest

    digests_of = {part.file: part.digest for part in digests.PARTS}
    for part in digests.PARTS:
        monkeypatch.setitem(part.__dict__, "digest", spy(part))
    assert len(RunStore(root).runs()) == 3
    assert sorted(read) == [
        "p/a/run.json",
        "p/b/run.json",
        "p/c/run.json",
    ]  # a listing wants no metrics and no settings
    read.clear()
    RunDir(root / "p" / "b").update(state="failed")
    with (root / "p" / "a" / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 3, ACC: 0.99}) + "\n")
    assert RunStore(root).find("@failed").name == "b"
    assert read == ["p/b/run.json"]
    assert names(RunStore(root), f"{ACC} > 0.98") == ["a"]
    read.clear()
    assert names(RunStore(root), f"{ACC} > 0.98") == ["a"]
    assert read == []


@pytest.mark.parametrize("damage", ["missing", "garbage", "locked", "layout", "values"])
def test_index_can_be_deleted(root, damage):
    before = [run.key for run in RunStore(root).runs()]
    index = root / INDEX_FILE
    assert index.exists()
    RunStore(root).reindex()
    if damage == "missing":
        index.unlink()
    elif damage == "garbage":
        index.write_bytes(b"not a database at all" * 1000)
    elif damage == "locked":
        index.unlink()
        index.mkdir()  # nothing can be written there
    else:
        change = "stamp = '0-' || stamp, " if damage == "layout" else ""  # of another version
        value = zlib.compress(b'{"of": "another layout"}') if damage == "layout" else b"nonsense"
        with sqlite3.connect(index) as connection:
            connection.execute(f"UPDATE digests SET {change}value = ?", (value,))
    assert [run.key for run in RunStore(root).runs()] == before
    assert names(RunStore(root), f"{ACC} == 0.5") == ["a"]
    assert RunStore(root).reindex() == 3


def test_index_returns_what_the_files_say(root):
    odd = "trainer:\n  limit: .inf\n  day: 2026-01-02\n  big: 123456789012345678901\n  text: 'ü'\n"
    (root / "p" / "c" / "config.yaml").write_text(odd)
    expressions = {
        "trainer.limit > 1e308": ["c"],
        "trainer.big == 123456789012345678901": ["c"],
        "trainer.text == 'ü'": ["c"],
        "trainer.seed == 1": ["b", "a"],
    }
    for _ in range(2):  # from the files, then from the index
        assert {text: names(RunStore(root), text) for text in expressions} == expressions


def test_digests_of_another_dictionary_are_computed_again(root):
    """Another process may clear and refill the index at any moment."""
    RunStore(root).reindex()
    with sqlite3.connect(root / INDEX_FILE) as connection:
        connection.execute("UPDATE digests SET value = ? WHERE run = ''", (b"of another process",))
    assert [run.key for run in RunStore(root).runs()] == ["p/c", "p/b", "p/a"]
    assert names(RunStore(root), f"{ACC} == 0.5") == ["a"]
    assert names(RunStore(root), "actor.lr < 1e-3") == ["c", "b"]


def test_index_is_compact(root):
    """Digests of runs that differ in few values share the rest."""
    config = "".join(f"key_{number}: {'x' * 40}\n" for number in range(400))
    for number in range(50):
        make(root, f"run-{number}", number, 1e-3, [0.1] * 3)
        (root / "p" / f"run-{number}" / "config.yaml").write_text(f"{config}seed: {number}\n")
    store = RunStore(root)
    store.reindex()
    assert names(store, "seed == 7") == ["run-7"]
    assert (root / INDEX_FILE).stat().st_size < 4 * len(config) + 50 * 2000


READER = """
import sys
from pathlib import Path
from rlctl.runs.store import RunStore
from rlctl.runs.query_values import where
for _ in range(15):
    store = RunStore(Path(sys.argv[1]))
    found = where(store.index, store.runs(), "val-core/x/acc/mean@1 >= 0")
    assert len(found) == 2, found
    if sys.argv[2] == "reindex":
        store.reindex()
"""


def test_concurrent_listing_and_reindexing(root):
    readers = [
        subprocess.Popen(
            [sys.executable, "-c", READER, str(root), kind], stderr=subprocess.PIPE, text=True
        )
        for kind in ("reindex", "list", "reindex")
    ]
    run = RunDir(root / "p" / "c")
    for number in range(100):
        run.update(total_steps=number)
    for reader in readers:
        _, error = reader.communicate(timeout=600)
        assert reader.returncode == 0, error
    assert RunStore(root).find("c").record.total_steps == 99  # type: ignore[union-attr]


@pytest.mark.slow
def test_listings_at_once_build_one_index(root):
    assert not (root / INDEX_FILE).exists()
    environment = {"PATH": os.environ["PATH"], "HOME": str(root), "NO_COLOR": "1"}
    words = ["runs", "--root", str(root), "--json", "--where", f"{ACC} > 0.4"]
    listings = [Forked(words, root, environment) for _ in range(12)]
    for listing in listings:
        out, error = listing.communicate()
        assert (listing.returncode, error) == (0, "")
        assert [run["name"] for run in json.loads(out)] == ["b", "a"]


def test_compare_uses_the_last_common_step(root):
    runs = [RunStore(root).find(name) for name in ("a", "b")]
    both = compare(runs)
    assert both.settings == {"actor.lr": [1e-3, 1e-4]}
    row = both.metrics[ACC]
    assert (row.step, row.at, row.last) == (2, [0.5, 0.6], [0.5, 0.7])
    assert (row.best, row.best_step) == ([0.9, 0.7], [1, 3])
    assert both.curves[ACC] == {0: [0.1, 0.1], 1: [0.9, 0.2], 2: [0.5, 0.6], 3: [None, 0.7]}
    same = compare([runs[0], runs[0]], changed=True)
    assert (same.settings, same.metrics) == ({}, {})
    with_empty = compare([runs[0], RunStore(root).find("c")])
    assert with_empty.metrics[ACC].at == [0.5, None]


def test_compare_of_a_repeated_step_counts_the_last_row(root):
    with (root / "p" / "a" / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 1, ACC: 0.3}) + "\n")
    runs = RunStore(root)
    found = compare([runs.find("a"), runs.find("c")], changed=True)
    assert found.curves[ACC] == {0: [0.1, None], 1: [0.3, None], 2: [0.5, None]}
    row = found.metrics[ACC]
    assert (row.step, row.at, row.last) == (2, [0.5, None], [0.5, None])
    assert (row.best, row.best_step) == ([0.5, None], [2, None])
    assert json.loads(json.dumps(found.as_json()))["curves"][ACC]["1"] == [0.3, None]


def test_tags_and_notes_are_in_a_file_of_their_own(root):
    folder = root / "p" / "a"
    before = (folder / "run.json").read_bytes()
    assert change_tags(folder, ["good", "+old", "draft"]).tags == ("good", "old", "draft")
    assert change_tags(folder, ["^old"]) == Labels(("good", "draft"))
    set_note(folder, "warm-up was too short")
    assert (folder / "run.json").read_bytes() == before
    assert RunStore(root).find("@tag:draft").labels == Labels(
        ("good", "draft"), "warm-up was too short"
    )
    assert names(RunStore(root), '"good" in tags') == ["a"]
    for bad in ("two words", "a,b", "^", "@x"):
        with pytest.raises(UsageError):
            change_tags(folder, [bad])


def test_removed_runs_can_be_restored(root):
    store = RunStore(root)
    content = {
        path.name: path.read_bytes() for path in (root / "p" / "a").iterdir() if path.is_file()
    }
    trash.remove(root, store.find("a"))
    assert [run.name for run in store.runs()] == ["c", "b"]
    make(root, "a", 4, 1.0, [0.3])
    with pytest.raises(ConflictError, match="a run p/a already exists"):
        trash.restore(root, "a")
    trash.remove(root, store.find("a"))
    assert [each.key for each in trash.removed_runs(root)] == ["p/a", "p/a"]
    assert trash.restore(root, "a") == root / "p" / "a"  # what was removed last
    trash.remove(root, store.find("a"))
    newest, oldest = trash.removed_runs(root)
    assert newest.removed > oldest.removed
    assert {
        path.name: path.read_bytes() for path in oldest.path.iterdir() if path.is_file()
    } == content
    assert len(trash.empty(root)) == 2
    assert not (root / trash.TRASH).exists()
    with pytest.raises(NotFoundError):
        trash.restore(root, "a")


def test_a_folder_without_a_readable_name_is_skipped(root, caplog):
    before = [run.name for run in RunStore(root).runs()]
    bad = root / "p" / os.fsdecode(b"copy\xff")
    shutil.copytree(next((root / "p").glob("*")), bad, symlinks=True)
    try:
        assert [run.name for run in RunStore(root).runs()] == before
        assert RunStore(root).find("@last").name == before[0]
        assert "whose name is no UTF-8" in caplog.text
    finally:
        shutil.rmtree(bad)


def test_tags_that_are_added_at_the_same_time_are_all_kept(root):
    folder = next(run.path for run in RunStore(root).runs())
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda number: change_tags(folder, [f"t{number}"]), range(40)))
    assert {f"t{number}" for number in range(40)} <= set(read_labels(folder).tags)


def test_active_runs_are_not_removed(root):
    RunDir(root / "p" / "a").update(state="running")
    with pytest.raises(ConflictError, match="a is running"):
        trash.check_removable(RunStore(root).find("a"))
    RunDir(root / "p" / "b").update(state="failed")
    trash.check_removable(RunStore(root).find("b"))


def test_runs_of_several_seeds_have_a_mean(tmp_path, capsys):
    runs = []
    for seed, value in ((1, 0.2), (2, 0.4)):
        run = RunDir.create(tmp_path, "p", f"seed-{seed}", "ppo")
        run.metrics.write_text(f'{{"step": 1, "critic/score/mean": {value}}}\n')
        run.write_config(f"trainer:\n  seed: {seed}\n", {})
        run.finish("finished", 0)
        runs.append(RunStore(tmp_path).find(f"seed-{seed}"))
    print_comparison(compare(runs), changed=False, form="csv")
    assert capsys.readouterr().out.splitlines() == [
        "setting,seed-1,seed-2",
        "trainer.seed,1,2",
        "",
        "metric,,step,seed-1,seed-2,mean ± std",
        "critic/score/mean,at step,1,0.2,0.4,0.3 ± 0.141",
        ",best,,0.2 @1,0.4 @1,0.3 ± 0.141",
    ]


def test_registry_commands(root, monkeypatch, capsys):
    for name, value in plain_environment(RLCTL_RUNS=str(root), NO_COLOR="1").items():
        monkeypatch.setenv(name, value)

    def rlctl(*words: str, code: int = 0) -> str:
        """Return what the command has printed: to stderr if it fails."""
        assert main([*words]) == code
        out, err = capsys.readouterr()
        return err if code else out

    options = ("--where", f"{ACC} > 0.4", "--sort", f"-{ACC}", "--cols", f"state,{ACC},actor.lr")
    assert [line.split() for line in rlctl("runs", *options).splitlines()] == [
        ["run", "state", ACC, "actor.lr"],
        ["b", "finished", "70.0", "%", "0.0001"],
        ["a", "finished", "50.0", "%", "0.001"],
    ]
    bad = rlctl("runs", "--where", "state = 1", code=2)
    assert bad.splitlines()[1:3] == ["  at: state = 1", "            ^"]
    rlctl("runs", "--root", str(root), "rm", "a", code=2)
    rlctl("runs", "-w", code=2)
    compared = json.loads(rlctl("compare", "a", "b", "--json"))
    assert compared["metrics"][ACC]["at"] == [0.5, 0.6]
    steps = [line.split() for line in rlctl("compare", "a", "b", "-m", ACC).splitlines()]
    assert steps[-2:] == [["2", "0.5", "0.6"], ["3", "-", "0.7"]]
    for form, end in (("csv", "3,-,0.7"), ("markdown", "| 3 | - | 0.7 |")):
        printed = rlctl("compare", "a", "b", "-m", ACC, "--format", form)
        assert printed.splitlines()[-1] == end
    rlctl("compare", "a", "a", code=2)
    rlctl("runs", "rm", "a", "b")
    rlctl("show", "p/a", code=4)  # no id begins with it
    removed = json.loads(rlctl("runs", "trash", "--json"))
    assert [each["name"] for each in removed] == ["p/b", "p/a"]
    rlctl("runs", "restore", "a")
    rlctl("show", "a")
