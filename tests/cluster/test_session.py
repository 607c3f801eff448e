"""Ray session started by rlctl: settings of `ray_kwargs.ray_init` and cleanup."""

from __future__ import annotations

import fcntl
import importlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import NoReturn

import grpc
import psutil
import pytest
import ray
import torch
from ray._private import parameter
from ray.exceptions import ActorUnavailableError

import rlctl.runtime
from rlctl.errors import MissingExtraError, ResourceError, RlctlError, Terminated
from rlctl.recipes.compose import compose
from rlctl.runtime.base.rank_info import RankInfo
from rlctl.runtime.cluster import daemons, fork_server, ray_access
from rlctl.runtime.cluster.pool import gather
from rlctl.runtime.cluster.session import _Local, _options, ray_session
from rlctl.runtime.cluster.session_folder import remove_stale, session_folder
from rlctl.runtime.rollout.rendezvous import use_interface_to
from rlctl.runtime.workers.pool_process import Process
from tests.distributed.ranks import on_ranks, rank_info
from tests.processes import words_of

MARK = b"folder of an rlctl session\n"


def folder_in_tmp(mode: int = 0o700, content: bytes | None = MARK) -> Path:
    """Create a folder as a killed session leaves it; without `content`, one without a lock.

    It becomes visible to `remove_stale`, also to that of other tests, with `planted`.
    """
    folder = Path(tempfile.mkdtemp(prefix="new-", dir="/tmp"))
    if content is not None:
        (folder / "lock").write_bytes(content)
        (folder / "lock").chmod(0o600)
    folder.chmod(mode)
    return folder


def planted(folder: Path) -> Path:
    """Give a folder the name of a session's."""
    return folder.rename(folder.with_name(f"rlctl-ray-{folder.name}"))


def listening() -> dict[str, set[str]]:
    """Return the addresses on which this process and its children listen, by process name."""
    found: dict[str, set[str]] = {}
    for process in [psutil.Process(), *psutil.Process().children(recursive=True)]:
        with suppress(psutil.NoSuchProcess):  # it has exited
            addresses = {
                each.laddr.ip.removeprefix("::ffff:")
                for each in process.net_connections(kind="inet")
                if each.status == psutil.CONN_LISTEN
            }
            found[process.name()] = found.get(process.name(), set()) | addresses
    return found


def in_this_group() -> set[str]:
    """Return the names of this process's children that get a signal to its process group."""
    found = set()
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess, ProcessLookupError):  # it has exited
            if os.getpgid(process.pid) == os.getpgid(0):
                found.add(process.name())
    return found


def _listening(_: RankInfo) -> set[str]:
    return set().union(*listening().values())


def test_a_python_with_a_space_in_its_path_is_quoted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/a b/python")
    assert fork_server.python("10.0.0.1:6379") == {"py_executable": "'/a b/python'"}


def test_ranks_of_one_host_listen_on_the_loopback_interface() -> None:
    """TCPStore and gloo would listen on all interfaces, or on that of the host's name."""
    for addresses in on_ranks(2, _listening):
        assert addresses == {"127.0.0.1"}


def test_gloo_uses_the_interface_that_leads_to_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not that of the machine's name, which often has no address of a network."""
    for value, expected in (("", "lo"), ("eth7", "eth7")):
        monkeypatch.setenv("GLOO_SOCKET_IFNAME", value)
        use_interface_to("127.0.0.1")
        assert os.environ["GLOO_SOCKET_IFNAME"] == expected


def test_the_address_of_a_process_group_is_taken_until_it_is_joined() -> None:
    process = Process(rank_info(world_size=2))
    host, port, _ = process.address("0.0.0.0").split()  # for processes elsewhere: it has a port
    with socket.socket() as other, pytest.raises(OSError, match="in use"):
        other.bind((host, int(port)))
    assert Process(rank_info()).address() == "", "a single process needs no store"


