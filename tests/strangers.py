"""Run rlctl as strangers do: from a wheel, in environments that have only what they asked for.

    python -m tests.strangers                        # all environments, in about an hour
    python -m tests.strangers bare peft              # without extras, and with the extra `peft`
    python -m tests.strangers bare --python 3.13
    python -m tests.strangers all --full             # training runs as long as the pages have them

Each environment is made by uv in an empty folder. In it run the commands of README and quickstart
in their order and the plain use of the other commands, and in another folder at the same time the
commands of the tutorial and every `--help`. Rules: no internal
error, no traceback, an expected exit code; exit code 6 names an extra that is not installed, and
writes no run. Needs the package index; hubs and accounts are not needed.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from typer.main import get_group

from rlctl.cli import LazyCommand, app
from tests.e2e.test_documentation import blocks, commands
from tests.e2e.wheel import ROOT, build, install

PAGES = ("README.md", "docs/quickstart.md", "docs/tutorial.md")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
# CUDA only, or tools of development.
NOT_TRIED = {"vllm", "triton", "dev", "docs"}

# Makes a run of the pages short; with `--full` they run as they are written.
SHORT = ["trainer.total_training_steps=1", "data.val_max_samples=8"]

# Exit codes other than 0 that are right, by the beginning of the command.
EXPECTED: dict[str, tuple[set[int], str]] = {
    "rlctl prep gsm8k": ({0, 5, 7}, "a hub that may be out of reach"),
    "rlctl train ppo --recipe gsm8k_ppo": (
        {3, 7},
        "its model is on a hub",
    ),
    "python -m tools.real_model": ({1}, "a tool of the checkout, which no wheel has"),
    "rlctl train grpo --recipe sums_smollm": ({3}, "its model is made by that tool"),
    "rlctl train ppo data.train_files=train.parquet": ({3, 4}, "the files of an example"),
    "rlctl doctor": ({0, 7}, "reports what this machine lacks"),
    "rlctl eval @last --tasks": ({0, 7}, "the data of its task are on a hub"),
    "rlctl debug @last": ({5}, "the run has ended"),
    "rlctl engines list @last": ({5}, "the run has ended"),
    "rlctl train ppo --address": ({6, 7}, "no cluster listens there"),
}

# Plain use of commands that the pages do not show; the pages' runs are there already.
PLAIN = """
rlctl --version
rlctl version
rlctl doctor
rlctl loggers
rlctl runs --json
rlctl runs --where "step > 0"
rlctl sweeps
rlctl show @last --json
rlctl report @last
rlctl logs @last
rlctl watch @last
rlctl debug @last
rlctl stop @last
rlctl engines list @last
rlctl resume @last
rlctl recipes ls
rlctl recipes show grpo
rlctl recipes check grpo
rlctl config show
rlctl config why data.seed
rlctl config keys optim
rlctl explain E-OOM critic/score/mean
rlctl env ls
rlctl env show gridworld
rlctl fit grpo
rlctl completion bash
rlctl prep arithmetic --out arithmetic
rlctl data show arithmetic/train.parquet -n 1
rlctl sweep ppo data.seed=1,2 --dry-run
rlctl sweep ppo actor_rollout_ref.actor.optim.lr=1e-4,3e-4 --name two
rlctl show two
rlctl compare two
rlctl sweep best two
rlctl train grpo --recipe tools --inline
rlctl train ppo --inline actor_rollout_ref.model.lora_rank=4
rlctl train ppo actor_rollout_ref.rollout.name=vllm
rlctl train ppo --logger swanlab
rlctl train ppo --dry-run --logger wandb
rlctl train ppo --dry-run --logger tensorboard
rlctl train ppo --dry-run --logger mlflow
rlctl train ppo --dry-run --logger trackio
rlctl train ppo --dry-run reward.functions=[math]
rlctl eval @last --tasks gsm8k
rlctl train ppo --address http://127.0.0.1:1
rlctl board --help
"""


@dataclass
class Stranger:
    """One environment: a folder with a virtual environment and nothing else."""

    name: str
    python: str
    extras: list[str]
    folder: Path
    full: bool = False
    failures: list[str] = field(default_factory=list)
    missing: dict[str, int] = field(default_factory=dict)
    num_commands: int = 0

    def run(self, command: str, folder: Path) -> None:
        """Run one command line in `folder` and record the rule that it breaks."""
        self.num_commands += 1
        words = command
        if re.match(r"rlctl (train|sweep ppo) ", command) and "--dry-run" not in command:
            words = command if self.full else f"{command} {shlex.join(SHORT)}"
        before = set(folder.glob("runs/*/*"))
        began = time.monotonic()
        code, output = self._output(words, folder)
        seconds = time.monotonic() - began
        broken = self._broken(command, code, output, set(folder.glob("runs/*/*")) - before)
        state = "FAILED" if broken else "ok"
        print(f"  {state:6} {code:3} {seconds:4.0f} s  {command[:200]}", flush=True)
        if broken:
            self.failures.append(f"{command}\n    {broken}\n    {output.strip()[-1500:]}")

    def _output(self, command: str, folder: Path) -> tuple[int, str]:
        environment = {
            "PATH": f"{self.folder}/.venv/bin:/usr/local/bin:/usr/bin:/bin",
            "HOME": str(self.folder),
            "LANG": "C.UTF-8",
            "SWANLAB_MODE": "offline",
            "WANDB_MODE": "offline",
        }
        forever = command == "rlctl board"
        process = subprocess.Popen(
            ["bash", "-c", command],
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        try:
            output = process.communicate(timeout=20 if forever else 1800)[0]
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGINT if forever else signal.SIGKILL)
            output = process.communicate()[0]
            if forever:
                return 0 if "http://" in output else 1, output
            output += "\n(no end after 30 minutes)"
        return process.returncode, output

    def _broken(self, command: str, code: int, output: str, written: set[Path]) -> str | None:
        """Return the rule that a command broke, or None."""
        if "internal error" in output or "Traceback (most recent call last)" in output:
            return "internal error or traceback"
        if code == 6:
            named = set(re.findall(r"rlctl\[([\w,-]+)\]", output))
            if not named or named & set(self.extras):
                return f"exit code 6 names {sorted(named)}, installed are {self.extras}"
            for extra in named:
                self.missing[extra] = self.missing.get(extra, 0) + 1
            return f"wrote {sorted(map(str, written))} and needs an extra" if written else None
        allowed = next(
            (codes for start, (codes, _) in EXPECTED.items() if command.startswith(start)), {0}
        )
        return None if code in allowed else f"exit code {code}, expected {sorted(allowed)}"


def commands_of(page: str) -> Iterator[str]:
    """Yield the commands of a page in their order, except those of make and pip."""
    for language, text in blocks(ROOT / page):
        for command in commands(text) if not language else ():
            if command.split()[0] in ("rlctl", "seq", "python"):
                yield re.sub(r"\bRUN\b", "@last", command)


def write_files(folder: Path) -> None:
    """Write the files that the pages show (their first line is a comment with the name)."""
    folder.mkdir()
    for page in PAGES:
        for _, text in blocks(ROOT / page):
            if name := re.match(r"# ([\w.]+)\n", text):
                (folder / name[1]).write_text(text)
    shutil.copytree(ROOT / "tests" / "data" / "gsm8k", folder / "official")


def help_pages() -> str:
    """Return the command that prints `--help` of every command and group, in one process."""
    script = "import sys; from rlctl.__main__ import main; "
    script += "sys.exit(max(main([*path.split(), '--help']) for path in sys.argv[1:]))"
    return shlex.join(["python", "-c", script, *command_paths("", get_group(app))])


def command_paths(path: str, group: Any) -> Iterator[str]:
    """Yield the names of all commands of a group with their groups' names: `config show`."""
    loaded = group.load() if isinstance(group, LazyCommand) else group
    names = loaded.list_commands(None) if hasattr(loaded, "list_commands") else []
    for name in names:
        command = loaded.get_command(None, name)
        yield f"{path} {name}".lstrip()
        yield from command_paths(f"{path} {name}", command)


