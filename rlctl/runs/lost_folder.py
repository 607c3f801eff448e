"""End of a run whose folder somebody has removed or moved."""

from __future__ import annotations

from rlctl.errors import ResourceError
from rlctl.runs.run_dir import RunDir


def folder_gone(run: RunDir, step: int) -> ResourceError:
    """Return the error of a run that finds its folder gone after `step`."""
    return ResourceError(
        f"the folder of the run was removed, moved or replaced before the end of step {step}",
        where=str(run.path),
        hint="`rlctl resume FOLDER` continues a run whose folder was moved",
    )
