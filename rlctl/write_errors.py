"""Errors of failed writes, loaded when one has failed."""

from __future__ import annotations

import errno
import shlex
from pathlib import Path

from rlctl.errors import NO_ACCESS, NotFoundError, ResourceError, RlctlError


def cannot_write(what: str, target: Path, error: OSError, hint: str | None = None) -> RlctlError:
    """Return the error of a failed write of `target`, which messages call `what`.

    A missing folder is a NotFoundError; refused access and a full disk are ResourceErrors. Unlike
    `error`, it does not name the temporary file beside `target`.
    """
    if error.errno == errno.ENOENT and not target.parent.exists():
        return NotFoundError(
            f"the folder {target.parent} does not exist",
            where=str(target),
            hint=f"mkdir -p {shlex.quote(str(target.parent))}",
        )
    reason = error.strerror or str(error)
    if error.errno in NO_ACCESS:
        return ResourceError(
            f"the operating system refused access: {reason}",
            where=str(target),
            hint=hint or "check the owner, the permissions and the length of the name",
        )
    return ResourceError(f"cannot write {what}: {reason}", where=str(target), hint=hint)
