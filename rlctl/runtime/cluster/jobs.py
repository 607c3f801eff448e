"""Submission of rlctl commands to a remote cluster through Ray Jobs, with the project's files."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import shlex
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import contextmanager
from importlib.metadata import distribution
from pathlib import Path
from typing import TypeVar

from ray.exceptions import AuthenticationError, RpcError
from ray.job_submission import JobStatus, JobSubmissionClient

import rlctl
from rlctl.errors import ConflictError, NotFoundError, ResourceError, UsageError
from rlctl.recipes.search_path import LIBRARY
from rlctl.runtime.cluster.session import INTERFACES

T = TypeVar("T")

MAX_PACKED = 100 * 2**20  # bytes: Ray keeps packages in the memory of its head node
_NOT_PACKED = {"runs", "__pycache__", "node_modules", "build", "dist"}
_REPLY_S = 60.0
_AGENT_S = 180.0  # the agent that accepts jobs starts some time after the dashboard
# Ray's first line in the log of a job.
_RAY_LINE = re.compile(r"^\S+ \S+\tINFO job_manager\.py:\d+ -- .*\n?", re.MULTILINE)
_ENDED = {JobStatus.SUCCEEDED, JobStatus.FAILED, JobStatus.STOPPED}


def submit(address: str, name: str, words: Sequence[str], project: Path) -> None:
    """Submit `rlctl WORDS` as job `name` to the cluster at `address`.

    `address` is `auto`, `ray://host:10001` or `http://host:8265`. The job's working folder is a
    copy of `project`: tracked files and others that git does not ignore, or without git all files,
    in both cases but for untracked caches, builds and runs. Raises UsageError if it is too large,
    ConflictError if the name is in use, and ResourceError if the cluster cannot be reached.
    """
    client = _client(address)
    with _packed(project) as folder:
        python = ["python", "-m", "rlctl"]
        # Not in the environment of the job, with which that of its session would conflict.
        given = [f"{name}={os.environ[name]}" for name in INTERFACES if name in os.environ]
        job = {
            "entrypoint": shlex.join([*(given and ["env", *given]), *python, *words]),
            "submission_id": name,
            "runtime_env": {"working_dir": str(folder)},
        }
        deadline = time.monotonic() + _AGENT_S
        sent = False
        while True:
            try:
                _with_deadline(lambda: client.submit_job(**job), address)
                return
            except (ValueError, RuntimeError, ResourceError) as error:
                if "already" in str(error):
                    if sent:
                        return
                    raise ConflictError(
                        f"the cluster has a job named {name!r}",
                        where=address,
                        hint="choose another name: --name NAME",
                    ) from error
                # A busy agent that may have the job, or a dashboard that is not listening yet.
                lost = "ServerDisconnected" in str(error) or isinstance(error, ResourceError)
                if not lost and "No available agent" not in str(error):
                    raise ResourceError(f"the job was refused: {error}", where=address) from error
                if time.monotonic() > deadline:
                    raise ResourceError(f"the job was not taken: {error}", where=address) from error
                sent |= lost
            time.sleep(1.0)


def follow(address: str, name: str, write: Callable[[str], object]) -> int:
    """Pass the job's output to `write` until the job ends. Return its exit code (1: unknown)."""
    client = _client(address)

    async def stream() -> None:
        async for part in client.tail_job_logs(name):
            write(_RAY_LINE.sub("", part))

    try:
        _with_deadline(lambda: client.get_job_info(name), address)
    except RuntimeError as error:
        raise NotFoundError(
            f"the cluster has no job {name!r}", where=address, hint="`ray job list` lists the jobs"
        ) from error
    asyncio.run(stream())
    while (info := _with_deadline(lambda: client.get_job_info(name), address)).status not in _ENDED:
        asyncio.run(asyncio.sleep(0.2))  # the log ends shortly before the final status is set
    if info.status == JobStatus.SUCCEEDED:
        return 0
    return info.driver_exit_code or 1