def test_a_planted_lock_link_changes_nothing(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious")
    with_links = [folder_in_tmp(0o777, None), folder_in_tmp(0o700, None)]
    for folder in with_links:
        (folder / "lock").symlink_to(victim)
    linked = Path("/tmp") / f"rlctl-ray-link-{os.getpid()}"
    (tmp_path / "lock").write_bytes(MARK)
    linked.symlink_to(tmp_path)
    foreign = folder_in_tmp()
    unmarked, hard = folder_in_tmp(content=b""), folder_in_tmp(0o777)
    if os.geteuid() == 0:
        os.chown(foreign, 12345, 12345)
    own = [*with_links, unmarked, hard, *([foreign] if os.geteuid() == 0 else [])]
    kept = [linked, *map(planted, own)]
    try:
        remove_stale()
        assert [folder for folder in kept if not folder.exists()] == []
        assert victim.read_text() == "precious"
        assert (tmp_path / "lock").read_bytes() == MARK
    finally:
        linked.unlink()
        for folder in {*kept, foreign} - {linked}:
            subprocess.run(["rm", "-rf", folder], check=True)


def test_a_session_folder_is_private_and_removed() -> None:
    with session_folder() as folder:
        folder.chmod(0o777)  # as Ray does
        assert folder.parent.stat().st_mode & 0o777 == 0o700
        assert (folder.parent / "lock").stat().st_mode & 0o777 == 0o600
        # A socket of Ray: session_<date>_<time>_<microseconds>_<pid>/sockets/plasma_store
        assert (
            len(f"{folder}/session_2026-01-01_00-00-00_000000_4194304/sockets/plasma_store") < 107
        )
        remove_stale()
        assert folder.is_dir(), "its lock is held"
    assert not folder.parent.exists()


def test_the_token_file_is_for_its_owner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    token = tmp_path / ".ray" / "auth_token"
    ray_access.protect_token()
    assert token.stat().st_mode & 0o777 == 0o600
    assert len(written := token.read_text()) == 64
    token.chmod(0o644)  # as Ray creates it
    ray_access.protect_token()
    assert token.stat().st_mode & 0o777 == 0o600
    assert token.read_text() == written


@pytest.mark.parametrize(
    ("process", "recipe", "expected"),
    [
        ({}, {}, {"GOMP_SPINCOUNT": "3000"}),
        ({"OMP_WAIT_POLICY": "active"}, {}, {"OMP_WAIT_POLICY": "active"}),
        ({}, {"GOMP_SPINCOUNT": 9}, {"GOMP_SPINCOUNT": "9"}),
    ],
)
def test_openmp_threads_spin_briefly_unless_the_user_decides(
    process: dict[str, str],
    recipe: dict[str, str],
    expected: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "environ", process.copy())
    importlib.reload(rlctl.runtime)
    init = compose("ppo").config.ray_kwargs.ray_init
    options = _options(init.model_copy(update={"runtime_env": {"env_vars": recipe}}), 1, None)
    names = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
    variables = options["runtime_env"]["env_vars"]
    assert {name: variables[name] for name in names if name in variables} == expected
    assert {
        name: os.environ[name] for name in names if name in os.environ
    }.keys() <= expected.keys()


def test_settings_reach_ray_which_is_private_and_stale_folders_are_removed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("RAY_AUTH_MODE", raising=False)
    dead, alive = planted(folder_in_tmp()), folder_in_tmp()
    held = (alive / "lock").open("r+")
    fcntl.flock(held, fcntl.LOCK_EX)
    alive = planted(alive)
    given = [
        "num_gpus=3",
        "object_store_memory=90000000",
        "runtime_env={env_vars:{RLCTL_TEST_COLOUR:teal,OMP_NUM_THREADS:2}}",
    ]
    init = compose(
        "ppo", [f"ray_kwargs.ray_init.{text}" for text in given]
    ).config.ray_kwargs.ray_init
    tracker = subprocess.Popen(["sleep", "3600"])  # like the process of W&B, which outlives Ray
    signal.signal(signal.SIGHUP, _terminate)
    code, scratch = 0, Path()
    try:
        with ray_session(init, 2, 1, 120.0):
            assert (dead.exists(), alive.exists()) == (False, True)
            alive.joinpath("lock").unlink()
            alive.rmdir()
            total = ray.cluster_resources()
            assert (total["CPU"], total["GPU"], total["object_store_memory"]) == (2, 3, 90_000_000)
            seen = ray.get(
                ray.remote(
                    lambda: [
                        os.environ.get(name)
                        for name in ("RLCTL_TEST_COLOUR", "OMP_NUM_THREADS", "GOMP_SPINCOUNT")
                    ]
                ).remote(),
                timeout=600,
            )
            assert seen == ["teal", "2", "3000"]
            scratch = Path(ray.get(ray.remote(tempfile.mkdtemp).remote(), timeout=600))
            assert scratch.is_dir()
            addresses = listening()
            assert {"gcs_server", "raylet"} <= addresses.keys()
            scripts = {
                word
                for each in psutil.Process().children(recursive=True)
                for word in words_of(each.pid)
            }
            assert not [word for word in scripts if word.endswith(("/dashboard.py", "monitor.py"))]
            assert not {"gcs_server", "raylet"} & in_this_group(), "a signal to it would end them"
            assert set().union(*addresses.values()) == {"127.0.0.1"}, addresses
            gcs = ray.get_runtime_context().gcs_address
            with (
                grpc.insecure_channel(gcs) as channel,
                pytest.raises(grpc.RpcError, match="UNAUTHENTICATED"),
            ):
                channel.unary_unary("/ray.rpc.NodeInfoGcsService/CheckAlive")(b"", timeout=60)
            assert scratch.parents[1].stat().st_mode & 0o777 == 0o700
            threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGHUP)).start()
            ray.get(ray.remote(lambda: time.sleep(600)).remote(), timeout=600)
    except Terminated as error:
        code = int(error.code or 0)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    assert code == 129, "Ray raises SystemExit(1) for the exit of a signal handler"
    assert not scratch.exists(), "temporary files of workers are removed with the session"
    assert tracker.poll() is None, "only processes of Ray are stopped"
    os.environ.pop("RAY_AUTH_MODE")  # set by Ray
    tracker.kill()
    tracker.wait()