def try_environment(stranger: Stranger, wheel: Path) -> None:
    """Install and run everything in one environment."""
    print(
        f"{stranger.name} on Python {stranger.python}: {', '.join(stranger.extras) or 'no extras'}"
    )
    install(wheel, stranger.folder, ",".join(stranger.extras), stranger.python)
    work = ["rlctl prep gsm8k --source official", "rlctl train ppo"]
    tutorial: list[str] = []
    for page in PAGES:
        (tutorial if "tutorial" in page else work).extend(commands_of(page))
    work += PLAIN.strip().splitlines()
    tutorial.append(help_pages())

    def run_all(name: str, commands: list[str]) -> None:
        write_files(folder := stranger.folder / name)
        for command in dict.fromkeys(commands):  # the pages repeat some
            stranger.run(command, folder)

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(run_all, ("work", "tutorial"), (work, tutorial)))


def main() -> int:
    """Try the environments that the command line names and print what broke the rules."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # `&` in a script ignores it
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    extras = sorted(set(EXTRAS) - NOT_TRIED)
    parser.add_argument("names", nargs="*", help=f"bare, all, {', '.join(extras)}; default: each")
    parser.add_argument("--python", default="3.11", help="version for uv, such as 3.13")
    parser.add_argument("--full", action="store_true", help="do not shorten training runs")
    options = parser.parse_args()
    names = options.names or ["bare", *extras, "all"]
    if unknown := set(names) - {"bare", "all", *extras}:
        parser.error(f"unknown environments {sorted(unknown)}")
    failed = 0
    with tempfile.TemporaryDirectory(prefix="strangers-") as folder:
        wheel = build(Path(folder))
        for name in names:
            chosen = {"bare": [], "all": extras}.get(name, [name])
            place = Path(folder) / name
            place.mkdir()
            stranger = Stranger(name, options.python, chosen, place, options.full)
            try_environment(stranger, wheel)
            print(f"{name}: {stranger.num_commands} commands, {len(stranger.failures)} failed")
            print(f"  missing extras were named: {stranger.missing or 'none'}")
            print("".join(f"  FAILED {each}\n" for each in stranger.failures), end="")
            failed += len(stranger.failures)
            shutil.rmtree(place)
    print(f"0 passed, {failed} failed" if failed else "no rule was broken")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
