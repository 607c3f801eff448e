"""Access to Ray: loopback only for a cluster of this machine, a token for any other one.

Who reaches an open port of Ray can run code as the user who started it.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path

from rlctl import network
from rlctl.debugging import post_mortem
from rlctl.errors import MissingExtraError, ResourceError
from rlctl.packages import require
from rlctl.recipes import schema
from rlctl.runtime.cluster.address import address_of

_MODE = "RAY_AUTH_MODE"
_TOKENS = ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")
# On macOS and Windows, and with this variable, Ray binds to the address of the node, 127.0.0.1.
_CLUSTER_VARIABLE = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
_PROBE_S = 10.0
# Packages of ray[default] that Ray's client, its dashboard and `require_token` import.
_CLUSTER_PACKAGES = ("grpc", "aiohttp_cors", "opencensus")


@contextmanager
def on_loopback() -> Iterator[None]:
    """Let Ray's processes that start in the block listen on the loopback interface only.

    Ray replaces a loopback address given to `ray.init` by the machine's own, unless it does not
    support clusters of several machines.
    """
    from ray._private import ray_constants

    before = os.environ.get(_CLUSTER_VARIABLE), ray_constants.ENABLE_RAY_CLUSTER
    os.environ[_CLUSTER_VARIABLE] = "0"  # for child processes
    ray_constants.ENABLE_RAY_CLUSTER = False  # read from the variable when Ray was imported
    try:
        yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = before[1]
        if before[0] is None:
            os.environ.pop(_CLUSTER_VARIABLE, None)
        else:
            os.environ[_CLUSTER_VARIABLE] = before[0]


def protect_token() -> None:
    """Make Ray's token file, `~/.ray/auth_token`, readable for its owner only; create it if needed.

    No-op if Ray takes its token from elsewhere or needs none. Ray itself creates a file that all
    users can read.
    """
    mode = os.environ.get(_MODE, "token").lower()
    if mode != "token" or any(name in os.environ for name in _TOKENS):
        return
    path = Path.home() / ".ray" / "auth_token"
    with suppress(OSError):  # a home folder that cannot be written; Ray reports it
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with suppress(FileExistsError):
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
            with os.fdopen(os.open(path, flags, 0o600), "w") as file:
                file.write(secrets.token_hex(32))
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
        try:
            if os.fstat(descriptor).st_mode & 0o077:
                os.fchmod(descriptor, 0o600)
        finally:
            os.close(descriptor)


def require_token(address: str) -> None:
    """Refuse a cluster that other machines can reach and that accepts calls without a token.

    `address` is the `host:port` of its GCS, Ray's control store. A cluster with TLS checks
    certificates instead. Raises ResourceError.
    """
    if is_loopback(address) or os.environ.get("RAY_USE_TLS", "0") not in ("", "0"):
        return
    import grpc

    with grpc.insecure_channel(address) as channel:
        try:
            channel.unary_unary("/ray.rpc.NodeInfoGcsService/CheckAlive")(b"", timeout=_PROBE_S)
        except grpc.RpcError:  # refused without a token
            return
    raise ResourceError(
        "the Ray cluster requires no token, so everybody who can reach it can run code there",
        where=address,
        hint=f"start Ray with {_MODE}=token on all nodes, and set it here too (docs/cluster.md)",
    )


def check_packages(init: schema.RayInit) -> None:
    """Raise MissingExtraError if a package of the extra `cluster` or `debug` is needed and missing.

    A cluster that only this machine reaches needs none, such as that of a sweep for its trials.
    """
    if post_mortem():
        require("debugpy", "RAY_DEBUG_POST_MORTEM=1 needs debugpy", "debug")
    address = address_of(init)
    user = f"the Ray cluster at {address}" if address else "Ray's dashboard"
    is_needed = not is_loopback(address) if address else init.include_dashboard or post_mortem()
    missing = [name for name in _CLUSTER_PACKAGES if find_spec(name) is None]
    if is_needed and missing:
        raise MissingExtraError(
            f"{user} needs packages that are not installed: {', '.join(missing)}",
            hint="pip install 'rlctl[cluster]'",
        )


def is_loopback(address: str) -> bool:
    """Return True if only this machine reaches `address`, a `host:port`."""
    return network.is_loopback(address.rpartition(":")[0].strip("[]"))
