"""Faults of a run with `schedule=eager`, and the count of the prompts that it learned from.

Engines, the trainer and the driver are killed or paused, the run is stopped and resumed, engines
leave and join. Afterwards each prompt that was drawn is in one step or in the last checkpoint.
"""

from __future__ import annotations

import json
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import chain
from pathlib import Path

import psutil
from safetensors.torch import load_file

from rlctl.data_prep.agent_columns import with_tools
from rlctl.data_prep.arithmetic import train_and_validation
from rlctl.data_prep.rows import write_rows
from tests.e2e.command import metrics, remove_run, rlctl, start, wait_until_gone, with_marker
from tests.e2e.killed_runs import state
from tests.progress import wait_until

STEPS, SIZE, ROLLOUTS, STALENESS = 60, 8, 4, 2
CALL_S, STOP_S = 30, 60
_CLOSE_S = 30  # after the deadline: processes end
_LAST = 6  # steps without faults, so that none waits for a worker of a run that has ended
SETTINGS = [
    f"async_training.max_staleness={STALENESS}",
    "async_training.schedule=eager",
    "algorithm.rollout_correction.rollout_is=token",
    "trainer.placement.rollout=engines",
    "trainer.placement.pools={main: 1, engines: 2}",
    "data.train_files=many.parquet",
    "data.val_files=few.parquet",
    "data.shuffle=false",  # so that a prompt's number in the run is that of its row
    f"data.train_batch_size={SIZE}",
    f"actor_rollout_ref.rollout.n={ROLLOUTS}",
    "actor_rollout_ref.actor.ppo_mini_batch_size=4",
    "trainer.project_name=quickstart",
    f"trainer.total_training_steps={STEPS}",
    "trainer.save_freq=3",
    "trainer.test_freq=20",
    "trainer.rollout_data_dir=elsewhere",
    "trainer.num_threads=1",
    f"trainer.timeouts.call_s={CALL_S}",
    f"trainer.timeouts.stop_s={STOP_S}",
    "trainer.timeouts.ray_start_s=120",
]
NUM_FAULTS = {
    "engine killed": 6,
    "engine hangs": 3,
    "trainer pauses": 4,
    "engine drained, another added": 2,
    "driver killed": 3,
    "ctrl-c": 2,
    "ctrl-c while an engine hangs": 1,
}


def learn_despite(recipe: str, backend: str, folder: Path, seed: str) -> str:
    """Train with faults and count the prompts; return a summary. Raises AssertionError."""
    questions = _write_prompts(folder, tools=recipe == "tools")
    transport = f"actor_rollout_ref.rollout.checkpoint_engine.backend={backend}"
    command = ["train", "grpo", "--recipe", recipe, *SETTINGS, transport, "--name", "harried"]
    run = folder / "runs" / "quickstart" / "harried"
    harried = Harried(command, run, folder, seed)
    try:
        harried.suffer()
        found = count(run, questions)
    finally:
        harried.close()
        remove_run(run, folder / "elsewhere")
    stops = ", ".join(f"{each:.0f}" for each in harried.stop_seconds)
    return f"{harried.num_faults} faults, stopped within {stops} s: {found}"


def _write_prompts(folder: Path, tools: bool) -> list[str]:
    """Write `many.parquet` and `few.parquet`; return the question of each row of the first."""
    level = 4 if tools else 1
    train, val = train_and_validation(SIZE * (STEPS + 4), 8, seed=1, level=level, careless=0.0)
    questions = [str(row.prompt[-1]["content"]) for row in train]
    assert len(set(questions)) == len(questions), "a question is the id of its prompt"
    if tools:
        train, val = with_tools(train, ["calculator"]), with_tools(val, ["calculator"])
    write_rows(folder / "many.parquet", train)
    write_rows(folder / "few.parquet", val)
    return questions


class EndedError(Exception):
    """The run has finished, so that no more faults can happen."""


