"""Errors of users' code in another process."""

from __future__ import annotations

from ray.exceptions import RayTaskError

from rlctl.causes import raised_by_users_code
from rlctl.code_places import plugin_packages, users_place_in
from rlctl.errors import RlctlError


def error_of_users_code(error: RayTaskError) -> RlctlError | None:
    """Return the error of a task that users' code ended, with its file and line, else None."""
    # Ray raises a subclass of RayTaskError and of the cause's class, whose text is the traceback.
    place = users_place_in(str(error), plugin_packages)
    if place is None:
        return None
    return raised_by_users_code(error.cause, place)
