"""N steps equal k steps, `kill -9`, `rlctl resume` and N − k steps, byte for byte."""

from __future__ import annotations

import json
import random
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from rlctl.data_prep.arithmetic import train_and_validation
from rlctl.data_prep.rows import write_rows
from rlctl.runs.process import DriverProcess
from rlctl.runtime.checkpoint.store import damage
from tests.e2e.command import metrics, reproducible
from tests.e2e.killed_runs import (
    LOGGER,
    SCORE,
    Ended,
    events,
    finish_despite,
    learned,
    random_kills,
    responses,
    run,
    state,
)

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
    """Return settings for two epochs of three steps, validated and saved every second step."""
    return [
        *settings,
        "data.train_files=train.parquet",
        "data.train_max_samples=24",
        "trainer.total_training_steps=null",
        "trainer.total_epochs=2",
        "trainer.save_freq=2",
        "trainer.test_freq=2",
        "data.max_response_length=8",
        "reward.custom_reward_function.path=score.py",
        "reward.num_processes=1",
        LOGGER,
    ]


def train(verb: str, name: str, settings: list[str], folder: Path, *options: str) -> Path:
    """Return an undisturbed run, made once per module."""
    path = folder / "runs" / "quickstart" / name
    if not path.exists():
        ended = run("train", verb, *options, "--name", name, *settings, cwd=folder)
        assert ended.code == 0, ended.talk
    return path


def copy_of(path: Path, name: str, **record: Any) -> Path:
    """Return a copy of a run under another name, with changes to its record."""
    shutil.copytree(path, path.with_name(name), symlinks=True)
    file = path.with_name(name) / "run.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"name": name} | record))
    return path.with_name(name)


def resume(path: Path, folder: Path, *arguments: str, code: int = 0, **limits: int) -> Ended:
    ended = run("resume", path.name, "--inline", *arguments, cwd=folder, **limits)
    assert ended.code == code, ended.talk
    return ended


def assert_same(resumed: Path, straight: Path, why: str = "") -> None:
    assert reproducible(resumed) == reproducible(straight), why
    assert learned(resumed) == learned(straight), why
    assert state(resumed) == state(straight), why
    assert responses(resumed) == responses(straight), why


# Moments that need care: as a run starts, writes, resumes and completes a checkpoint.
WORST = ["checkpoint write::SIGTERM", "resume::SIGHUP", "commit::SIGKILL"]


