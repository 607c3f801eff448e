"""Cluster of SLURM with one node, this machine, for as long as a test needs it."""

from __future__ import annotations

import os
import secrets
import socket
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from getpass import getuser
from pathlib import Path

from tests.plugins.console.queued import wait
from tests.slurm_programs import find_program

CONFIG = """\
ClusterName=one
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmdPort={ports[1]}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
SlurmUser={user}
SlurmdUser={user}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmdParameters=config_overrides
ProctrackType=proctrack/pgid
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
JobAcctGatherType=jobacct_gather/none
ReturnToService=2
MpiDefault=none
KillWait=60
OverTimeLimit=2
NodeName={host} NodeAddr=127.0.0.1 CPUs=2 State=UNKNOWN
PartitionName=a Nodes={host} Default=YES MaxTime=INFINITE State=UP
"""


@contextmanager
def one_node(folder: Path) -> Iterator[dict[str, str]]:
    """Run the daemons as this user; yield the variables with which commands find the cluster."""
    for name in ("state", "spool"):
        (folder / name).mkdir(parents=True)
    folder.chmod(0o755)  # munged refuses a socket that others cannot reach
    key = folder / "munge.key"
    key.write_bytes(secrets.token_bytes(1024))
    key.chmod(0o600)
    config = folder / "slurm.conf"
    host = socket.gethostname().partition(".")[0]
    names = {"host": host, "user": getuser(), "folder": folder, "ports": _free_ports(2)}
    config.write_text(CONFIG.format(**names))
    munge = ["munged", "--foreground", "--force", f"--key-file={key}"]
    munge += [f"--{kind}-file={folder}/munge.{kind}" for kind in ("log", "pid", "seed")]
    commands = [
        [*munge, f"--socket={folder}/munge.socket"],
        ["slurmctld", "-D", "-i", "-f", str(config)],
        ["slurmd", "-D", "-f", str(config), "-N", host],
    ]
    variables = {"SLURM_CONF": str(config)}
    with ExitStack() as stack:
        for command in commands:
            daemon, *words = command
            log = stack.enter_context((folder / f"{daemon}.out").open("wb"))
            process = subprocess.Popen(
                [str(find_program(daemon)), *words],
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
                env=os.environ | variables,
                start_new_session=True,
            )
            stack.callback(_end, process)
            if daemon == "munged":
                wait((folder / "munge.socket").exists)
        wait(lambda: "idle" in _nodes(variables))
        yield variables


def _nodes(variables: dict[str, str]) -> str:
    command = ["sinfo", "--noheader", "--format=%T"]
    done = subprocess.run(
        command, env=os.environ | variables, capture_output=True, text=True, check=False
    )
    return done.stdout


def _free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(30)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
