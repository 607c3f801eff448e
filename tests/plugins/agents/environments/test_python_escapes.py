"""Programs that try to leave the python tool, with each kind of isolation that this machine has."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest

from rlctl.plugins.agents.environments import python_tool
from rlctl.plugins.agents.environments.python_tool import PythonParams, PythonTool
from rlctl.runtime.sandbox import isolation, process_limits
from rlctl.runtime.sandbox.namespaces import Namespaces
from tests.plugins.agents.environments.escapes import LIMITED, PRELUDE, REFUSED, Escape

KINDS = ["bubblewrap", "namespaces", "neither"]
SECRET = "sk-of-the-user"
# Programs that may use the network are isolated as those that may not, but for these.
NETWORK = {"TCP", "TCP over IPv6", "UDP", "netlink"}
# Runs each attempt in a process, and prints its outcome.
ATTEMPTS = """
for name, code in ATTEMPTS.items():
    if os.fork() == 0:
        try:
            exec(code)
            print(json.dumps([name, "succeeded"]), flush=True)
        except OSError as error:
            print(json.dumps([name, "refused"]), flush=True)
        except BaseException as error:
            print(json.dumps([name, repr(error)]), flush=True)
        os._exit(0)
    os.wait()
"""


@dataclass
class Outside:
    """Objects that programs must leave alone, and their names in programs."""

    file: Path
    victim: subprocess.Popen[bytes]
    sockets: list[socket.socket]
    names: dict[str, object]

    def check(self) -> None:
        assert self.file.read_text(encoding="utf-8") == "mine"
        status = self.file.stat()
        assert (status.st_mode & 0o777, status.st_mtime, status.st_nlink) == (0o600, 1000.0, 1)
        assert os.listxattr(self.file) == []
        assert sorted(self.file.parent.iterdir()) == [self.file]
        assert self.victim.poll() is None
        assert os.getpriority(os.PRIO_PROCESS, self.victim.pid) == os.getpriority(0, 0)
        for reached in self.sockets:
            with pytest.raises(BlockingIOError):
                reached.accept() if reached.type == socket.SOCK_STREAM else reached.recv(1)


@pytest.fixture
def outside(tmp_path: Path) -> Iterator[Outside]:
    (tmp_path / "users").mkdir()
    file, path, name = tmp_path / "users" / "file", tmp_path / "socket", f"\0rlctl-{os.getpid()}"
    file.write_text("mine", encoding="utf-8")
    file.chmod(0o600)
    os.utime(file, (1000, 1000))
    with ExitStack() as stack:
        sleep = [sys.executable, "-c", "import time; time.sleep(3600)"]
        victim = stack.enter_context(subprocess.Popen(sleep, env={"SECRET": SECRET}))
        stack.callback(victim.kill)
        tcp = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        port = tcp.getsockname()[1]
        sockets = [tcp]
        for family, kind, address in (
            (socket.AF_INET, socket.SOCK_DGRAM, ("127.0.0.1", port)),
            (socket.AF_UNIX, socket.SOCK_STREAM, str(path)),
            (socket.AF_UNIX, socket.SOCK_STREAM, name),
            (socket.AF_UNIX, socket.SOCK_DGRAM, f"{name}-packets"),
        ):
            sockets.append(stack.enter_context(socket.socket(family, kind)))
            sockets[-1].bind(address)
            if kind == socket.SOCK_STREAM:
                sockets[-1].listen()
        for each in sockets:
            each.setblocking(False)
        names: dict[str, object] = {"FILE": str(file), "FOLDER": str(file.parent)}
        names |= {"VICTIM": victim.pid, "PORT": port, "PATH": str(path), "NAME": name}
        yield Outside(file, victim, sockets, names)


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Use one kind of isolation; skip those that this machine does not have."""
    return use(request.param, monkeypatch)


