"""The registry's index, selections, comparison, labels and trash, on folders as runs leave them."""

import json
import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from rlctl.__main__ import main
from rlctl.errors import ConflictError, NotFoundError, UsageError
from rlctl.runs import trash
from rlctl.runs.labels import LABELS_FILE, Labels, read_labels
from rlctl.runs.listing import RunQuery, where
from rlctl.runs.run_comparison import compare
from rlctl.runs.run_dir import RunDir
from rlctl.runs.store import RunStore
from tests.recorded import called, plain_environment

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
    return [run.name for run in where(store.runs(), expression)]


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
    with pytest.raises(UsageError, match="no run has a field or key 'zzz'") as caught:
        names(store, "zzz == 1")
    assert "`rlctl config show -r RUN`" in (caught.value.problems[0].hint or "")


def test_order_columns_and_the_best(root):
    page = RunQuery(None, None, f"-best({ACC})", f"+actor.lr,{ACC}", 2).page(RunStore(root).runs())
    assert [run.name for run in page.runs] == ["a", "b"]
    assert page.columns == [{"actor.lr": 1e-3, ACC: 0.5}, {"actor.lr": 1e-4, ACC: 0.7}]
    assert (page.hidden, page.total, page.default_columns) == (1, 3, True)
    assert [
        run.name for run in RunQuery(None, None, ACC, None, None).page(RunStore(root).runs()).runs
    ] == [
        "a",
        "b",
        "c",
    ]
    assert RunStore(root).find(f"@best:{ACC}").name == "a"
    assert RunStore(root).find(f"@best:last({ACC})").name == "b"
    with pytest.raises(NotFoundError, match="no run has a metric"):
        RunStore(root).find("@best:x/y")


READER = """
import sys
from pathlib import Path
from rlctl.runs.listing import where
from rlctl.runs.store import RunStore
for _ in range(15):
    found = where(RunStore(Path(sys.argv[1])).runs(), "val-core/x/acc/mean@1 >= 0")
    assert len(found) == 2, found
    if sys.argv[2] == "delete":
        for run in found:
            (run.path / "summary.json").unlink(missing_ok=True)
"""


def test_concurrent_listing_while_summaries_are_deleted(root):
    readers = [
        subprocess.Popen(
            [sys.executable, "-c", READER, str(root), kind], stderr=subprocess.PIPE, text=True
        )
        for kind in ("delete", "list", "delete")
    ]
    run = RunDir(root / "p" / "c")
    for number in range(100):
        run.update(total_steps=number)
    for reader in readers:
        _, error = reader.communicate(timeout=600)
        assert reader.returncode == 0, error
    assert RunStore(root).find("c").record.total_steps == 99  # type: ignore[union-attr]
    assert not [*(root / "p").glob("*/.summary*")]


def test_a_store_reads_what_has_changed(root):
    store = RunStore(root)
    before = {run.name: run for run in store.runs()}
    RunDir(root / "p" / "a").update(total_steps=7)
    (root / "p" / "b" / LABELS_FILE).write_text('{"tags": ["good"], "note": ""}')
    after = {run.name: run for run in store.runs()}
    assert after["a"].record.total_steps == 7  # type: ignore[union-attr]
    assert after["b"].labels.tags == ("good",)
    assert after["c"].record is before["c"].record
    shutil.rmtree(root / "p" / "c")
    assert {run.name for run in store.runs()} == {"a", "b"}


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


@pytest.mark.plugin("console")
def test_tags_and_notes_are_in_a_file_of_their_own(root):
    from rlctl.plugins.console.label_changes import change_tags, set_note

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
    trash.remove(store.find("a"))
    assert [run.name for run in store.runs()] == ["c", "b"]
    make(root, "a", 4, 1.0, [0.3])
    with pytest.raises(ConflictError, match="a run p/a already exists"):
        trash.restore(root, "a")
    trash.remove(store.find("a"))
    assert [each.key for each in trash.removed_runs(root)] == ["p/a", "p/a"]
    assert trash.restore(root, "a") == root / "p" / "a"  # what was removed last
    trash.remove(store.find("a"))
    newest, oldest = trash.removed_runs(root)
    assert newest.removed > oldest.removed
    assert {
        path.name: path.read_bytes() for path in oldest.path.iterdir() if path.is_file()
    } == content
    assert len(trash.empty(root)) == 2
    assert not (root / trash.TRASH).exists()
    with pytest.raises(NotFoundError):
        trash.restore(root, "a")


