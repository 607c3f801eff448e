"""Daemons of a Ray cluster on this machine, without those that a run does not use."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

from packaging.version import Version

from rlctl.runtime.cluster.start_deadline import LoadedDeadline

_POLL_S = 0.1
_NEWEST_RAY = (2, 60)  # tested with these private names


@contextmanager
def fewer_daemons(
    log_to_driver: bool, timeout_s: float, given_up: threading.Event
) -> Iterator[None]:
    """Let `ray.init` in the block start neither autoscaler nor dashboard nor idle log monitor.

    Each is a Python process that spends 0.5 to 1 s on imports, and `ray.init` waits for the
    dashboard's even if it is off. `ray.init` has no arguments for them. Ray's agent runs as in an
    installation without dashboard. The log monitor sends what workers print to this process; it
    starts with `log_to_driver`. Workers start by `setup_worker`. Ray would give a busy machine 30 s
    to start its daemons; here they have `timeout_s`, or until `given_up`. A newer release of Ray
    than the newest that was tested starts all of them.
    """
    with ExitStack() as patches:
        if Version(version("ray")).release[:2] <= _NEWEST_RAY:
            with suppress(ImportError, AttributeError):  # an older release may lack these names
                _patch_ray(patches, log_to_driver, timeout_s, given_up)
        yield


def _patch_ray(
    patches: ExitStack, log_to_driver: bool, timeout_s: float, given_up: threading.Event
) -> None:
    from ray._private import parameter, services, utils

    settings: dict[str, Any] = {
        "no_monitor": True,
        "include_log_monitor": log_to_driver,
        "setup_worker_path": str(Path(__file__).with_name("setup_worker.py")),
    }
    absent = ImportError("the dashboard is off")
    for module, name, replacement in (
        (parameter, "RayParams", partial(parameter.RayParams, **settings)),
        (services, "start_api_server", lambda *_, **__: (None, None)),
        (utils, "get_dashboard_dependency_error", lambda: absent),
        (services, "get_node", partial(_await_node, services.get_node, timeout_s, given_up)),
    ):
        patches.callback(setattr, module, name, getattr(module, name))
        setattr(module, name, replacement)


@contextmanager
def in_other_group() -> Iterator[None]:
    """Let `ray.init` in the block start its daemons in process groups of their own.

    A signal to this process's group, such as that of `timeout` or of a terminal that closes, then
    reaches only this process, which still needs the cluster to save. Where the kernel does not end
    daemons with this process, Ray ends them by their group, which remains.
    """
    with ExitStack() as patches:
        with suppress(ImportError, AttributeError):
            from ray._private import services, utils

            if utils.detect_fate_sharing_support():
                patches.callback(setattr, services, "ConsolePopen", services.ConsolePopen)
                services.ConsolePopen = partial(services.ConsolePopen, process_group=0)
        yield


def _await_node(
    get_node: Callable[..., Any], timeout_s: float, given_up: threading.Event, *node: Any
) -> Any:
    """Return `get_node(*node)`; for `timeout_s`, or until `given_up`, it may not be registered."""
    deadline = LoadedDeadline(timeout_s)
    while True:
        try:
            return get_node(*node)
        except RuntimeError:
            if deadline.is_over() or given_up.is_set():
                raise
        time.sleep(_POLL_S)
