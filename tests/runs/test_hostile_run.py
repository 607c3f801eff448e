"""A run made to be opened by others: nothing of it is code, nothing outside of it is touched."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml

from rlctl.files import remove
from rlctl.recipes.compose import compose
from rlctl.recipes.layers import leaves, nested
from rlctl.runs.folders_elsewhere import place
from rlctl.runs.ownership import Place, register
from rlctl.runs.run_dir import RunDir
from rlctl.runtime.training.checkpoint_store import CONFIG, CheckpointStore
from tests.plugin_folders import can_run, is_there, of_commands
from tests.recorded import called, record

ESCAPE, MARKUP = "\x1b]0;owned\x07\x1b[31m", "<script>alert(1)</script>"
GIVEN = ("trainer.total_training_steps=2", "actor_rollout_ref.model.path=quickstart")

READ = (
    *("show x", "show x --samples", "show x --json", "runs"),
    *("runs --json", "runs --cols +size", "compare x y", "compare x y --json", "logs x", "watch x"),
    *("report x --output report.html", "config show x", "config diff x y", "stop x", "sweeps"),
    *("show x --diff", "show x --diff y", "runs export x x.tar"),
    *("runs prune x --dry-run", "runs tag x a", "runs note x b", "engines list x"),
)
LINKED_READ = [
    line
    for line in (*READ, "resume x --inline", "runs sync x --logger wandb", "export x out")
    if can_run(line)
]
SECRET = "TOPSECRET"
USE = (
    *("rerun x", "rerun x --force --inline"),
    *("resume x", "resume x --inline", "resume x --inline --fork z", "resume x --force --inline"),
    *("eval x", "generate x hello", "fit --run x"),
    *("env test calculator --model x", "reward test --model x --data none.jsonl"),
)


@dataclass
class Trap:
    """Files outside of the run's folder, and what was opened and started of them."""

    folder: Path
    active: bool = False
    touched: list[str] = field(default_factory=list)

    def hook(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self.active:
            return
        if event == "subprocess.Popen" and str(self.folder) in str(arguments[:3]):
            self.touched.append(f"{event} {arguments[:3]}")
        is_path = event in ("open", "os.listdir", "os.scandir", "os.rename", "os.remove")
        if is_path and isinstance(arguments[0], str | bytes | os.PathLike):
            path = os.path.realpath(os.fsdecode(arguments[0]))
            if path.startswith(str(self.folder)) and os.path.exists(path):
                self.touched.append(f"{event} {path}")

    @contextmanager
    def watching(self) -> Iterator[None]:
        self.active = True
        try:
            yield
        finally:
            self.active = False


@pytest.fixture(scope="module")
def trap(tmp_path_factory: pytest.TempPathFactory) -> Trap:
    trap = Trap(tmp_path_factory.mktemp("outside"))
    (trap.folder / "evil.py").write_text(f"open({str(trap.folder.parent / 'ran')!r}, 'w')\n")
    for name in ("secret.txt", "tools.yaml", "servers.json", "picture.png"):
        (trap.folder / name).write_text("TOPSECRET\n")
    (trap.folder / "rlctl").mkdir()
    (trap.folder / "rlctl" / "__main__.py").write_text((trap.folder / "evil.py").read_text())
    sys.addaudithook(trap.hook)
    return trap


def hostile_texts(value: Any, trap: Trap) -> Any:
    """Replace all texts of a record by paths, markup and escapes."""
    if isinstance(value, str):
        return f"{trap.folder}/secret.txt{ESCAPE}{MARKUP}"
    if isinstance(value, dict):
        return {key: hostile_texts(item, trap) for key, item in value.items()}
    return [hostile_texts(item, trap) for item in value] if isinstance(value, list) else value


def hostile_settings(trap: Trap) -> dict[str, Any]:
    """Return a valid configuration in which every key that can name code does so."""
    values = leaves(compose("grpo", GIVEN).recorded)
    evil = f"{trap.folder}/evil.py"
    rollout, agent = "actor_rollout_ref.rollout", "actor_rollout_ref.rollout.agent"
    values |= {
        "actor_rollout_ref.model.trust_remote_code": True,
        "actor_rollout_ref.actor.policy_loss.loss_mode": "evil:loss",
        "actor_rollout_ref.actor.optim.optimizer_impl": "evil",
        f"{rollout}.name": "evil:Engine",
        f"{rollout}.multi_turn.enable": True,
        f"{rollout}.multi_turn.format": "evil:Parser",
        f"{rollout}.multi_turn.function_tool_path": evil,
        f"{rollout}.multi_turn.tool_config_path": f"{trap.folder}/tools.yaml",
        f"{agent}.environment": "evil:Environment",
        f"{agent}.program": "evil:program",
        f"{agent}.python": f"{trap.folder}/python",
        "reward.functions": [f"{evil}:score"],
        "reward.custom_reward_function.path": evil,
        "reward.cache_path": f"{trap.folder}/cache.db",
        "algorithm.name": "evil:Algorithm",
        "algorithm.adv_estimator": "evil:estimator",
        "algorithm.kl_penalty": "evil:kl",
        "data.sampler": "evil:Sampler",
        "trainer.logger": ["evil:Tracker"],
        "trainer.mirror": f"file://{trap.folder}/mirror",
        "trainer.default_local_dir": str(trap.folder),
        "trainer.rollout_data_dir": str(trap.folder),
        "trainer.validation_data_dir": str(trap.folder),
        "trainer.tracking.description": ESCAPE + MARKUP,
        "trainer.tracking.tags": [ESCAPE + MARKUP],
        "trainer.run_dir": str(trap.folder),
    }
    return nested(values)


@pytest.fixture(scope="module")
def root(trap: Trap, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with two copies of a run, each hostile in all that it says."""
    root = tmp_path_factory.mktemp("received") / "runs"
    for name in ("x", "y"):
        run = RunDir.create(root, "p", name, "ppo")
        run.finish("stopped", 0)
        row = {"critic/rewards/mean": 0.5, f"{ESCAPE}{MARKUP}": 1.0, f"{trap.folder}/a": 2.0}
        record(run.path, {1: row, 2: row})
        settings = yaml.safe_dump(hostile_settings(trap))
        (run.path / "config.yaml").write_text(settings)
        store = CheckpointStore(run.path / "checkpoints")
        aside = store.begin(2)
        (aside / "huggingface").mkdir()
        (aside / "huggingface" / "evil.py").write_text((trap.folder / "evil.py").read_text())
        model = {"model_type": "evil", "auto_map": {"AutoConfig": "evil.EvilConfig"}}
        (aside / "huggingface" / "config.json").write_text(json.dumps(model))
        (aside / CONFIG).write_text(settings)
        store.finish(2)
        sample = {"prompt": MARKUP, "response": ESCAPE, "score": 1.0, "data_source": "x"}
        sample |= {"components": {ESCAPE: 1.0}, "ground_truth": MARKUP, "length": 1}
        sample |= {"finish": ESCAPE}
        sample |= {"images": [f"{trap.folder}/picture.png", "../../../outside/picture.png"]}
        (run.path / "generations" / "step_000002.jsonl").write_text(json.dumps(sample) + "\n")
        (run.attempt / f"worker{ESCAPE}.log").write_text(f"{ESCAPE}{MARKUP}\n")
        event = {"time": ESCAPE, "kind": MARKUP, "url": f"{trap.folder}/secret.txt"}
        with (run.path / "events.jsonl").open("a") as file:
            file.write(json.dumps(event) + "\n")
        (run.path / "origins.json").write_text(
            json.dumps({"data.seed": [{"value": MARKUP, "where": ESCAPE, "level": 1}]})
        )
        told = json.loads((run.path / "run.json").read_text())
        kept = {key: told[key] for key in ("state", "created", "ended", "name", "project")}
        kept["process"] = told["process"] | {"host": f"{trap.folder}{ESCAPE}"}
        kept["cwd"] = str(trap.folder)
        kept["parent"] = {"run": "../x", "step": 1, "path": str(trap.folder)}
        (run.path / "run.json").write_text(json.dumps(hostile_texts(told, trap) | kept))
    return root


@pytest.fixture(autouse=True)
def before_and_after(
    trap: Trap, root: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Iterator[None]:
    """Work in the folder that was received; check that nothing outside was touched."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.chdir(root.parent)
    files = sorted(trap.folder.rglob("*"))
    trap.touched.clear()
    yield
    assert trap.touched == []
    assert sorted(trap.folder.rglob("*")) == files
    assert not (trap.folder.parent / "ran").exists()


@pytest.mark.parametrize("line", of_commands(READ))
def test_reading_commands(line: str, trap: Trap) -> None:
    with trap.watching():
        done = called(*line.split())
    wanted = {"logs x": 4, "engines list x": 5}.get(line, 0)
    assert done.returncode == wanted, done.stdout + done.stderr
    assert "\x1b]" not in done.stdout + done.stderr
    for page in Path().glob("*.html"):
        assert "<script>alert" not in page.read_text()


@pytest.mark.parametrize("line", of_commands(USE))
def test_commands_that_would_use_its_code(line: str, trap: Trap) -> None:
    with trap.watching():
        done = called(*line.split())
    assert done.returncode in (2, 3, 4), done.stderr
    assert "\x1b]" not in done.stdout + done.stderr
    if line.split()[0] in ("resume", "eval", "generate", "fit"):
        assert "was not made by you" in done.stderr


def test_export_copies_its_model_as_data(trap: Trap, tmp_path: Path) -> None:
    with trap.watching():
        done = called("export", "x", str(tmp_path / "model"))
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "model" / "evil.py").is_file()


@contextmanager
def served(root: Path) -> Iterator[Any]:
    """Serve the board of a folder of runs, whose package may be absent before the call."""
    from tests.plugins.console.board.serving import serving

    with serving(root) as board:
        yield board


@pytest.mark.plugin("console")
def test_the_board(root: Path, trap: Trap) -> None:
    with served(root) as board, trap.watching():
        for path in ("runs", "view", "samples", "logs", "report", "system", "sweeps"):
            status, text = board.request(f"/api/{path}?run=p/x&process=worker")
            assert status in (200, 400, 404), (path, text)
            assert "<script>alert" not in text or path not in ("report",)


# Files of a run, each of which is in turn a link to a file outside.
LINKED = ("config.yaml", "generations/step_000002.jsonl")
LINKED_TOO = (
    *("metrics.jsonl", "attempts/1/worker-0.log"),
    *("run.json", "origins.json", "labels.json", "summary.json", "events.jsonl", "stop"),
    *("attempts/1/engines.json", "checkpoints/step_000002/config.yaml", "attempts/latest"),
    f"generations/images/{'0' * 64}.jpg",
)


@pytest.fixture(scope="module")
def contents(trap: Trap) -> dict[str, Path]:
    """Return a file outside for each kind of file, which could be one of a run."""
    folder = trap.folder / "contents"
    folder.mkdir()
    sample = {"prompt": SECRET, "response": SECRET, "score": 1.0, "data_source": SECRET}
    sample |= {"components": {SECRET: 1.0}, "ground_truth": SECRET, "length": 1, "finish": "stop"}
    texts = {
        ".json": json.dumps({"tags": [SECRET], "note": SECRET, "data.seed": [{"value": SECRET}]}),
        ".yaml": f"trainer:\n  project_name: {SECRET}\n",
        "metrics.jsonl": json.dumps({"step": 9, SECRET: 1.0}) + "\n",
        "events.jsonl": json.dumps({"kind": SECRET, "time": SECRET, "message": SECRET}) + "\n",
        "000002.jsonl": json.dumps(sample) + "\n",
        ".log": f"{SECRET}\n",
        ".jpg": f"\xff\xd8\xff{SECRET}",
        "latest": "",
        "stop": SECRET,
    }
    for name, text in texts.items():
        (folder / f"outside{name}").write_text(text, encoding="latin-1")
    (folder / "outsidelatest").unlink()
    (folder / "outsidelatest").mkdir()
    (folder / "outsidelatest" / "worker-0.log").write_text(SECRET)
    shutil.copy(folder / "outside000002.jsonl", folder / "outsidelatest" / "step_000002.jsonl")
    return {name: folder / f"outside{name}" for name in texts}


@pytest.mark.parametrize(
    "name", [*LINKED, *(pytest.param(name, marks=pytest.mark.soak) for name in LINKED_TOO)]
)
def test_a_file_that_is_a_link_is_not_followed(
    name: str, root: Path, contents: dict[str, Path], tmp_path: Path, trap: Trap, monkeypatch: Any
) -> None:
    target = next(path for end, path in contents.items() if name.endswith(end))
    copy = shutil.copytree(root, tmp_path / "runs", symlinks=True)
    monkeypatch.chdir(tmp_path)
    linked = copy / "p" / "x" / name
    linked.parent.mkdir(parents=True, exist_ok=True)
    linked.unlink(missing_ok=True)
    linked.symlink_to(target)
    (copy / "p" / "x" / "attempts" / "1" / "worker-1.log").write_text("of the run\n")
    before = {path: path.read_bytes() for path in trap.folder.rglob("*") if path.is_file()}
    with trap.watching():
        for line in LINKED_READ:
            done = called(*line.split())
            assert SECRET not in done.stdout + done.stderr, line
            assert done.returncode != 70, (line, done.stderr)
            for page in tmp_path.glob("*.html"):
                assert SECRET not in page.read_text()
        if is_there("console"):
            the_board_follows_no_file(copy)
    assert before == {path: path.read_bytes() for path in before}
    if name != "attempts/latest":
        assert not linked.is_symlink() or os.readlink(linked) == str(target)


def the_board_follows_no_file(runs: Path) -> None:
    with served(runs) as board:
        for action in ("tag", "note", "stop"):
            assert board.act("p/x", action, "a")[0] in (200, 400, 404, 409), action
        for path in ("runs", "view", "samples", "logs", "report", "system", "sweeps"):
            status, text = board.request(f"/api/{path}?run=p/x&process=worker-0")
            assert status in (200, 400, 404, 409) or "must not be a link" in text, (path, text)
            assert SECRET not in text


LINKED_FOLDERS = (
    *("checkpoints", "rollouts", "attempts", "attempts/1", "attempts/latest", "samples"),
    *("generations/images", "checkpoints/step_000002", "checkpoints/step_000002/huggingface"),
)


@pytest.mark.parametrize(
    "name",
    ["generations", *(pytest.param(name, marks=pytest.mark.soak) for name in LINKED_FOLDERS)],
)
def test_a_folder_that_is_a_link_is_not_followed(
    name: str, root: Path, contents: dict[str, Path], tmp_path: Path, trap: Trap, monkeypatch: Any
) -> None:
    copy = shutil.copytree(root, tmp_path / "runs", symlinks=True)
    monkeypatch.chdir(tmp_path)
    linked = copy / "p" / "x" / name
    remove(linked)
    linked.symlink_to(contents["latest"])
    with trap.watching():
        for line in LINKED_READ:
            done = called(*line.split())
            assert SECRET not in done.stdout + done.stderr, line
            assert done.returncode in (0, 3, 4, 5), (line, done.stderr)
        done = called("show", "x", "--samples")
        assert done.returncode == 5, done.stderr
        assert "must not be a link" in done.stderr
        if is_there("console"):
            the_board_follows_no_folder(copy)


def the_board_follows_no_folder(runs: Path) -> None:
    with served(runs) as board:
        for path in ("view", "samples", "logs", "report", "system"):
            status, text = board.request(f"/api/{path}?run=p/x&process=worker-0")
            assert status == 409, (path, text)
            assert "must not be a link" in text


def test_folders_elsewhere_and_a_linked_root_are_read(tmp_path: Path, monkeypatch: Any) -> None:
    """The user's runs, copies of them and runs of others have parts where their settings said."""
    (tmp_path / "disk").mkdir()
    (tmp_path / "runs").symlink_to(tmp_path / "disk")
    monkeypatch.chdir(tmp_path)
    with RunDir.creating(Path("runs"), "p", "x", "ppo") as run:
        place(run, "generations", str(tmp_path / "elsewhere"))
        run.write_config("trainer: {}\n", {})
    run.finish("finished", 0)
    sample = {"prompt": "a", "response": "of the run", "score": 1.0, "data_source": "x"}
    sample |= {"components": {}, "ground_truth": "1", "length": 1, "finish": "stop"}
    (run.path / "generations" / "step_000002.jsonl").write_text(json.dumps(sample) + "\n")
    shutil.copytree(run.path, tmp_path / "disk" / "p" / "y", symlinks=True)
    for name in ("x", "y", "runs/p/y"):
        shown = called("show", name, "--samples")
        assert shown.returncode == 0, shown.stderr
        assert "of the run" in shown.stdout
    if is_there("console"):
        with served(tmp_path / "runs") as board:
            status, text = board.request("/api/samples?run=p/x")
        assert status == 200, text
        assert "of the run" in text
    secret = run.path / "generations" / "images"
    secret.symlink_to(tmp_path)
    assert "must not be a link" in called("show", "y").stderr
    own = Place.of(run.record.id, run.path)
    register(own, "", str(tmp_path))
    assert called("show", "x").returncode == 0


@pytest.mark.plugin("console")
@pytest.mark.parametrize("name", ["exports", "board"])
def test_the_board_writes_into_no_folder_that_is_a_link(
    name: str, root: Path, tmp_path: Path, trap: Trap
) -> None:
    copy = shutil.copytree(root, tmp_path / "runs", symlinks=True)
    outside = trap.folder / "contents"
    before = sorted(outside.rglob("*"))
    (copy / "p" / "x" / name).symlink_to(outside)
    with served(copy) as board:
        status, text = board.act("p/x", "export", "a")
    assert status == 409, text
    assert sorted(outside.rglob("*")) == before


def test_rewards_of_another_run_are_not_used_unasked(
    root: Path, trap: Trap, tmp_path: Path
) -> None:
    rows, responses = tmp_path / "rows.jsonl", tmp_path / "responses.jsonl"
    row: dict[str, Any] = {"data_source": "a", "prompt": [{"role": "user", "content": "q"}]}
    row["reward_model"] = {"style": "rule", "ground_truth": "1"}
    rows.write_text(json.dumps(row) + "\n")
    responses.write_text('{"response": "a"}\n')
    run = root / "p" / "x"
    model = run / "checkpoints" / "step_000002" / "huggingface"
    chosen = {"--recipe": run / "config.yaml", "--model": model}
    for option, value in (*chosen.items(), ("--model", "x")):
        given = ("--data", rows, "--responses", responses, option, value)
        with trap.watching():
            done = called("reward", "test", *map(str, given))
        assert done.returncode in (3, 4), done.stderr
        assert ("was not made by you" in done.stderr) == (option == "--recipe"), done.stderr