def test_a_started_cluster_has_the_gpus_that_torch_sees(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = ["ray_kwargs.ray_init.num_gpus=3"]
    inits = [compose("ppo", each).config.ray_kwargs.ray_init for each in ([], given)]
    for count, expected in ((0, [None, 3]), (2, [2, 3])):
        monkeypatch.setattr(torch.cuda, "device_count", lambda count=count: count)
        options = [
            _Local(_options(init, 1, None), init, 1, 60.0, set())._options(tmp_path, False)
            for init in inits
        ]
        assert [each["num_gpus"] for each in options] == expected


def test_an_unknown_release_of_ray_starts_all_its_daemons(monkeypatch: pytest.MonkeyPatch) -> None:
    original = parameter.RayParams
    with daemons.fewer_daemons(False, 60, threading.Event()):
        assert parameter.RayParams is not original
    monkeypatch.setattr(daemons, "version", lambda _: "2.61.0")
    with daemons.fewer_daemons(False, 60, threading.Event()):
        assert parameter.RayParams is original
    monkeypatch.undo()
    monkeypatch.delattr(parameter, "RayParams")
    with daemons.fewer_daemons(False, 60, threading.Event()):
        assert not hasattr(parameter, "RayParams"), "a release without the name is left as it is"


@pytest.mark.parametrize(
    ("setting", "user"),
    [
        ("address=192.0.2.2:6399", r"the Ray cluster at 192\.0\.2\.2:6399"),
        ("include_dashboard=true", "Ray's dashboard"),
    ],
)
def test_clusters_and_dashboard_name_the_extra_that_they_need(
    setting: str, user: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_access, "find_spec", lambda name: None if name == "grpc" else name)
    init = compose("ppo", [f"ray_kwargs.ray_init.{setting}"]).config.ray_kwargs.ray_init
    message = rf"{user} needs packages that are not installed: grpc\n.*\bcluster\b"
    with pytest.raises(MissingExtraError, match=message):
        ray_access.check_packages(init)


def test_a_cluster_that_refuses_the_connection_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(**options: object) -> None:
        raise ConnectionError(f"Failed to connect to Ray cluster at {options['address']}")

    monkeypatch.setattr(ray, "init", refuse)
    address = ["ray_kwargs.ray_init.address=192.0.2.2:6399"]
    init = compose("ppo", address).config.ray_kwargs.ray_init
    message = r"cluster at 192\.0\.2\.2:6399\n.*RAY_AUTH_MODE=token"
    with pytest.raises(ResourceError, match=message), ray_session(init, 2, 1, 60.0):
        pass


def test_a_lost_raylet_of_another_cluster_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def lose(*_: object, **__: object) -> None:
        raise ActorUnavailableError("Socket closed", None)

    monkeypatch.setattr(ray, "get", lose)
    with pytest.raises(RlctlError, match=r"during actor\.update: it, its node or the raylet"):
        gather([], "actor.update", 1.0, lambda: "worker.log")


def _terminate(number: int, _frame: FrameType | None) -> NoReturn:
    raise Terminated(number)


class _OpenServer(grpc.GenericRpcHandler):
    """Service that replies to every call, like Ray's control store without a token."""

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler:
        del handler_call_details
        return grpc.unary_unary_rpc_method_handler(lambda *_: b"")


def test_a_cluster_that_accepts_everybody_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    server = grpc.server(ThreadPoolExecutor(1), handlers=[_OpenServer()])
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    try:
        ray_access.require_token(address)  # only this machine reaches it
        monkeypatch.setattr(ray_access, "is_loopback", lambda _: False)
        with pytest.raises(ResourceError, match="requires no token") as raised:
            ray_access.require_token(address)
        assert "RAY_AUTH_MODE=token" in (raised.value.problems[0].hint or "")
    finally:
        server.stop(None).wait()


@pytest.mark.parametrize(
    ("address", "local"),
    [("127.0.0.1:1", True), ("[::1]:1", True), ("localhost:1", True), ("192.0.2.2:1", False)],
)
def test_loopback_addresses(address: str, local: bool) -> None:
    assert ray_access.is_loopback(address) == local
