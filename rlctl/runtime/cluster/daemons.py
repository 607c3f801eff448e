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
    log_to_driver: bool, timeout_s: float, given_up: threading.Event, dashboard: bool = False
) -> Iterator[None]:
    """Let `ray.init` in the block start neither autoscaler nor dashboard nor idle log monitor.

    Each spends 0.5 to 1 s on imports. The log monitor sends what workers print to this process; it
    starts with `log_to_driver`, all of them with `dashboard`. Ray's other daemons have `timeout_s`,
    or until `given_up`. A signal to the process group, as by `timeout` or a terminal that closes,
    does not reach them: the run still saves. An untested newer release of Ray is left as it is.
    """
    with ExitStack() as patches:
        if Version(version("ray")).release[:2] <= _NEWEST_RAY:
            with suppress(ImportError, AttributeError):  # an older release may lack these names
                given = log_to_driver, timeout_s, given_up, dashboard
                for module, name, replacement in _changes(*given):
                    patches.callback(setattr, module, name, getattr(module, name))
                    setattr(module, name, replacement)
        yield


def _changes(
    log_to_driver: bool, timeout_s: float, given_up: threading.Event, dashboard: bool
) -> Iterator[tuple[Any, str, Any]]:
    from ray._private import parameter, services, utils

    if utils.detect_fate_sharing_support():  # elsewhere Ray ends its daemons by their group
        yield services, "ConsolePopen", partial(services.ConsolePopen, process_group=0)
    if dashboard:
        return
    settings: dict[str, Any] = {
        "no_monitor": True,
        "include_log_monitor": log_to_driver,
        "setup_worker_path": str(Path(__file__).with_name("setup_worker.py")),
    }
    yield parameter, "RayParams", partial(parameter.RayParams, **settings)
    yield services, "start_api_server", lambda *_, **__: (None, None)
    absent = ImportError("the dashboard is off")
    yield utils, "get_dashboard_dependency_error", lambda: absent
    yield services, "get_node", partial(_await_node, services.get_node, timeout_s, given_up)


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
