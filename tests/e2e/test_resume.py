"""N steps equal k steps, `kill -9`, `rlctl resume` and N − k steps, byte for byte."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path

import pytest

from rlctl.runtime.training.complete_checkpoints import damage
from tests.e2e import command
from tests.e2e.command import metrics, reproducible, rlctl
from tests.e2e.killed_runs import (
    LOGGER,
    SCORE,
    events,
    finish_despite,
    learned,
    random_kills,
    responses,
    run,
    state,
)
from tests.settings import given

SOAK = pytest.mark.soak
PPO = [
    "algorithm.use_kl_in_reward=true",
    "algorithm.kl_ctrl.type=adaptive",
    "trainer.critic_warmup=2",
]
GRPO = [
    "actor_rollout_ref.rollout.n=4",
    "actor_rollout_ref.actor.use_kl_loss=true",
    "actor_rollout_ref.actor.shuffle=true",
    "algorithm.filter_groups.enable=true",
    "algorithm.filter_groups.metric=even",
    "trainer.rollout_data_dir=elsewhere/rollouts",
    "trainer.validation_data_dir=elsewhere/validation",
    "trainer.default_local_dir=elsewhere/checkpoints",
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, shelf: Path) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    (folder / "score.py").write_text(SCORE)
    shutil.copy(shelf / "train.parquet", folder)
    return folder


@pytest.fixture
def small(settings: list[str]) -> list[str]:
    """Return settings for three epochs of two steps, validated and saved at their ends."""
    return [
        *settings,
        *given(train="train.parquet", train_rows=16, response=8, epochs=3, steps=None),
        *given(save=2, validate=2, reward="score.py", reward_processes=1),
        LOGGER,
    ]


def train(verb: str, name: str, settings: list[str], folder: Path, *options: str) -> Path:
    """Return an undisturbed run, made once per module."""
    path = folder / "runs" / "quickstart" / name
    return path if path.exists() else command.train(verb, name, *options, *settings, cwd=folder)


def copy_of(path: Path, name: str) -> Path:
    """Return a copy of a run under another name."""
    shutil.copytree(path, path.with_name(name), symlinks=True)
    file = path.with_name(name) / "run.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"name": name}))
    return path.with_name(name)


def resume(path: Path, folder: Path, *arguments: str, code: int = 0) -> str:
    """Resume a run and return the messages."""
    return rlctl("resume", path.name, "--inline", *arguments, cwd=folder, code=code).stderr


def assert_same(resumed: Path, straight: Path, why: str = "") -> None:
    assert reproducible(resumed) == reproducible(straight), why
    assert learned(resumed) == learned(straight), why
    assert state(resumed) == state(straight), why
    assert responses(resumed) == responses(straight), why


# Moments that need care: as a run starts, writes, resumes and completes a checkpoint.
WORST = ["checkpoint write::SIGTERM", "resume::SIGHUP", "commit::SIGKILL"]


@pytest.mark.parametrize(
    ("verb", "more", "number"), [("ppo", PPO, 0), pytest.param("grpo", GRPO, 3, marks=SOAK)]
)
def test_killed_at_any_moment(
    verb: str, more: list[str], number: int, small: list[str], folder: Path
) -> None:
    """Stop a run as it starts, at random moments and at the worst ones, one after the other."""
    straight = train(verb, verb, [*small, *more], folder, "--inline")
    scores = {row["critic/score/mean"] for row in metrics(straight)[1:]}
    assert len(scores) > 1  # rewards differ, so the run learns
    if verb == "grpo":
        surplus = [row["filter_groups/surplus_groups"] for row in metrics(straight)[1:-1]]
        assert sum(surplus) > 0
    seed = random.SystemRandom().randrange(10**6)
    kills = ["start-up::SIGINT", *random_kills(number, 24, random.Random(seed)), *WORST]
    print(f"seed {seed}: {kills}")  # pytest shows it if the test fails
    name = f"{verb}-killed"
    words = ["train", verb, "--inline", "--name", name, *small, *more]
    doing = finish_despite(kills, name, words, folder, "--inline")
    killed = straight.with_name(name)
    assert_same(killed, straight, f"seed {seed}: {kills}, {doing}")
    assert len(doing) == len(kills), doing
    assert len(events(killed, "attempt")) == len(doing) + 1
    assert not list(killed.glob("checkpoints/.*"))


@pytest.fixture
def finished(small: list[str], folder: Path) -> Path:
    """Return a run of three epochs."""
    return train("ppo", "ppo", [*small, *PPO], folder, "--inline")


@pytest.fixture
def shorter(small: list[str], folder: Path) -> Path:
    """Return a run of two epochs."""
    return train("ppo", "shorter", [*small, *PPO, "trainer.total_epochs=2"], folder, "--inline")


def test_resume_mode_extends_a_finished_run(
    shorter: Path, finished: Path, small: list[str], folder: Path, tmp_path: Path
) -> None:
    """Extend a run from `rlctl train` at an epoch boundary: no prompt is skipped or repeated."""
    copied = tmp_path / shorter.relative_to(folder)
    shutil.copytree(shorter, copied, symlinks=True)
    for name in ("score.py", "train.parquet"):
        shutil.copy(folder / name, tmp_path)
    auto = ["train", "ppo", "--inline", *small, *PPO, "trainer.resume_mode=auto"]
    keep = ["trainer.max_ckpt_to_keep=1", "trainer.keep_best.metric=critic/score/mean"]
    auto += ["--name", copied.name, *keep, "trainer.keep_best.k=2"]
    done = rlctl(*auto, "trainer.total_epochs=2", cwd=tmp_path)
    assert "shorter has already finished its 4 steps" in done.stderr
    assert len(events(copied, "attempt")) == 1
    assert "shorter resumes from step 4 of 6" in rlctl(*auto, cwd=tmp_path).stderr
    assert_same(copied, finished)
    scores = {row["step"]: row.get("critic/score/mean") for row in metrics(finished)[::2]}
    del scores[0]
    best = sorted(scores, key=lambda step: (-scores[step], step))[:2]
    left = {int(each.name.removeprefix("step_")) for each in copied.glob("checkpoints/step_*")}
    assert left == {6, *best}
    done = rlctl(*auto, "trainer.total_epochs=2", cwd=tmp_path)
    assert "shorter is at step 6, after the end at step 4" in done.stderr
    rlctl(*auto, "data.seed=7", cwd=tmp_path, code=3)


def test_resume_mode_starts_from_a_path(finished: Path, small: list[str], folder: Path) -> None:
    checkpoint = f"trainer.resume_from_path={finished}/checkpoints/step_000004"
    path = ["trainer.resume_mode=resume_path", checkpoint]
    rows = reproducible(train("ppo", "from-path", [*small, *PPO, *path], folder, "--inline"))[1:]
    assert rows == [row for row in reproducible(finished) if row["step"] > 4]


def test_damaged_checkpoint_falls_back_to_the_previous(
    shorter: Path, finished: Path, folder: Path
) -> None:
    copied = copy_of(shorter, "damaged")
    with next(copied.glob("checkpoints/step_000004/actor/*.distcp")).open("r+b") as file:
        file.seek(1000)
        file.write(b"\xff\xff\xff\xff")
    rows = (copied / "metrics.jsonl").read_text().splitlines(keepends=True)
    (copied / "metrics.jsonl").write_text("".join([*rows[:3], rows[3][:40] + "\n", rows[4]]))
    with (copied / "events.jsonl").open("a") as file:
        file.write('\0\0\0\n{"kind":\n')
    (copied / "origins.json").write_text('{"trainer.seed": [{"val')
    talk = resume(copied, folder, "trainer.total_epochs=3", "--trust")
    assert "step_000004 is damaged: actor/__0_0.distcp has changed since it was written" in talk
    assert "trainer.total_epochs: 2 → 3" in talk
    assert "resumes from step 2" in talk
    assert "origins.json cannot be read" in talk
    assert f"removed a broken line at {copied.relative_to(folder)}/metrics.jsonl:4" in talk
    assert_same(copied, finished)
    taken_back = copied / "attempts" / "2" / "taken_back"
    assert (taken_back / "metrics.jsonl").read_text() == f"{rows[3][:40]}\n{rows[4]}"
    assert [each.name for each in (taken_back / "generations").iterdir()] == ["step_000004.jsonl"]
    assert (copied / "checkpoints" / "before_attempt_2" / "step_000004").is_dir()


def test_changed_configuration_is_refused_or_forked(finished: Path, folder: Path) -> None:
    """Refuse the change or fork; a fork without relevant changes equals the original."""
    drift = "actor_rollout_ref.actor.optim.lr=1e-3"
    refused = resume(finished, folder, drift, "trainer.total_epochs=4", code=3)
    assert "actor_rollout_ref.actor.optim.lr" in refused
    assert "--fork NAME" in refused
    assert "trainer.total_epochs" not in refused
    resume(finished, folder, "--from-step", "4", "--fork", "fork")
    fork = finished.with_name("fork")
    rows = {row["step"]: row for row in reproducible(finished)}
    assert [row["step"] for row in metrics(fork)] == [4, 5, 6]
    assert reproducible(fork)[1:] == [rows[5], rows[6]]
    record = json.loads((fork / "run.json").read_text())
    original = json.loads((finished / "run.json").read_text())
    assert record["id"] != original["id"]
    assert (record["parent"]["run"], record["parent"]["step"]) == (original["id"], 4)


def test_changed_data_and_reward_code_are_refused(
    finished: Path, shelf: Path, folder: Path
) -> None:
    shutil.copy(shelf / "val.parquet", folder / "train.parquet")
    (folder / "score.py").write_text(f"{SCORE}# edited\n")
    try:
        talk = resume(finished, folder, "trainer.total_epochs=4", code=3)
    finally:
        shutil.copy(shelf / "train.parquet", folder)
        (folder / "score.py").write_text(SCORE)
    assert "train.parquet has changed since the run started" in talk
    assert "score.py has changed since the run started" in talk


def test_full_disk_keeps_earlier_checkpoints(shorter: Path, folder: Path) -> None:
    """Continue after a failed write; exit with code 7 if the last checkpoint fails too."""
    copied = copy_of(shorter, "full")
    limit = next(copied.glob("checkpoints/*/huggingface/*.safetensors")).stat().st_size - 1
    words = ["resume", copied.name, "--inline", "--trust", *given(epochs=3, save=1)]
    ended = run(*words, cwd=folder, largest_file=limit)
    assert ended.code == 7, ended.talk
    assert "the checkpoint of step 5 was not written: " in ended.talk
    assert "the latest checkpoint is that of step 4" in ended.talk
    assert [row["step"] for row in metrics(copied)] == list(range(7))
    assert [each["step"] for each in events(copied, "checkpoint_failed")] == [5, 6]
    assert [damage(each) for each in sorted(copied.glob("checkpoints/*"))] == [None] * 2
    assert not list(copied.glob("checkpoints/.*"))


@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("SIGUSR1", 143),
        pytest.param("SIGTERM", 143, marks=SOAK),
        pytest.param("SIGINT", 130, marks=SOAK),
    ],
)
def test_a_signal_finishes_the_step_and_saves(
    name: str, code: int, finished: Path, small: list[str], folder: Path
) -> None:
    """Save even if no checkpoints are configured, and resume to the undisturbed result."""
    words = ["train", "ppo", "--inline", "--name", name, *small, *PPO, "trainer.save_freq=-1"]
    ended = run(*words, cwd=folder, kill_at=f"{random.randint(12, 30)}:0.02:{name}")
    assert ended.code == code, ended.talk
    assert f"{name}: finishing the step" in ended.talk
    stopped = finished.with_name(name)
    assert json.loads((stopped / "run.json").read_text())["state"] == "stopped"
    last = metrics(stopped)[-1]["step"]
    assert [path.name for path in (stopped / "checkpoints").glob("step_*")] == [f"step_{last:06d}"]
    resume(stopped, folder)
    assert reproducible(stopped) == reproducible(finished)
    assert responses(stopped) == responses(finished)
