"""Commands of rlctl that run on a Ray cluster elsewhere: submitted through Ray Jobs, with rlctl and the project's files packed along."""

from __future__ import annotations

import asyncio
import shlex
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotInTime
from contextlib import contextmanager
from importlib.metadata import distribution
from pathlib import Path
from typing import TypeVar

from ray.exceptions import AuthenticationError
from ray.job_submission import JobStatus, JobSubmissionClient

import rlctl
from rlctl.errors import ConflictError, NotFoundError, ResourceError, UsageError
from rlctl.recipes.search_path import LIBRARY

T = TypeVar("T")

MAX_PACKED = 100 * 2**20  # bytes: Ray keeps packages in the memory of its head node
_NOT_PACKED = {"runs", "__pycache__", "node_modules", "build", "dist"}
_ANSWER_S = 60.0
_AGENT_S = 180.0  # the agent that takes jobs comes up some time after the dashboard
_ENDED = {JobStatus.SUCCEEDED, JobStatus.FAILED, JobStatus.STOPPED}


def submit(address: str, name: str, words: Sequence[str], project: Path) -> None:
    """Start `rlctl WORDS` on the cluster at `address` (`auto`, `ray://host:10001` or `http://host:8265`) as the job `name`.

    The job's working folder is a copy of `project`: what git knows of it, or everything but caches, environments and runs. Raises
    UsageError when that is more than Ray carries, ConflictError when there is a job of that name, ResourceError when nobody answers.
    """
    client = _client(address)
    with _packed(project) as folder:
        entrypoint = shlex.join(["python", "-m", "rlctl", *words])
        job = {
            "entrypoint": entrypoint,
            "submission_id": name,
            "runtime_env": {"working_dir": str(folder)},
        }
        deadline = time.monotonic() + _AGENT_S
        while True:
            try:
                _within(lambda: client.submit_job(**job), address)
                return
            except (ValueError, RuntimeError) as error:
                if "already" in str(error):
                    raise ConflictError(
                        f"the cluster has a job named {name!r}",
                        where=address,
                        hint="--name gives it another",
                    ) from error
                if "No available agent" not in str(error) or time.monotonic() > deadline:
                    raise ResourceError(f"the job was refused: {error}", where=address) from error
            time.sleep(1.0)


def follow(address: str, name: str, write: Callable[[str], object]) -> int:
    """Pass on what the job prints until it ends, and return its exit code; 1 where it ended without one."""
    client = _client(address)

    async def stream() -> None:
        async for part in client.tail_job_logs(name):
            write(part)

    try:
        _within(lambda: client.get_job_info(name), address)
    except RuntimeError as error:
        raise NotFoundError(
            f"the cluster has no job {name!r}", where=address, hint="`ray job list` lists them"
        ) from error
    asyncio.run(stream())
    while (info := _within(lambda: client.get_job_info(name), address)).status not in _ENDED:
        asyncio.run(asyncio.sleep(0.2))  # the log ends a moment before the verdict is known
    code = info.driver_exit_code
    return 0 if info.status == JobStatus.SUCCEEDED else code if code else 1


@contextmanager
def _packed(project: Path) -> Iterator[Path]:
    """A folder with the project's files, and rlctl with its entry points: so the cluster needs rlctl's dependencies and not rlctl."""
    with tempfile.TemporaryDirectory(prefix="rlctl-job-") as made:
        target = Path(made)
        files = _files(project)
        size = sum((project / file).stat().st_size for file in files)
        if size > MAX_PACKED:
            largest = max(files, key=lambda file: (project / file).stat().st_size)
            raise UsageError(
                f"the project's files are {size / 2**20:.0f} MiB, and a job carries {MAX_PACKED // 2**20} MiB at most",
                where=f"{project}, the largest file being {largest}",
                hint="start from the folder of the recipe, let .gitignore name the large files, and keep data on storage the cluster sees",
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
    """Relative paths of the files that belong to a project."""
    command = [
        "git",
        "-C",
        str(project),
        "ls-files",
        "--cached",
        "--others",
        "--exclude-standard",
        "-z",
    ]
    try:
        listed = subprocess.run(
            command, capture_output=True, text=True, check=True, timeout=_ANSWER_S
        ).stdout.split("\0")
        found = [Path(name) for name in listed if name]
    except (OSError, subprocess.SubprocessError):
        found = [path.relative_to(project) for path in project.rglob("*")]
    return [
        path
        for path in found
        if (project / path).is_file()
        and not any(part in _NOT_PACKED or part.startswith(".") for part in path.parts)
    ]


def _client(address: str) -> JobSubmissionClient:
    return _within(lambda: JobSubmissionClient(address), address)


def _within(call: Callable[[], T], address: str) -> T:
    """The answer of `call` in time. What it raises passes, but for a cluster that cannot be reached."""
    answer: Future[T] = Future()

    def ask() -> None:
        try:
            answer.set_result(call())
        except BaseException as error:  # handed to the waiting thread, which raises it
            answer.set_exception(error)

    threading.Thread(target=ask, name="ray-jobs", daemon=True).start()
    try:
        return answer.result(_ANSWER_S)
    except AuthenticationError as error:
        hint = "RAY_AUTH_MODE=token, with the token in ~/.ray/auth_token or RAY_AUTH_TOKEN"
        raise ResourceError("the cluster wants Ray's token", where=address, hint=hint) from error
    except (ConnectionError, NotInTime) as error:
        reason = (
            str(error).strip().splitlines()[0]
            if str(error).strip()
            else f"no answer within {_ANSWER_S:.0f} s"
        )
        hint = "the address of the cluster's dashboard, http://HEAD:8265; `ray start --head --include-dashboard=true` starts one"
        raise ResourceError(
            f"no Ray cluster answers: {reason}", where=address, hint=hint
        ) from error