OLD_KERNEL = (
    "import os; from types import SimpleNamespace; "
    "os.uname = lambda kept=os.uname(): SimpleNamespace(release='5.13.0', machine=kept.machine); "
)


def use(kind: str, monkeypatch: pytest.MonkeyPatch) -> str:
    if kind == "bubblewrap" and not isolation.has_bubblewrap():
        pytest.skip("needs bubblewrap")
    if kind == "namespaces" and isolation.own_namespaces() < Namespaces.FILES:
        pytest.skip("needs user namespaces")
    if kind != "bubblewrap":
        for module in (python_tool, isolation):
            monkeypatch.setattr(module, "has_bubblewrap", lambda: False)
    if kind == "neither":
        without = (
            "from rlctl.runtime.sandbox import namespaces; "
            "namespaces.enter_namespaces = lambda *_, **__: namespaces.Namespaces.NONE; "
        )
        start, end = python_tool._BOOT.split("from rlctl", 1)
        monkeypatch.setattr(python_tool, "_BOOT", f"{start}{without}from rlctl{end}")
        monkeypatch.setattr(isolation, "own_namespaces", lambda: Namespaces.NONE)
    return kind


def settings(**values: float) -> PythonParams:
    return PythonParams.model_validate(values)


def run(params: PythonParams, code: str, outside: Outside, **names: object) -> str:
    """Return the result of a program, or the text of its error."""
    named = "".join(f"{key} = {value!r}\n" for key, value in {**outside.names, **names}.items())
    try:
        tool = PythonTool(params)
        call = tool.call({"code": f"import json\n{PRELUDE}{named}{code}"})
        return asyncio.run(call).text
    except TimeoutError as error:
        return str(error)


def marked(mark: str) -> list[str]:
    """Return the processes that have the name `mark`."""
    found: list[str] = []
    for file in Path("/proc").glob("[0-9]*/stat"):
        try:
            text = file.read_text(encoding="utf-8")
        except OSError:
            continue
        if f"({mark})" in text:
            found.append(text)
    return found


@pytest.mark.parametrize("allow_network", [False, True])
def test_programs_reach_nothing_outside(kind: str, allow_network: bool, outside: Outside) -> None:
    attempts = {
        name: code for name, code in REFUSED.items() if not (allow_network and name in NETWORK)
    }
    params = settings(time_limit_s=120, output_chars=100_000, allow_network=allow_network)
    text = run(params, ATTEMPTS, outside, ATTEMPTS=attempts)
    outcomes = dict(json.loads(line) for line in text.splitlines())
    assert outcomes == dict.fromkeys(attempts, "refused")
    outside.check()


def check_limited(escape: Escape, kind: str, outside: Outside) -> None:
    mark, started = f"escape-{os.getpid() % 10**6}", time.monotonic()
    ends = escape.result in ("timed out", "")
    params = settings(time_limit_s=2 if ends else 300, memory_mb=128, file_mb=2)
    text = run(params, escape.code, outside, MARK=mark)
    if kind == "neither" and escape.files:
        assert "fill the disk" in str(isolation.missing_isolation())
    else:
        assert escape.result in text
        assert ends or not escape.result or "timed out" not in text
    assert marked(mark) == []
    assert time.monotonic() - started < 600  # a program waits for 600 s
    outside.check()


@pytest.mark.parametrize("name", LIMITED)
def test_programs_keep_their_limits(
    name: str, outside: Outside, monkeypatch: pytest.MonkeyPatch
) -> None:
    kinds = (isolation.has_bubblewrap(), isolation.own_namespaces() >= Namespaces.FILES, True)
    first = KINDS[kinds.index(True)]
    check_limited(LIMITED[name], use(first, monkeypatch), outside)


@pytest.mark.soak
@pytest.mark.parametrize("name", LIMITED)
def test_programs_keep_their_limits_with_each_isolation(
    name: str, kind: str, outside: Outside
) -> None:
    check_limited(LIMITED[name], kind, outside)


