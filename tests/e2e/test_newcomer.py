"""First hour of a newcomer: each typical mistake is answered with what would work."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from rlctl.__main__ import main
from tests.plugin_folders import can_run


@dataclass(frozen=True)
class Mistake:
    """Command of a newcomer, its exit code, and texts that the output must contain."""

    command: str
    code: int
    help: tuple[str, ...]


def mistake(command: str, code: int, *help: str) -> Mistake:
    """Build a mistake.

    `→ X` stands for `corrected: rlctl X`, and `⇢ X` for one after which a problem remains.
    """
    words = (re.sub("^→ ", "corrected: rlctl ", each) for each in help)
    texts = (re.sub("^⇢ ", "corrected in part: rlctl ", each) for each in words)
    return Mistake(command, code, tuple(texts))


DRY = "train ppo --dry-run"
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SMALL = (
    "trainer.total_training_steps=1 trainer.test_freq=-1 data.train_batch_size=4 "
    "actor_rollout_ref.actor.ppo_mini_batch_size=4 data.max_response_length=4 data.val_files=null "
    "trainer.critic_warmup=0 trainer.num_threads=1 trainer.save_freq=1"
)

# Before the first run.
LOOKING_AROUND = (
    mistake("", 2, "Start with `rlctl train ppo`"),
    mistake("help", 2, "→ --help"),
    mistake("--versoin", 2, "→ --version"),
    mistake("trian ppo --dry-run", 2, "→ train ppo --dry-run"),
    mistake("ppo --dry-run", 2, "→ train ppo --dry-run"),
    mistake("run ppo", 2, "→ train ppo"),
    mistake("train", 2, "ppo", "grpo"),
    mistake("train pop", 2, "→ train ppo"),
    mistake("train gsm8k_ppo", 2, "⇢ train ppo --recipe gsm8k_ppo"),
    mistake("train --recipe gsm8k_ppo", 2, "⇢ train ppo --recipe gsm8k_ppo"),
    mistake("train ppo --recipe gms8k_ppo", 4, "⇢ train ppo --recipe gsm8k_ppo"),
    mistake("train ppo mine.yaml", 3, "⇢ train ppo --recipe mine.yaml"),
    mistake("show @last", 4, "there are no runs", "`rlctl train ppo` makes one"),
    mistake("recipes list", 2, "→ recipes ls"),
    mistake("config get trainer.seed", 2, "→ config why trainer.seed"),
    mistake("config why trainer.totl_epochs", 4, "did you mean trainer.total_epochs?"),
    mistake(f"{DRY} --lr 1e-6", 2, f"→ {DRY} actor_rollout_ref.actor.optim.lr=1e-6"),
    mistake(f"{DRY} trainer.total_epochs = 1", 3, f"→ {DRY} trainer.total_epochs=1"),
    mistake(f"{DRY} --nam x", 2, f"→ {DRY} --name x"),
    mistake("train ppo --dryrun", 2, f"→ {DRY}"),
    mistake(f"{DRY} trainer.device=gpu", 3, f"→ {DRY} trainer.device={DEVICE}"),
)

FILES = (
    mistake(f"{DRY} -r ppo data.train_files=trian.parquet", 3, "data.train_files=train.parquet"),
    mistake(
        f"{DRY} -r ppo data.train_files=train.parquet",
        3,
        "prep jsonl train.parquet --prompt-key question --answer-key answer",
    ),
    mistake(
        f"{DRY} -r ppo actor_rollout_ref.model.path=./my-model",
        3,
        "there is no model folder './my-model'",
    ),
    mistake(f"{DRY} data.train_files=train.parquet", 3, "pass actor_rollout_ref.model.path="),
    mistake("prep gsm8", 2, "→ prep gsm8k"),
    mistake("prep jsonl", 2, "for example `rlctl prep jsonl questions.jsonl --prompt-key"),
    mistake(
        "prep jsonl questions.csv --prompt-key quesiton --answer-key answer --out o",
        3,
        "keys: question, answer",
    ),
    mistake("data missing.parquet", 2, "→ data show missing.parquet"),
    mistake("data show missing.parquet", 4, "`rlctl prep arithmetic --out data` writes one"),
    mistake("reward test score.py", 2, "for example `rlctl reward test --data"),
    mistake("fit --model quickstart --device H10O", 2, "→ fit --model quickstart --device H100"),
    mistake(f"train ppo --inline --name first {SMALL}", 0, "rlctl show first"),
)

# `first` is a finished run now.
RUNS = (
    mistake(f"train ppo --dry-run --name first {SMALL}", 5, "the name first-2 is free"),
    mistake("show frist", 4, "→ show first"),
    mistake("show", 2, "for example `rlctl show"),
    mistake("resume first", 0, "trainer.total_training_steps=2 trains on"),
    mistake("export model first", 4, "→ export first model"),
    mistake("eval nope", 4, "`quickstart` is a model"),
    mistake("generate quickstart", 2, 'for example `rlctl generate quickstart "Tom has'),
    mistake("compare first frist", 4, "→ compare first first"),
    mistake("logs first", 4, "workers of --inline print to the terminal"),
    mistake('runs --where "critic/score >"', 2, "example: state =="),
    mistake("runs --sort scor", 2, "`rlctl show RUN --json` has all metrics"),
    mistake("runs delete first", 2, "→ runs rm first"),
    mistake("sweep ppo trainer.seed=1", 3, "give several values"),
    mistake("doctor --fix", 2, "for example `rlctl doctor"),
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with files of questions, none of them in rlctl's format."""
    folder = tmp_path_factory.mktemp("newcomer")
    pq.write_table(pa.table({"question": ["a"], "answer": ["b"]}), folder / "train.parquet")
    (folder / "questions.csv").write_text('question,answer\n"1, 2?",b\n')
    return folder


def can_be_made(mistake: Mistake) -> bool:
    """Return False if the command of a mistake, or of its correction, was deleted."""
    corrected = [text.removeprefix("corrected: rlctl ") for text in mistake.help]
    return all(map(can_run, (mistake.command, *corrected)))


@pytest.mark.parametrize(
    "mistakes",
    [
        pytest.param(LOOKING_AROUND, id="looking around", marks=pytest.mark.soak),
        pytest.param([*FILES, *RUNS], id="wrong files, a first run, wrong names"),
    ],
)
def test_mistakes_of_the_first_hour(
    mistakes: Sequence[Mistake],
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Run the commands and report all whose response does not help."""
    monkeypatch.chdir(folder)
    monkeypatch.setenv("COLUMNS", "300")
    monkeypatch.delenv("RLCTL_RUNS", raising=False)
    failures: list[str] = []
    for each in filter(can_be_made, mistakes):
        code = main(shlex.split(each.command))
        printed = " ".join("".join(capsys.readouterr()).split())
        missing = [text for text in each.help if text not in printed]
        if code != each.code or missing or "Traceback" in printed or "internal error" in printed:
            failures.append(f"$ rlctl {each.command}\n[exit {code}] {printed}\nmissing: {missing}")
    assert not failures, "\n\n".join(failures)
