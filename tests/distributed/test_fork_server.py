"""Fork server of Ray workers, and the client that stands for Python."""

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from rlctl.runtime.base.rank_info import RankInfo
from rlctl.runtime.cluster import fork_server, setup_worker
from tests.distributed.ranks import in_a_process

_QUOTED = shlex.quote(sys.executable)
# Workers of Ray itself, to which a path with a space is given in quotes.
PLAIN = {} if sys.executable == _QUOTED else {"py_executable": _QUOTED}
WORKER = """
import json, os, sys
seen = [sys.argv[1:], os.getcwd(), os.environ["OF"], "torch" in sys.modules, os.getpgrp()]
print(json.dumps(seen))
sys.exit(3)
"""


def _with_worker(_: RankInfo, folder: Path) -> tuple[list[object], int, int, dict[str, str]]:
    """Run a worker of a new server; return what it prints, its exit code and its client's group."""
    fork_server.start()
    command = shlex.split(fork_server.python(None)["py_executable"])
    done = subprocess.Popen(
        [*command, "worker.py", "one", "two"],
        cwd=folder,
        env={"OF": "client"},
        stdout=subprocess.PIPE,
        process_group=0,
    )
    out, _ = done.communicate()
    return json.loads(out), done.returncode, done.pid, fork_server.python("10.0.0.1:6379")


@pytest.mark.skipif(sys.platform != "linux", reason="forks on Linux")
def test_a_worker_is_a_fork_with_arguments_folder_and_environment_of_its_client(
    tmp_path: Path,
) -> None:
    (tmp_path / "worker.py").write_text(WORKER)
    printed, _, client, elsewhere = in_a_process(_with_worker, tmp_path)
    assert printed == [["one", "two"], str(tmp_path), "client", True, client]
    assert elsewhere == PLAIN, "a cluster of several machines"


def test_a_client_without_a_server_is_python() -> None:
    command = [sys.executable, "-IS", fork_server.CLIENT, "rlctl-none", "-c", WORKER, "one"]
    done = subprocess.run(command, env=os.environ | {"OF": "x"}, stdout=subprocess.PIPE, text=True)
    assert done.returncode == 3
    assert json.loads(done.stdout)[:4] == [["one"], os.getcwd(), "x", False]


def test_no_fork_with_ray_threads_or_a_cluster_of_several_machines(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "fork", lambda: pytest.fail("forked"))
    monkeypatch.setattr(fork_server.threading, "active_count", lambda: 1)
    fork_server.start("10.0.0.1:6379")
    monkeypatch.setitem(sys.modules, "ray", fork_server)
    fork_server.start()
    monkeypatch.delitem(sys.modules, "ray")
    monkeypatch.setattr(fork_server.threading, "active_count", lambda: 2)
    fork_server.start()
    assert fork_server.python(None) == PLAIN


SEEN = """
import json, os, sys
print(json.dumps([sys.argv[1:], os.environ["OF"], sys.flags.isolated]))
"""


@pytest.mark.parametrize(
    ("context", "words", "isolated"),
    [
        ({"env_vars": {"OF": "${FOR_X}-${NOT_SET}"}}, ["--language=PYTHON"], 0),
        (
            {"py_executable": shlex.join([sys.executable, "-I"]), "command_prefix": []},
            ["--language=PYTHON"],
            1,
        ),
        # Left to Ray's own script.
        ({"command_prefix": ["OF=x-", "&&", "export OF", "&&"]}, ["--language=PYTHON"], 0),
    ],
)
def test_a_worker_starts_in_its_runtime_environment(
    context: dict[str, object], words: list[str], isolated: int, tmp_path: Path
) -> None:
    (tmp_path / "worker.py").write_text(SEEN)
    given = f"--serialized-runtime-env-context={json.dumps(context)}"
    done = subprocess.run(
        [sys.executable, setup_worker.__file__, tmp_path / "worker.py", "--a=b c", *words, given],
        env=os.environ | {"FOR_X": "x", "OF": "x-"},
        stdout=subprocess.PIPE,
        check=True,
    )
    assert json.loads(done.stdout) == [["--a=b c"], "x-", isolated]
