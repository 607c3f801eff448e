"""Tests of environment workers: faults are outcomes, deadlines hold, no process is left."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from rlctl.errors import ConfigError, InternalError, ResourceError
from rlctl.plugins.agents.environments import environment_pool as environments
from rlctl.plugins.agents.environments.environment_pool import (
    PROGRAM,
    EnvironmentFailed,
    EnvironmentPool,
    Timeouts,
)
from rlctl.runtime.sandbox import worker_process
from rlctl.runtime.sandbox.worker_settings import WorkerSettings
from rlctl.runtime.serving.chat import ToolCall, Turn
from tests.plugins.agents.environments.episodes import LONG, load_here, names_of
from tests.processes import gone
from tests.progress import wait_until

SOURCE = '''
import asyncio, os, signal, subprocess, sys, time
from rlctl.plugins.agents.environments.protocol import Step

class Mine:
    """Asynchronous environment that does what a turn says."""

    async def reset(self, row):
        self.steps = 0
        if row.get("deed") == "raise":
            raise LookupError("bad row")
        return row.get("messages")

    @property
    def tools(self):
        return []

    async def step(self, turn):
        self.steps += 1
        done = await asyncio.to_thread(do, turn.text) if turn.text != "block" else do("block")
        if isinstance(done, Step):
            return done
        return Step([{"role": "user", "content": str(done)}], reward=self.steps)

    async def score(self):
        return {"score": 0.5, "steps": self.steps}

    async def close(self):
        print("closed after", self.steps)

class Plain(Mine):
    """Synchronous environment: its calls run in threads."""

    def reset(self, row):
        self.steps = 0

    def step(self, turn):
        return Step([{"role": "user", "content": str(do(turn.text))}])

    def score(self):
        return None

    def close(self):
        return None

def do(deed):
    if deed == "pid":
        return f"{os.getpid()} {os.getppid()}"
    if deed == "hang" or deed == "block":
        print("hangs", flush=True)
        time.sleep(3600)
    if deed == "exit":
        os._exit(3)
    if deed == "group":
        os.killpg(0, signal.SIGKILL)
    if deed == "secrets":
        return sorted(name for name in os.environ if "KEY" in name)
    if deed == "daemon":
        return subprocess.Popen(["sleep", "3600"], start_new_session=True).pid
    if deed == "long":
        return "x" * 2**24
    if deed == "nan":
        return Step([], reward=float("nan"))
    if deed == "no message":
        return Step(["hello"])
    return "ok"

def tool(deed: str) -> str:
    """Do something."""
    return str(do(deed))
'''


@pytest.fixture
def mine(here: Path) -> str:
    (here / "mine.py").write_text(SOURCE)
    return str(here / "mine.py")


async def play(pool: EnvironmentPool, *deeds: str, key: str = "k") -> list[str]:
    """Return what each deed gives in one episode: a content, or a failure, which ends it."""
    remote = await pool.open({"prompt": []}, key)
    try:
        found = []
        for deed in deeds:
            step = await remote.step(Turn(deed))
            found.append(step.messages[0]["content"])
        return found
    except EnvironmentFailed as error:
        return [*found, f"{error.kind}: {error.text}"]
    finally:
        await remote.close()


def test_episodes_of_one_worker(mine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Deeds fail their own episode only; secrets stay here unless they are named."""
    deeds = {
        "long": "error: step: the message has",
        "nan": "error: step: ValueError: the reward is nan, not a finite number",
        "no message": "error: step: TypeError: a message is 'hello'",
        "secrets": "['OPENAI_API_KEY']",
    }
    for name in ("OPENAI_API_KEY", "WANDB_API_KEY"):
        monkeypatch.setenv(name, "secret")

    async def one() -> None:
        messages = [{"role": "user", "content": "hi"}]
        remote = await pool.open({"messages": messages, "day": Path("x")}, "a")
        assert (remote.messages, remote.tools) == (messages, [])
        step = await remote.step(Turn("pid"))
        assert (step.reward, step.done) == (1.0, False)
        assert await remote.score() == {"score": 0.5, "steps": 1.0}
        await remote.close()
        await remote.close()
        with pytest.raises(EnvironmentFailed, match=r"LookupError: bad row \(.*mine\.py:11\)"):
            await pool.open({"deed": "raise"}, "b")

    async def run() -> None:
        bystander = await pool.open({}, "bystander")
        for deed, expected in deeds.items():
            found = await play(pool, "ok", deed)
            assert found[0] == "ok"
            assert found[1].startswith(expected), deed
        assert (await bystander.step(Turn("ok"))).messages[0]["content"] == "ok"

    with EnvironmentPool(
        f"{mine}:Mine", timeouts=LONG, workers=WorkerSettings(logs=tmp_path, env=["OPENAI_API_KEY"])
    ) as pool:
        asyncio.run(one())
        asyncio.run(one())  # each step of training has a loop of its own
        asyncio.run(run())
    assert "closed after 2" in (tmp_path / "environment-0.log").read_text()


