"""Process that runs one Python program of the policy: restricts itself, then executes stdin."""

from __future__ import annotations

import ast
import json
import os
import resource
import sys
import traceback
from pathlib import Path
from typing import Any

from rlctl.runtime.sandbox.isolation import enter_namespaces, restrict_calls
from rlctl.runtime.sandbox.limits import restrict_files, set_limit

CANNOT_DENY = 97  # exit status: the network cannot be denied
CANNOT_PROTECT = 98  # exit status: files cannot be protected
_FILE = "<code>"


def main() -> None:
    """Run the program of stdin with the options of the last argument (JSON)."""
    options: dict[str, Any] = json.loads(sys.argv[-1])
    folder = Path(options["folder"])
    deny, is_isolated = options["deny_network"], options["is_isolated"]
    if not is_isolated:
        is_isolated = deny and enter_namespaces()
        if not restrict_files(folder) and not options["allow_writes"]:
            sys.exit(CANNOT_PROTECT)
    if not restrict_calls(deny_network=deny) and deny and not is_isolated:
        sys.exit(CANNOT_DENY)
    for kind, bound in (
        (resource.RLIMIT_DATA, options["memory"]),
        (resource.RLIMIT_FSIZE, options["file_size"]),
        (resource.RLIMIT_NOFILE, 64),
        (resource.RLIMIT_CORE, 0),
    ):
        set_limit(kind, bound)
    source = sys.stdin.read()
    sys.argv, sys.stderr = [_FILE], sys.stdout  # in the order in which they are written
    status = run(source)
    sys.stdout.flush()
    os._exit(status)


def run(source: str) -> int:
    """Execute `source`, print the value of a last expression, and return the exit status."""
    names: dict[str, Any] = {"__name__": "__main__"}
    try:
        tree = ast.parse(source, _FILE)
        last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
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