@contextmanager
def _packed(project: Path) -> Iterator[Path]:
    """Yield a temporary folder with the project's files and rlctl with its entry points.

    The cluster must have rlctl's dependencies, but not rlctl itself. Raises UsageError if the files
    exceed `MAX_PACKED`.
    """
    with tempfile.TemporaryDirectory(prefix="rlctl-job-") as created:
        target = Path(created)
        files = _files(project)
        size = sum((project / file).stat().st_size for file in files)
        if size > MAX_PACKED:
            largest = max(files, key=lambda file: (project / file).stat().st_size)
            raise UsageError(
                f"the project's files are {size / 2**20:.0f} MiB; "
                f"a job may have at most {MAX_PACKED // 2**20} MiB",
                where=f"{project} (largest file: {largest})",
                hint="run the command in the folder of the recipe, add large files to .gitignore, "
                "or move data to storage that the cluster can read",
            )
        for file in files:
            (target / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(project / file, target / file)
        package = Path(rlctl.__file__).parent
        shutil.copytree(
            package,
            target / "rlctl",
            dirs_exist_ok=True,
            ignore=shutil.ignore_patterns("__pycache__"),
        )
        shutil.copytree(LIBRARY, target / "rlctl" / "recipes" / "library", dirs_exist_ok=True)
        metadata = target / f"rlctl-{rlctl.__version__}.dist-info"
        metadata.mkdir(exist_ok=True)
        for name in ("METADATA", "entry_points.txt"):
            (metadata / name).write_text(
                distribution("rlctl").read_text(name) or "", encoding="utf-8"
            )
        yield target


def _files(project: Path) -> list[Path]:
    """Return the relative paths of the files that belong to a project.

    These are the tracked ones, and others that git does not ignore, without caches, runs and hidden
    ones. Of a tracked link to a folder, or a submodule, they are the files in it.
    """
    try:
        tracked = _listed(project, "--cached")
        others = _listed(project, "--others", "--exclude-standard")
    except (OSError, subprocess.SubprocessError):
        tracked = []
        others = [path.relative_to(project) for path in project.rglob("*")]
    for folder in [path for path in tracked if (project / path).is_dir()]:
        others += [path.relative_to(project) for path in (project / folder).rglob("*")]
    usual = [
        path
        for path in others
        if not any(part in _NOT_PACKED or part.startswith(".") for part in path.parts)
    ]
    return [path for path in dict.fromkeys([*tracked, *usual]) if (project / path).is_file()]


def _listed(project: Path, *options: str) -> list[Path]:
    command = ["git", "-C", str(project), "ls-files", "-z", *options]
    done = subprocess.run(command, capture_output=True, check=True, timeout=_REPLY_S)
    return [Path(os.fsdecode(name)) for name in done.stdout.split(b"\0") if name]


def _client(address: str) -> JobSubmissionClient:
    # Ray logs each upload and the end of each stream, at levels that its modules set.
    for name in ("dashboard.modules.dashboard_sdk", "dashboard.modules.job.sdk"):
        logging.getLogger(f"ray.{name}").setLevel(logging.WARNING)
    logging.getLogger("ray._private.runtime_env.packaging").setLevel(logging.WARNING)
    return _with_deadline(lambda: JobSubmissionClient(address), address)


def _with_deadline(call: Callable[[], T], address: str) -> T:
    """Return the result of `call`, or raise its error; it runs in a thread with a deadline.

    Raises ResourceError if the cluster cannot be reached or requires a token.
    """
    reply: Future[T] = Future()

    def run() -> None:
        try:
            reply.set_result(call())
        except BaseException as error:  # raised again by the waiting thread
            reply.set_exception(error)

    threading.Thread(target=run, name="ray-jobs", daemon=True).start()
    try:
        return reply.result(_REPLY_S)
    except AuthenticationError as error:
        hint = "set RAY_AUTH_MODE=token; put the token in ~/.ray/auth_token or RAY_AUTH_TOKEN"
        raise ResourceError("the cluster requires Ray's token", where=address, hint=hint) from error
    except (OSError, FutureTimeoutError, RpcError) as error:  # also those of `requests`
        first_line = next(iter(str(error).strip().splitlines()), None)
        raise ResourceError(
            f"no Ray cluster replied: {first_line or f'no reply within {_REPLY_S:.0f} s'}",
            where=address,
            hint="give the address of the cluster's dashboard, http://HEAD:8265; "
            "`ray start --head --include-dashboard=true` starts one",
        ) from error
