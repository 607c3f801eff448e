"""Commands of the README and the docs: each is run in order, or parsed for the reason given here.

Documents start with the run that the README trains, under the names that they use. Training takes
two small steps. `make strangers` runs those of `FROM_SCRATCH`.
"""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlctl.__main__ import main
from tests.e2e.command import environment, rlctl

ROOT = Path(__file__).parents[2]
DOCS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
FROM_SCRATCH = ("README.md", "tutorial.md")
NAMES = ("RUN", "A", "B", "C", "S1", "S2", "ppo-261121")

PROGRAMS = ("rlctl", "make", "pip", "python", "seq", "ray", "source")
SHORT = [
    "--inline",
    "data.train_batch_size=8",
    "actor_rollout_ref.actor.ppo_mini_batch_size=8",
    "data.val_max_samples=4",
    "data.max_response_length=8",
    "trainer.total_training_steps=2",
    "trainer.test_freq=2",
    "trainer.num_threads=1",
]
APPENDED = {  # words that make a command short; the text of the document comes first
    r"rlctl generate ": ["--max-tokens", "4"],
}
# The remaining commands are only parsed.
NOT_RUN = {
    r"make demo": "it installs rlctl and runs `rlctl train ppo`, which the test runs in its place",
    r"make test": "it runs this test",
    r"source": "it puts rlctl on the PATH of a shell",
    r"(pip|ray|python -m sglang)": "it installs packages or starts servers",
    r"rlctl .*(--address|s3://|http://|sglang)": "it needs a cluster, a bucket or a server",
    r"rlctl board": "it serves until Ctrl-C; tests/board runs it",
    r"rlctl runs sync": "it needs an account",
    r"rlctl prep gsm8k": "it needs the hub; tests/data_prep runs it with local files",
    r"rlctl (data show|train .*) .*(gsm8k|train\.parquet)": "it needs GSM8K or a model of the hub",
    r"rlctl (train|resume|sweep|stop) ": "e2e/test_train, _resume, _stopping and _sweep train",
    r"rlctl engines ": "cli/test_engines and distributed/test_engines run it",
    r"rlctl runs (-w|rm|restore|pull|trash)": "tests/cli and tests/runs run it",
    r"rlctl (show|sweep best|resume|stop) .*SWEEP": "e2e/test_sweep runs it",
    r"rlctl export RUN DIR --lora": "the run has no adapter; e2e/test_export runs it",
    r"rlctl (eval|export) ": "`make strangers` runs those of the README and the tutorial",
    r"rlctl config .*mine\.yaml": "the recipe is an outline; tests/recipes runs it",
}
_FENCE = re.compile(r"^( *)```(\w*)\n(.*?)^\1```", re.MULTILINE | re.DOTALL)
_COMMENT = re.compile(r"\s# .*$", re.MULTILINE)


def blocks(document: Path) -> Iterator[tuple[str, str]]:
    """Yield language and text of each fenced block."""
    for match in _FENCE.finditer(document.read_text(encoding="utf-8")):
        yield match[2], match[3]


def commands(text: str) -> list[str]:
    """Return the commands of a block without comments; none for a block of output."""
    joined = _COMMENT.sub("", text.replace("\\\n", " "))
    lines = [line.strip() for line in joined.splitlines() if line.strip()]
    if not lines or lines[0].split()[0] not in PROGRAMS:
        return []
    lines = [line for line in lines if not line.startswith("#")]
    assert all(line.split()[0] in PROGRAMS for line in lines), lines
    return lines


def reason(command: str) -> str | None:
    """Return why a command is not run, or None."""
    return next((why for pattern, why in NOT_RUN.items() if re.match(pattern, command)), None)


def words_of(command: str) -> list[str]:
    """Return the words after `rlctl`, with those that shorten the command."""
    more = next((each for pattern, each in APPENDED.items() if re.match(pattern, command)), [])
    return [*shlex.split(command)[1:], *more]


def parsed(command: str) -> tuple[str, ...]:
    """Return the words of a command that a parser looks at: no settings, nothing optional."""
    cleaned = re.sub(r"\[[^\]]*\]|…|\|\w+", "", command) if "'" not in command else command
    return tuple(word for word in shlex.split(cleaned)[1:] if not re.match(r"[\w+~.]+=", word))


def parse(command: str) -> None:
    """Check that the command, its arguments and its options exist."""
    assert main([*parsed(command), "--help"]) == 0, command


@pytest.fixture(scope="module")
def readme(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder in which the README's `make demo` was run."""
    folder = tmp_path_factory.mktemp("readme")
    rlctl("train", "ppo", *SHORT, cwd=folder)
    return folder


def follow(document: Path, folder: Path) -> None:
    """Write the files that a document shows and run its commands."""
    for language, text in blocks(document):
        if language in ("python", "yaml", "bash") and (name := re.match(r"# (\w+\.\w+)\n", text)):
            (folder / name[1]).write_text(text)
        for command in commands(text) if language == "" else ():
            if not command.startswith("rlctl ") and reason(command) is None:
                env = environment() | {"PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin"}
                subprocess.run(["bash", "-ec", command], cwd=folder, env=env, check=True)
            elif not command.startswith("rlctl "):
                continue
            elif reason(command) is None:
                rlctl(*words_of(command), cwd=folder)
            else:
                parse(command)


def test_every_command_exists() -> None:
    texts = [text for document in DOCS for language, text in blocks(document) if language == ""]
    found = [command for text in texts for command in commands(text)]
    for words in sorted({parsed(each) for each in found if each.startswith("rlctl ")}):
        assert main([*words, "--help"]) == 0, words


@pytest.mark.soak
def test_other_documents(readme: Path, tmp_path: Path) -> None:
    original = next((readme / "runs" / "quickstart").glob("ppo-*"))
    for name in NAMES:
        copy = tmp_path / "runs" / "demo" / name
        shutil.copytree(original, copy, symlinks=True)
        record = json.loads((copy / "run.json").read_text())
        (copy / "run.json").write_text(json.dumps(record | {"name": name, "id": f"id{name}"}))
    for document in DOCS:
        if document.name not in FROM_SCRATCH:
            follow(document, tmp_path)


def test_every_reason_is_used() -> None:
    found = [
        command
        for document in DOCS
        for language, text in blocks(document)
        if language == ""
        for command in commands(text)
    ]
    unused = [pattern for pattern in NOT_RUN if not any(re.match(pattern, each) for each in found)]
    assert unused == []
    assert len(found) > 40