@pytest.mark.parametrize(
    ("verb", "more", "number"), [("ppo", PPO, 1), pytest.param("grpo", GRPO, 3, marks=SOAK)]
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
    command = ["train", verb, "--inline", "--name", name, *small, *more]
    doing = finish_despite(kills, name, command, folder, "--inline")
    killed = straight.with_name(name)
    assert_same(killed, straight, f"seed {seed}: {kills}, {doing}")
    assert len(doing) == len(kills), doing
    assert len(events(killed, "attempt")) == len(doing) + 1
    assert not list(killed.glob("checkpoints/.*"))


@pytest.fixture
def finished(small: list[str], folder: Path) -> Path:
    return train("ppo", "ppo", [*small, *PPO], folder, "--inline")


@pytest.fixture
def longer(small: list[str], folder: Path) -> Path:
    return train("ppo", "longer", [*small, *PPO, "trainer.total_epochs=3"], folder, "--inline")


def test_finished_run_can_be_extended(finished: Path, longer: Path, folder: Path) -> None:
    """Extend a run at an epoch boundary: no prompt is skipped or repeated."""
    copied = copy_of(finished, "boundary")
    assert "has already finished its 6 steps" in resume(copied, folder).talk
    assert len(events(copied, "attempt")) == 1
    keep = [
        "trainer.max_ckpt_to_keep=1",
        "trainer.keep_best.metric=critic/score/mean",
        "trainer.keep_best.k=2",
    ]
    talk = resume(copied, folder, "trainer.total_epochs=3", *keep).talk
    assert "trainer.total_epochs: 2 → 3" in talk
    assert_same(copied, longer)
    scores = {
        row["step"]: row["critic/score/mean"]
        for row in metrics(longer)
        if row["step"] in (2, 4, 6, 8, 9)
    }
    best = sorted(scores, key=lambda step: (-scores[step], step))[:2]
    left = {int(each.name.removeprefix("step_")) for each in copied.glob("checkpoints/step_*")}
    assert left == {9, *best}


def test_damaged_checkpoint_falls_back_to_the_previous(
    finished: Path, longer: Path, folder: Path
) -> None:
    copied = copy_of(finished, "damaged")
    with next(copied.glob("checkpoints/step_000006/actor/*.distcp")).open("r+b") as file:
        file.seek(1000)
        file.write(b"\xff\xff\xff\xff")
    rows = (copied / "metrics.jsonl").read_text().splitlines(keepends=True)
    (copied / "metrics.jsonl").write_text("".join([*rows[:5], rows[5][:40] + "\n", rows[6]]))
    with (copied / "events.jsonl").open("a") as file:
        file.write('\0\0\0\n{"kind":\n')
    (copied / "origins.json").write_text('{"trainer.seed": [{"val')
    talk = resume(copied, folder, "trainer.total_epochs=3").talk
    assert "step_000006 is damaged: actor/__0_0.distcp has changed since it was written" in talk
    assert "resumes from step 4" in talk
    assert "origins.json cannot be read" in talk
    assert f"removed a broken line at {copied.relative_to(folder)}/metrics.jsonl:6" in talk
    assert_same(copied, longer)
    taken_back = copied / "attempts" / "2" / "taken_back"
    assert (taken_back / "metrics.jsonl").read_text() == f"{rows[5][:40]}\n{rows[6]}"
    assert [each.name for each in (taken_back / "generations").iterdir()] == ["step_000006.jsonl"]
    assert (copied / "checkpoints" / "before_attempt_2" / "step_000006").is_dir()


def test_every_kind_of_damage_is_detected(finished: Path, tmp_path: Path) -> None:
    whole = finished / "checkpoints" / "step_000006"
    assert damage(whole) is None
    for number, (spoil, words) in enumerate(
        {
            lambda folder: (
                folder / "critic" / ".metadata"
            ).unlink(): "critic/.metadata is missing",
            lambda folder: (folder / "state.json").write_text("{}"): "state.json has 2 bytes, not",
            lambda folder: (folder / "manifest.json").write_text(
                "{"
            ): "manifest.json cannot be read",
        }.items()
    ):
        spoilt = tmp_path / str(number)
        shutil.copytree(whole, spoilt)
        spoil(spoilt)
        assert words in (damage(spoilt) or "")


def test_changed_configuration_is_refused_or_forked(finished: Path, folder: Path) -> None:
    """Refuse the change or fork; a fork without relevant changes equals the original."""
    drift = "actor_rollout_ref.actor.optim.lr=1e-3"
    refused = resume(finished, folder, drift, "trainer.total_epochs=3", code=3).talk
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
    copied = copy_of(finished, "forced")
    resume(copied, folder, "--from-step", "4", "--force", drift)
    assert metrics(copied)[-1]["actor/lr"] == 1e-3
    assert [row["step"] for row in metrics(copied)] == list(range(7))


def test_changed_data_and_reward_code_are_refused(
    finished: Path, shelf: Path, folder: Path
) -> None:
    write_rows(
        folder / "train.parquet", train_and_validation(32, 0, seed=9, level=1, careless=0.0)[0]
    )
    (folder / "score.py").write_text(f"{SCORE}# edited\n")
    try:
        talk = resume(finished, folder, "trainer.total_epochs=3", code=3).talk
    finally:
        shutil.copy(shelf / "train.parquet", folder)
        (folder / "score.py").write_text(SCORE)
    assert "train.parquet has changed since the run started" in talk
    assert "score.py has changed since the run started" in talk


def test_running_run_is_refused(finished: Path, folder: Path) -> None:
    here = asdict(DriverProcess.current())
    living = copy_of(finished, "living", state="running", process=here)
    assert (
        f"process {here['pid']} on {here['host']}" in resume(living, folder, "--force", code=5).talk
    )
    far = copy_of(finished, "far", state="running", process=here | {"host": "elsewhere"})
    assert "--force" in resume(far, folder, code=5).talk
    resume(far, folder, "--force")


def test_resume_without_a_checkpoint_starts_over(finished: Path, folder: Path) -> None:
    copied = copy_of(finished, "none", state="failed")
    shutil.rmtree(copied / "checkpoints")
    (copied / "checkpoints").mkdir()
    assert "from the beginning: it has no checkpoint" in resume(copied, folder).talk
    assert_same(copied, finished)
    assert (
        resume(copied, folder, "--from-step", "3", code=4).talk.count(
            "steps with a checkpoint: 2, 4, 6"
        )
        == 1
    )


def test_resume_mode(finished: Path, longer: Path, small: list[str], folder: Path) -> None:
    """Resume from `rlctl train` with verl's keys."""
    auto = ["train", "ppo", "--inline", *small, *PPO, "--name", "named", "trainer.resume_mode=auto"]
    named = finished.with_name("named")
    for more, words in (
        (["trainer.total_epochs=1"], "finished: 3 steps"),
        (["trainer.total_epochs=1"], "named has already finished its 3 steps"),
        (["trainer.total_epochs=3"], "named resumes from step 3 of 9"),
        (["trainer.total_epochs=1"], "named is at step 9 of 3 steps"),
    ):
        assert words in run(*auto, *more, cwd=folder).talk
    assert [row["step"] for row in metrics(named)] == list(range(10))
    assert learned(named) == learned(longer)
    assert run(*auto, "data.seed=7", cwd=folder).code == 3
    path = [
        "trainer.resume_mode=resume_path",
        f"trainer.resume_from_path={finished}/checkpoints/step_000004",
    ]
    assert (
        run("train", "ppo", "--inline", *small, *PPO, "--name", "from-path", *path, cwd=folder).code
        == 0
    )
    assert reproducible(named.with_name("from-path"))[1:] == [
        row for row in reproducible(finished) if row["step"] > 4
    ]


def test_full_disk_keeps_earlier_checkpoints(finished: Path, folder: Path) -> None:
    """Continue after a failed write; exit with code 7 if the last checkpoint fails too."""
    copied = copy_of(finished, "full")
    limit = next(copied.glob("checkpoints/*/huggingface/*.safetensors")).stat().st_size - 1
    talk = resume(copied, folder, "trainer.total_epochs=3", code=7, largest_file=limit).talk
    assert "the checkpoint of step 8 was not written: " in talk
    assert "the latest checkpoint is that of step 6" in talk
    assert [row["step"] for row in metrics(copied)] == list(range(10))
    assert [each["step"] for each in events(copied, "checkpoint_failed")] == [8, 9]
    assert [damage(each) for each in sorted(copied.glob("checkpoints/*"))] == [None] * 3
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
    command = ["train", "ppo", "--inline", "--name", name, *small, *PPO, "trainer.save_freq=-1"]
    ended = run(*command, cwd=folder, kill_at=f"{random.randint(12, 30)}:0.02:{name}")
    assert ended.code == code, ended.talk
    assert f"{name}: finishing the step" in ended.talk
    stopped = finished.with_name(name)
    assert json.loads((stopped / "run.json").read_text())["state"] == "stopped"
    last = metrics(stopped)[-1]["step"]
    assert [path.name for path in (stopped / "checkpoints").glob("step_*")] == [f"step_{last:06d}"]
    resume(stopped, folder)
    assert reproducible(stopped) == reproducible(finished)
    assert responses(stopped) == responses(finished)