def test_secrets_of_other_processes_are_nowhere(kind: str, outside: Outside) -> None:
    code = """
import glob
for path in glob.glob("/proc/*/environ"):
    try:
        print("found" if b"SECRET=" in open(path, "rb").read() else "")
    except OSError:
        pass
"""
    for allow_network in (False, True):
        params = settings(allow_network=allow_network, time_limit_s=60)
        assert run(params, code, outside).strip() == ""


def test_threads_of_a_namespace_have_a_limit(
    kind: str, outside: Outside, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before Linux 5.14 it would count all threads of the user; root has none."""
    if kind == "neither":
        return
    params = settings(time_limit_s=60)
    assert run(params, "print(resource.getrlimit(resource.RLIMIT_NPROC)[0])", outside) == "256"
    threads = "for _ in range(300): threading.Thread(target=time.sleep, args=[2]).start()"
    if os.getuid():
        assert "can't start new thread" in run(params, threads, outside)
    boot = python_tool._BOOT.replace("from rlctl", OLD_KERNEL + "from rlctl", 1)
    monkeypatch.setattr(python_tool, "_BOOT", boot)
    assert run(params, "print(resource.getrlimit(resource.RLIMIT_NPROC)[0])", outside) != "256"


def test_programs_may_do_the_usual(kind: str, outside: Outside) -> None:
    code = """
import asyncio, shutil, subprocess, tempfile
from concurrent.futures import ThreadPoolExecutor
asyncio.run(asyncio.sleep(0))
with ThreadPoolExecutor(4) as pool:
    print(*pool.map(abs, [-1, 2]))
open("a", "w").write("text")
shutil.copyfile("a", "b")
print(subprocess.run(["cat", "b"], capture_output=True, text=True).stdout)
with tempfile.NamedTemporaryFile() as file:
    print(file.name.startswith(os.environ["HOME"]))
process = subprocess.Popen(["sleep", "600"])
process.kill()
print(process.wait(), open("/dev/null", "w").write("x"), resource.getrlimit(resource.RLIMIT_CORE))
if KIND != "neither":
    shutil.copy("a", "c")
"""
    text = run(settings(time_limit_s=60), code, outside, KIND=kind)
    assert text == "1 2\ntext\nTrue\n-9 1 (0, 0)"


@pytest.mark.parametrize(
    ("namespaces", "landlock", "has_filter", "missing"),
    [
        (Namespaces.VIEW, 0, True, None),
        (Namespaces.VIEW, 7, False, "use Unix sockets and memory that no limit counts"),
        (Namespaces.FILES, 0, True, "see your other processes"),
        (
            Namespaces.PROCESSES,
            6,
            True,
            "fill the disk with their own files, see your other processes",
        ),
        (
            Namespaces.NONE,
            1,
            True,
            "empty your files, fill the disk with their own files, see your other processes, "
            "send signals to them",
        ),
        (
            Namespaces.NONE,
            6,
            False,
            "change permissions, times and attributes of your files, fill the disk with their own "
            "files, see your other processes, use Unix sockets and memory that no limit counts",
        ),
        (
            Namespaces.NONE,
            -1,
            True,
            "write to, change and delete your files, fill the disk with their own files, see your "
            "other processes, send signals to them, read and change their memory",
        ),
    ],
)
def test_missing_isolation_is_named(
    namespaces: Namespaces,
    landlock: int,
    has_filter: bool,
    missing: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(isolation, "has_bubblewrap", lambda: False)
    monkeypatch.setattr(isolation, "own_namespaces", lambda: namespaces)
    monkeypatch.setattr(isolation, "can_filter", lambda: has_filter)
    monkeypatch.setattr(isolation, "bubblewrap_advice", lambda: None)
    monkeypatch.setattr(process_limits, "_version", lambda: landlock)
    named = isolation.missing_isolation()
    assert (named and named.partition("python tool can ")[2]) == missing
