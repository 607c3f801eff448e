"""Process that runs one Python program of the policy: restricts itself, then executes stdin.

The program is a child of a guard. With namespaces the guard is the first process of its namespace:
the kernel ends all that the program started with it, and another guard outside waits for that.
"""

from __future__ import annotations

import ast
import json
import os
import re
import resource
import signal
import sys
import traceback
from pathlib import Path
from typing import Any

from rlctl.process import die_with_parent
from rlctl.runtime.sandbox.guard import fork_guarded, guard
from rlctl.runtime.sandbox.namespaces import (
    Namespaces,
    drop_capabilities,
    enter_namespaces,
    mount_processes,
)
from rlctl.runtime.sandbox.process_limits import restrict_files, set_limit
from rlctl.runtime.sandbox.system_calls import restrict_calls

CANNOT_DENY = 97  # exit status: the network cannot be denied
CANNOT_PROTECT = 98  # exit status: files cannot be protected
_FILE = "<code>"
_MAX_THREADS = 256  # of all processes of a program; root has no such limit


def main() -> None:
    """Run the program of stdin with the options of the last argument (JSON)."""
    options: dict[str, Any] = json.loads(sys.argv[-1])
    folder = Path(options["folder"])
    deny = bool(options["deny_network"])
    found = Namespaces.FILES
    if not options["has_bubblewrap"]:
        die_with_parent(signal.SIGTERM)
        found = enter_namespaces(folder, options["file_size"], deny_network=deny)
        if found:
            _continue_guarded()
            mount_processes()
    _continue_guarded()
    is_protected = restrict_files(folder) or found == Namespaces.FILES
    if not is_protected and not options["allow_writes"]:
        sys.exit(CANNOT_PROTECT)
    drop_capabilities()
    has_filter = restrict_calls(deny_network=deny, is_isolated=found == Namespaces.FILES)
    if deny and not has_filter and not found:
        sys.exit(CANNOT_DENY)
    for kind, bound in (
        (resource.RLIMIT_DATA, options["memory"]),
        (resource.RLIMIT_FSIZE, options["file_size"]),
        (resource.RLIMIT_NOFILE, 64),
        (resource.RLIMIT_CORE, 0),
    ):
        set_limit(kind, bound)
    if found and _counts_by_namespace():
        set_limit(resource.RLIMIT_NPROC, _MAX_THREADS)
    source = sys.stdin.buffer.read().decode(errors="surrogatepass")
    sys.argv = [_FILE]
    sys.stderr = sys.stdout  # both in the order in which they are written
    status = run(source)
    sys.stdout.flush()
    os._exit(status)


def _counts_by_namespace() -> bool:
    """Return True if the kernel counts a user's threads per user namespace: Linux 5.14.

    Earlier ones would count all threads that the user has on this machine.
    """
    version = re.match(r"(\d+)\.(\d+)", os.uname().release)
    return (
        sys.platform == "linux" and bool(version) and (int(version[1]), int(version[2])) >= (5, 14)
    )


def _continue_guarded() -> None:
    """Return in a child; this process becomes its guard, and exits with its status."""
    if child := fork_guarded():
        os._exit(guard(child))


def run(source: str) -> int:
    """Execute `source`, print the value of a last expression, and return the exit status."""
    names: dict[str, Any] = {"__name__": "__main__"}
    try:
        tree = ast.parse(source, _FILE)
        last = tree.body[-1] if tree.body else None
        if isinstance(last, ast.Expr):
            del tree.body[-1]
        exec(compile(tree, _FILE, "exec"), names)
        if isinstance(last, ast.Expr):
            value = eval(compile(ast.Expression(last.value), _FILE, "eval"), names)
            if value is not None:
                print(repr(value))
    except SystemExit as error:
        return error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException as error:
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename != _FILE:
            trace = trace.tb_next
        traceback.print_exception(type(error), error, trace)
        return 1
    return 0
