"""Fetching of a run's remote copy, to resume it on another machine."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path
from typing import Any

from rlctl import remote_files as storage
from rlctl.errors import ConflictError, NotFoundError
from rlctl.files import replacing, step_name
from rlctl.process import MODES
from rlctl.runs.naming import check_free
from rlctl.runs.record import RunRecord
from rlctl.runs.run_dir import RECORD_FILE
from rlctl.runtime.training.checkpoint_store import CheckpointStore
from rlctl.runtime.training.complete_checkpoints import damage
from rlctl.runtime.training.remote_copy import CHECKPOINTS, remote_record, remote_steps

LOG = logging.getLogger(__name__)


def pull(url: str, root: Path) -> Path:
    """Fetch the remote copy of a run with its latest undamaged checkpoint; return its folder.

    A run that exists below `root` already is left unchanged. Raises `NotFoundError` if there is no
    remote copy, `ConflictError` if another run of that name exists or the local one is older, and
    the errors of `storage.local`.
    """
    with storage.explained(url):
        record = remote_record(url)
        if record is None:
            raise NotFoundError(
                "no copy of a run at this address",
                where=url,
                hint="trainer.mirror=URL writes one to URL/<project>/<run>",
            )
        fs, path = storage.open_url(url)
        found = storage.listing(fs, path)
        target = root / record.project / record.name
        steps = sorted(remote_steps(found.files), reverse=True)
        if (target / RECORD_FILE).is_file() and RunRecord.read(
            target / RECORD_FILE
        ).id == record.id:
            _check_not_behind(target, steps, url)
            return target
        check_free(root, record.project, record.name)
        with replacing(target, sync=False) as aside:
            aside.parent.mkdir(parents=True, exist_ok=True)
            aside.mkdir(MODES["owner"])
            for part in ("generations", "attempts", CHECKPOINTS):
                (aside / part).mkdir(parents=True)
            plain = [name for name in found.files if not name.startswith(f"{CHECKPOINTS}/")]
            storage.get(fs, found, {name: aside / name for name in plain})
            _get_latest(fs, found, steps, aside)
    return target


def _get_latest(fs: Any, found: storage.Listing, steps: list[int], target: Path) -> None:
    """Fetch the latest checkpoint that is undamaged."""
    for step in steps:
        folder = f"{CHECKPOINTS}/{step_name(step)}"
        files = [name for name in found.files if name.startswith(f"{folder}/")]
        storage.get(fs, found, {name: target / name for name in files})
        problem = damage(target / folder)
        if problem is None:
            return
        LOG.warning("%s; the one before it is fetched", problem)
        shutil.rmtree(target / folder)


def _check_not_behind(run: Path, steps: list[int], url: str) -> None:
    """Raise `ConflictError` if the remote copy has a later checkpoint than the local run."""
    if steps and steps[0] > max(CheckpointStore(run / CHECKPOINTS).steps(), default=0):
        hint = f"`rlctl runs rm {run.name}` moves the local run to the trash; then fetch again"
        raise ConflictError(
            f"{run.name!r} exists here and is older than its copy at {url}, "
            f"which has a checkpoint of step {steps[0]}",
            where=str(run),
            hint=hint,
        )