def test_worker_that_ends_is_replaced_and_its_episodes_are_lost(mine: str) -> None:
    async def run() -> None:
        for deed in ("exit", "group"):
            others = [await pool.open({}, f"{deed}{number}") for number in range(4)]
            [failure] = await play(pool, deed)
            assert failure.startswith("lost: the environment worker exited")
            outcomes = await asyncio.gather(
                *(other.step(Turn("ok")) for other in others), return_exceptions=True
            )
            lost = [each for each in outcomes if isinstance(each, EnvironmentFailed)]
            assert {each.kind for each in lost} == {"lost"}
            assert len(lost) == 2  # the other worker's go on
            for other in others:
                await other.close()
            assert (
                await asyncio.gather(*(play(pool, "ok", key=f"x{n}") for n in range(4)))
                == [["ok"]] * 4
            )

    with EnvironmentPool(f"{mine}:Mine", timeouts=LONG, workers=WorkerSettings(2)) as pool:
        asyncio.run(run())


def test_environment_that_hangs_costs_its_deadline_and_holds_no_other(
    mine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rlctl.runtime.sandbox.worker_process.GRACE_S", 0.0)

    async def run() -> None:
        hanging = asyncio.create_task(play(pool, "hang", key="hanging"))
        await asyncio.sleep(0)
        assert await play(pool, "ok", "ok", key="other") == ["ok", "ok"]
        assert not hanging.done()
        assert await hanging == ["timeout: step took longer than 6 s"]
        assert await play(pool, "ok") == ["ok"]

    timeouts = Timeouts(call_s=6, turn_s=6)
    with EnvironmentPool(f"{mine}:Plain", timeouts=timeouts) as pool:
        asyncio.run(run())


def test_close_that_hangs_costs_its_deadline(mine: str) -> None:
    with Path(mine).open("a", encoding="utf-8") as file:
        file.write("\nclass Stuck(Plain):\n    def close(self): time.sleep(3600)\n")
    with EnvironmentPool(f"{mine}:Stuck", timeouts=Timeouts(1, 1)) as pool:
        assert asyncio.run(play(pool, "ok")) == ["ok"]


def test_tools_that_hang_cost_their_deadline_and_many_retire_their_worker(
    mine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(environments, "MAX_ABANDONED", 2)

    async def pid_after(hanging: int) -> str:
        remote = await pool.open({}, f"k{hanging}")
        calls = [ToolCall(str(n), "tool", {"deed": "hang"}) for n in range(hanging)]
        pid = ToolCall("p", "tool", {"deed": "pid"})
        step = await remote.step(Turn("", (*calls, pid)))
        late = [message["content"] for message in step.messages[:-1]]
        assert late == ["error: timed out after 3 s"] * hanging
        assert [use.error for use in step.uses] == [*["timeout"] * hanging, None]
        assert all(3 <= use.seconds < 300 for use in step.uses[:-1])
        again = await remote.step(Turn("", (pid,)))
        assert again.messages[0]["content"] == step.messages[-1]["content"]
        await remote.close()
        return step.messages[-1]["content"]

    async def run() -> None:
        old = await pool.open({}, "old")
        first = await pid_after(2)
        second = await pid_after(0)
        assert first != second
        assert (await old.step(Turn("bye"))).done  # an episode in progress may end there
        assert not gone(int(first.split()[0]))
        await old.close()
        assert await pid_after(0) == second

    params = {"tools": [f"{mine}:tool"], "max_parallel_calls": 3}
    with EnvironmentPool("tools", params, timeouts=Timeouts(3, 300)) as pool:
        assert names_of(pool.tools) == ["tool"]
        asyncio.run(run())
        wait_until(lambda: len(pool.workers.workers) == 1, os.getpid(), "the retired one ends")

        async def leave() -> None:
            await pool.open({}, "left")
            await pid_after(2)  # its worker is retired with the next episode

        async def later() -> None:
            await pid_after(0)
            await pid_after(0)

        asyncio.run(leave())
        asyncio.run(later())
        # The retired one waits for no episode of an old loop.
        wait_until(lambda: len(pool.workers.workers) == 1, os.getpid(), "the retired one ends")


def test_worker_whose_loop_is_blocked_is_replaced(
    mine: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(worker_process, "PING_S", 0.2)
    monkeypatch.setattr(environments, "SILENCE_S", 5.0)

    async def run() -> None:
        [failure] = await play(pool, "block")
        assert failure.startswith("lost: the event loop of the environment worker was blocked")
        monkeypatch.setattr(environments, "SILENCE_S", 300.0)
        assert await play(pool, "ok") == ["ok"]

    with EnvironmentPool(
        f"{mine}:Mine", timeouts=LONG, workers=WorkerSettings(logs=tmp_path)
    ) as pool:
        asyncio.run(run())
    assert "in do" in (tmp_path / "environment-0.log").read_text()  # the stack that blocks


def test_processes_that_environments_leave_end_with_the_pool(mine: str) -> None:
    with EnvironmentPool(f"{mine}:Mine", timeouts=LONG) as pool:
        worker, guard = asyncio.run(play(pool, "pid"))[0].split()
        [daemon] = asyncio.run(play(pool, "daemon"))
        pids = [int(worker), int(guard), int(daemon)]
        assert not any(gone(pid) for pid in pids)
    assert all(gone(pid) for pid in pids)
    with pytest.raises(InternalError, match="closed"):
        asyncio.run(play(pool, "ok"))


def test_loop_that_ends_in_the_middle_leaves_no_episode(mine: str, tmp_path: Path) -> None:
    log = tmp_path / "environment-0.log"

    async def leave() -> None:
        await pool.open({}, "left")
        task = asyncio.create_task(play(pool, "hang", key="cancelled"))
        while "hangs" not in log.read_text():
            await asyncio.sleep(0.01)
        task.cancel()

    with EnvironmentPool(
        f"{mine}:Mine", timeouts=LONG, workers=WorkerSettings(logs=tmp_path)
    ) as pool:
        asyncio.run(leave())
        assert asyncio.run(play(pool, "ok")) == ["ok"]
        assert not any(pool._episodes.values())
    text = log.read_text()
    assert (text.count("closed after 0"), text.count("closed after 1")) == (1, 2)


@pytest.mark.parametrize(
    ("name", "params", "message"),
    [
        ("nothing", {}, "unknown environment 'nothing'"),
        (PROGRAM, {"program": "tests.plugins.agents.programs:no_such"}, "no_such"),
        ("missing.py:Mine", {}, "the environment file does not exist"),
        ("{mine}:Wrong", {}, "the environment file has no 'Wrong'"),
        ("{mine}:Mine", {"size": 3}, "has no settings, given: size"),
        ("{mine}:SOURCE", {}, "of type str, not a class"),
        ("tools", {"toolz": []}, "tools has no setting 'toolz'"),
    ],
)
def test_wrong_environments_are_refused_at_the_start(
    mine: str, name: str, params: Mapping[str, Any], message: str
) -> None:
    with Path(mine).open("a", encoding="utf-8") as file:
        file.write("\nSOURCE = 'x'\n")
    with pytest.raises(ConfigError, match=message):
        load_here(name.format(mine=mine), params)


def test_users_code_is_imported_in_the_main_thread_without_a_loop(tmp_path: Path) -> None:
    """Some packages set signal handlers or run coroutines when they are imported."""
    file = tmp_path / "imports.py"
    file.write_text(
        "import asyncio, signal\n"
        "signal.signal(signal.SIGUSR2, signal.SIG_IGN)\n"
        "asyncio.run(asyncio.sleep(0))\n"
        "async def run(task, client): return 1.0\n"
        "class Env:\n"
        "    def reset(self): pass\n"
        "    def init(self, prompt): return prompt, {}\n"
        "    def step(self, action): pass\n"
    )
    for environment, params in (
        (PROGRAM, {"program": f"{file}:run"}),
        (f"{file}:Env", {}),
    ):
        with EnvironmentPool(environment, params):
            pass


def interpreter(folder: Path, options: str) -> str:
    """Return a program that starts Python without this project: its own folder and `options`."""
    program = folder / "python"
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" {options} "$@"\n')
    program.chmod(0o755)
    return str(program)


def test_another_interpreter_gets_the_package_alone(tmp_path: Path) -> None:
    """An interpreter with pydantic suffices: neither entry points nor torch are used."""
    (tmp_path / "site").mkdir()
    for name in ("pydantic", "pydantic_core", "annotated_types", "typing_inspection"):
        (tmp_path / "site" / name).symlink_to(Path(find_spec(name).origin).parent)
    (tmp_path / "site/typing_extensions.py").symlink_to(find_spec("typing_extensions").origin)
    (tmp_path / "env.py").write_text(
        "import importlib.util\n"
        "class Env:\n"
        "    tools = []\n"
        "    def reset(self, row):\n"
        "        found = [importlib.util.find_spec(name) for name in ('rlctl', 'torch', 'yaml')]\n"
        "        return str([spec is not None for spec in found])\n"
        "    def step(self, turn): raise NotImplementedError\n"
        "    def score(self): return 1.0\n"
        "    def close(self): pass\n"
    )
    python = interpreter(tmp_path, "-S")
    settings = WorkerSettings(python=python, env=["PYTHONPATH"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(tmp_path / "site"))
        with EnvironmentPool(f"{tmp_path}/env.py:Env", workers=settings) as pool:
            remote = asyncio.run(pool.open({}, "k"))
        assert remote.messages == "[True, False, False]"
        with EnvironmentPool("gridworld", {"size": 4}, workers=settings) as pool:
            assert "goal" in str(asyncio.run(pool.open({"extra_info": {"seed": 1}}, "k")).messages)


def test_another_interpreter_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    bare = interpreter(tmp_path, "-I -S")  # without packages
    with pytest.raises(ResourceError, match="exited while starting") as caught:
        EnvironmentPool("gridworld", workers=WorkerSettings(python=bare))
    assert caught.value.problems[0].hint == f"{bare} must be Python 3.11 or later with pydantic"
    with pytest.raises(ConfigError, match="'nowhere/python' is not a program"):
        EnvironmentPool("gridworld", workers=WorkerSettings(python="nowhere/python"))


@pytest.mark.skipif(sys.platform != "linux", reason="PR_SET_PDEATHSIG is specific to Linux")
def test_no_worker_outlives_the_program(mine: str) -> None:
    """Kill a program in the middle of an episode whose environment has started a process."""
    path = Path(mine).with_name("program.py")
    path.write_text(
        "import asyncio, sys\n"
        "from rlctl.plugins.agents.environments.environment_pool import EnvironmentPool\n"
        "from rlctl.plugins.agents.environments.protocol import Turn\n"
        "async def main():\n"
        "    remote = await pool.open({}, 'k')\n"
        "    for deed in ('pid', 'daemon', 'hang'):\n"
        "        step = await remote.step(Turn(deed))\n"
        "        print(step.messages[0]['content'], flush=True)\n"
        f"pool = EnvironmentPool({mine + ':Mine'!r})\n"
        "asyncio.run(main())\n"
    )
    with subprocess.Popen([sys.executable, path], stdout=subprocess.PIPE, text=True) as program:
        printed = f"{program.stdout.readline()} {program.stdout.readline()}"
        program.kill()
    pids = [int(pid) for pid in printed.split()]
    assert len(pids) == 3
    wait_until(lambda: all(gone(pid) for pid in pids), os.getpid(), "all processes end")
