"""One error for the errors of several checks; missing packages have one command for all."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import replace

from rlctl.error_codes import code_of
from rlctl.errors import ConfigError, MissingExtraError, Problem, RlctlError

_INSTALL = re.compile(r"pip install (?P<wanted>(?:'[^']+'|[\w.-]+)(?: (?:'[^']+'|[\w.-]+))*)")
_EXTRAS = re.compile(r"'?(?P<package>[\w.-]+)(?:\[(?P<extras>[^]]*)\])?(?P<version>[^']*)'?")


def combined(errors: Sequence[RlctlError]) -> RlctlError:
    """Return one error with every problem once, of their class, or a ConfigError for a mixture."""
    kinds = {type(error) for error in errors}
    kind = kinds.pop() if len(kinds) == 1 else ConfigError
    missing: dict[Problem, None] = {}
    others: dict[Problem, None] = {}
    for error in errors:
        for problem in error.problems:
            code = problem.code
            if error.exit_code != kind.exit_code:
                code = code or code_of(problem.message, error)
            is_extra = isinstance(error, MissingExtraError) or code == MissingExtraError.code
            combination = others
            if is_extra and _INSTALL.match(problem.hint or ""):
                combination = missing
            combination[replace(problem, code=code)] = None
    return kind(*others, *_one_installation(list(missing)))


def _one_installation(problems: Sequence[Problem]) -> list[Problem]:
    """Return one problem whose hint installs the packages of all."""
    if len(problems) < 2:
        return list(problems)
    wanted: list[str] = []
    instead: list[str] = []
    for problem in problems:
        hint = problem.hint or ""
        found = _INSTALL.match(hint)
        assert found is not None
        wanted += found["wanted"].split(" ")
        if other := hint[found.end() :].removeprefix(", or ").strip():
            instead.append(f"{other} (in place of {found['wanted']})")
    places = dict.fromkeys(problem.where for problem in problems if problem.where)
    return [
        Problem(
            "; ".join(dict.fromkeys(problem.message for problem in problems)),
            where=", ".join(places) or None,
            hint="; ".join([f"pip install {' '.join(_requirements(wanted))}", *instead]),
            code=problems[0].code,
        )
    ]


def _requirements(wanted: Iterable[str]) -> list[str]:
    """Return the requirements with the extras of each package in one."""
    extras: dict[tuple[str, str], dict[str, None]] = {}
    for requirement in wanted:
        found = _EXTRAS.fullmatch(requirement)
        assert found is not None
        named = [name for name in (found["extras"] or "").split(",") if name]
        extras.setdefault((found["package"], found["version"]), {}).update(dict.fromkeys(named))
    lines: list[str] = []
    for (package, version), names in extras.items():
        wanted = version
        if names:
            wanted = f"[{','.join(names)}]{version}"
        if wanted:
            lines.append(f"'{package}{wanted}'")
        else:
            lines.append(package)
    return lines