class Harried:
    """Run that suffers `num_faults`; `stop_seconds`: from each Ctrl-C to the end of the driver."""

    def __init__(self, command: Sequence[str], run: Path, cwd: Path, seed: str) -> None:
        self.run, self.cwd = run, cwd
        self.generator = random.Random(seed)
        self.marker = f"{os.getpid()}-{run.name}"
        self.process = start(*command, cwd=cwd, marker=self.marker)
        self.stop_seconds: list[float] = []
        self.num_faults = 0

    def suffer(self) -> None:
        """Let the faults of `NUM_FAULTS` happen in random steps, until the run ends."""
        kinds = [kind for kind, number in NUM_FAULTS.items() for _ in range(number)]
        self.generator.shuffle(kinds)
        for number, kind in enumerate(kinds):
            try:
                self._wait_for_a_step()
                time.sleep(self.generator.uniform(0, 1.5))
                steps = len(metrics(self.run)) - 1
                if steps >= STEPS - _LAST:
                    raise EndedError
                print(f"    after step {steps}: {kind}", flush=True)
                self._happen(kind)
            except EndedError:
                print(f"    left out: {', '.join(kinds[number:])}", flush=True)
                break
            self.num_faults += 1
        self._end(0)
        wait_until_gone(self.marker)

    def close(self) -> None:
        """Kill what is left."""
        for each in with_marker(self.marker):
            with suppress(psutil.NoSuchProcess):
                each.kill()

    def _happen(self, kind: str) -> None:
        if "engine killed" in kind:
            self._signal("engines-*.log", signal.SIGKILL)
        if "engine hangs" in kind:
            self._signal("engines-*.log", signal.SIGSTOP)
        if kind == "trainer pauses":
            paused = self._signal("main-0.log", signal.SIGSTOP)
            time.sleep(self.generator.uniform(1, 5))
            paused.send_signal(signal.SIGCONT)
        if "drained" in kind:
            rlctl("engines", "drain", self.run.name, "--count", 1, cwd=self.cwd)
            rlctl("engines", "add", self.run.name, "--timeout", 0, cwd=self.cwd)
        if kind == "driver killed":
            os.kill(self.process.pid, signal.SIGKILL)
            self._resume(-9)
        if "ctrl-c" in kind:
            began = time.monotonic()
            os.killpg(self.process.pid, signal.SIGINT)
            self._resume(130)
            self.stop_seconds.append(time.monotonic() - began)
            assert self.stop_seconds[-1] < STOP_S + _CLOSE_S, self.stop_seconds

    def _wait_for_a_step(self) -> None:
        """Wait until the run writes a row; those of a killed attempt are dropped before."""
        seen = self._num_rows()

        def written() -> bool:
            nonlocal seen
            before, seen = seen, self._num_rows()
            return seen > before

        self._wait_until(written, "another step")

    def _wait_until(self, done: Callable[[], bool], what: str) -> None:
        """Wait until `done()`. Raises EndedError if the run ends, AssertionError if it fails."""
        wait_until(lambda: self.process.poll() is not None or done(), self.process.pid, what)
        if self.process.poll() == 0:
            raise EndedError
        if self.process.poll():
            _, talk = self.process.communicate()
            raise AssertionError(
                f"exit {self.process.returncode} while the test waited for {what}\n{talk}"
            )

    def _num_rows(self) -> int:
        lines = self.run / "metrics.jsonl"
        return lines.read_text().count("\n") if lines.exists() else 0

    def _signal(self, log: str, number: int) -> psutil.Process:
        """Signal one of the workers that write to a `log` of the current attempt; return it."""
        self._wait_until(lambda: bool(self._writers(log)), f"a worker with {log}")
        chosen = self.generator.choice(self._writers(log))
        chosen.send_signal(number)
        return chosen

    def _writers(self, log: str) -> list[psutil.Process]:
        """Return the workers that write to a `log` of the current attempt, by number."""
        logs = {str(each) for each in (self.run / "attempts" / "latest").resolve().glob(log)}
        found: list[psutil.Process] = []
        for each in with_marker(self.marker):
            with suppress(psutil.NoSuchProcess):
                files = {file.path for file in each.open_files()}
                is_paused = each.status() == psutil.STATUS_STOPPED
                if each.pid != self.process.pid and files & logs and not is_paused:
                    found.append(each)
        return sorted(found, key=lambda each: each.pid)

    def _end(self, code: int) -> None:
        _, talk = self.process.communicate(timeout=1200)
        assert self.process.returncode == code, f"exit {self.process.returncode}\n{talk}"

    def _resume(self, code: int) -> None:
        self._end(code)
        self.process = start("resume", self.run.name, cwd=self.cwd, marker=self.marker)


def count(run: Path, questions: Sequence[str]) -> str:
    """Check that each prompt drawn is in one step or in the last checkpoint; return a summary."""
    rows = metrics(run)
    assert [row["step"] for row in rows if row["step"]] == list(range(1, STEPS + 1))
    assert all(row["async/staleness/max"] <= STALENESS for row in rows if row["step"])
    learned: list[int] = []
    for step in range(1, STEPS + 1):
        lines = (run / "rollouts" / f"step_{step:06d}.jsonl").read_text().splitlines()
        groups = Counter(json.loads(line)["prompt"] for line in lines)
        assert sorted(groups.values()) == [ROLLOUTS] * SIZE, f"step {step}: {groups}"
        learned += [_row(prompt, questions) for prompt in groups]
    stored = state(run)["stream"]
    newest = sorted((run / "checkpoints").glob("step_*"))[-1]
    ahead = newest / "rollouts" / "tensors.safetensors"
    left: list[int] = sorted(set(load_file(ahead)["row"].tolist())) if ahead.exists() else []
    left += [group["drawn"] for group in chain(stored["open"], stored["finished"])]
    assert sorted([*learned, *left]) == list(range(stored["num_admitted"]))
    return f"{STEPS} steps learned from {len(learned)} groups, each once; {len(left)} are left"


def _row(prompt: str, questions: Sequence[str]) -> int:
    (row,) = [i for i, question in enumerate(questions) if question in prompt]
    return row