@pytest.mark.plugin("console")
def test_a_run_of_another_folder_goes_into_the_trash_of_its_own(root, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = called("runs", "rm", str(root / "p" / "a"), "--root", str(tmp_path / "x"), cwd=tmp_path)
    assert f"`rlctl runs restore a --root {root}` restores it" in done.stderr
    assert [each.key for each in trash.removed_runs(root)] == ["p/a"]
    assert called("runs", "restore", "a", "--root", str(root), cwd=tmp_path).returncode == 0


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


@pytest.mark.plugin("console")
def test_tags_that_are_added_at_the_same_time_are_all_kept(root):
    from rlctl.plugins.console.label_changes import change_tags

    folder = next(run.path for run in RunStore(root).runs())
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda number: change_tags(folder, [f"t{number}"]), range(40)))
    assert {f"t{number}" for number in range(40)} <= set(read_labels(folder).tags)


@pytest.mark.plugin("console")
def test_runs_of_several_seeds_have_a_mean(tmp_path, capsys):
    from rlctl.plugins.console.commands.compare import print_comparison

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
        "metric,,step,seed-1,seed-2,mean,std",
        "critic/score/mean,at step,1,0.2,0.4,0.30000000000000004,0.1414213562373095",
        ",best,,0.2 @1,0.4 @1,0.30000000000000004,0.1414213562373095",
    ]


@pytest.fixture
def rlctl(root, monkeypatch, capsys):
    """Return a function that runs a command for the folder of runs."""
    for name, value in plain_environment(RLCTL_RUNS=str(root), NO_COLOR="1").items():
        monkeypatch.setenv(name, value)

    def run(*words: str, code: int = 0) -> str:
        """Return what the command has printed: to stderr if it fails."""
        assert main([*words]) == code
        out, err = capsys.readouterr()
        return err if code else out

    return run


def test_registry_commands(root, rlctl):
    options = ("--where", f"{ACC} > 0.4", "--sort", f"-{ACC}", "--cols", f"state,{ACC},actor.lr")
    assert [line.split() for line in rlctl("runs", *options).splitlines()] == [
        ["run", "state", ACC, "actor.lr"],
        ["b", "finished", "70.0", "%", "0.0001"],
        ["a", "finished", "50.0", "%", "0.001"],
    ]
    bad = rlctl("runs", "--where", "state = 1", code=2)
    assert bad.splitlines()[1:3] == ["  at: state = 1", "            ^"]
    rlctl("runs", "-w", code=2)


@pytest.mark.plugin("console")
def test_commands_that_compare_and_remove(root, rlctl):
    rlctl("runs", "--root", str(root), "rm", "a", code=2)
    compared = json.loads(rlctl("compare", "a", "b", "--json"))
    assert compared["metrics"][ACC]["at"] == [0.5, 0.6]
    steps = [line.split() for line in rlctl("compare", "a", "b", "-m", ACC).splitlines()]
    assert steps[-2:] == [["2", "0.5", "0.6"], ["3", "-", "0.7"]]
    for form, end in (("csv", "3,,0.7"), ("markdown", "| 3 | - | 0.7 |")):
        printed = rlctl("compare", "a", "b", "-m", ACC, "--format", form)
        assert printed.splitlines()[-1] == end
    rlctl("compare", "a", "a", code=2)
    rlctl("runs", "rm", "a", "b")
    rlctl("show", "p/a", code=4)  # no id begins with it
    removed = json.loads(rlctl("runs", "trash", "--json"))
    assert [each["name"] for each in removed] == ["p/b", "p/a"]
    rlctl("runs", "restore", "a")
    rlctl("show", "a")
