"""Errors of commands with `--json`: one JSON document on stdout, on one line."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from rlctl.errors import RlctlError

# Number of the contract in docs/json.md. Another number means that a field changed or is gone.
JSON_VERSION = 1
_REPORTED = "_json_reported"  # attribute of errors whose document the command has printed


def wants_json(words: Sequence[str]) -> bool:
    """Return True for a command line with `--json`."""
    if "--" in words:
        words = words[: words.index("--")]
    return "--json" in words


def error_document(error: RlctlError) -> dict[str, Any]:
    """Return the document of an error: its first problem as `error`, and all `problems`."""
    from rlctl.error_codes import code_of

    problems = [
        {
            "code": problem.code or code_of(problem.message, error),
            "message": problem.message,
            "where": problem.where,
            "hint": problem.help,
            "fix": problem.fix,
        }
        for problem in error.problems
    ]
    first = {name: problems[0][name] for name in ("code", "message", "where", "hint")}
    return {
        "json": JSON_VERSION,
        "error": {**first, "exit": error.exit_code},
        "problems": problems,
    }


def document_with_error(document: Mapping[str, Any], error: RlctlError) -> dict[str, Any]:
    """Return the document of a command with that of its error; it is not printed once more."""
    mark_reported(error)
    return {**document, **error_document(error)}


def mark_reported(error: RlctlError) -> None:
    """Note that the document of the command has this error."""
    setattr(error, _REPORTED, True)


def print_error(error: RlctlError) -> None:
    """Print the document of an error, unless the command has done so."""
    if not getattr(error, _REPORTED, False):
        sys.stdout.write(json.dumps(error_document(error), ensure_ascii=False) + "\n")
        sys.stdout.flush()
