"""Programs of SLURM, which tests of the queue need."""

from __future__ import annotations

import os
import shutil

DAEMONS = ("munged", "slurmctld", "slurmd")


def missing_programs() -> list[str]:
    """Return the programs of SLURM that are not installed."""
    return [name for name in ("sbatch", *DAEMONS) if find_program(name) is None]


def find_program(name: str) -> str | None:
    """Return the path of a program, which may be outside of a user's PATH."""
    return shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin:/usr/local/sbin")
