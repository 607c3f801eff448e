"""Data sets of verifiers' environments, which another interpreter loads."""

from __future__ import annotations

import inspect
import json
import re
import subprocess
import sys
import tempfile
from collections import defaultdict
from importlib.metadata import Distribution, distributions
from pathlib import Path
from typing import Any

from rlctl.data_prep.datasets import dataset, option
from rlctl.data_prep.rows import PromptRow
from rlctl.errors import UsageError
from rlctl.plugins import Params


def check_release() -> None:
    """Raise ImportError unless verifiers 0.1.14 to 0.3 is installed.

    Its source also runs in other interpreters, which lack rlctl.
    """
    import re
    from importlib.metadata import PackageNotFoundError, version

    try:
        found = version("verifiers")
    except PackageNotFoundError:
        raise ImportError("No module named 'verifiers'") from None
    if not (0, 1, 14) <= tuple(map(int, re.findall(r"\d+", found)[:3])) < (0, 4):
        raise ImportError(f"its release is {found}, and rlctl plays environments of 0.1.14 to 0.3")


_SCRIPT = (
    f"{inspect.getsource(check_release)}\ncheck_release()"
    + """
import json, sys
import verifiers
environment = verifiers.load_environment(sys.argv[1], **json.loads(sys.argv[2]))
sources = {"train": environment.build_dataset(), "val": environment.build_eval_dataset()}
with open(sys.argv[3], "w") as file:
    for split, rows in sources.items():
        for row in rows or ():
            print(json.dumps([split, row], default=str), file=file)
"""
)
_LOAD_S = 3600.0  # of its data, which may be downloaded
_NEEDS_VERIFIERS = re.compile(r"verifiers(?![\w.-])")


class VerifiersParams(Params):
    """Options of `rlctl prep verifiers`."""

    environment: str = option(
        ..., "ID", "Installed environment.", json_schema_extra={"argument": True}
    )
    arguments: str = option("{}", "JSON", "Arguments of its load_environment.")
    python: str | None = option(
        None, "PATH", "Interpreter that has the environment; by default this one."
    )


@dataset(
    VerifiersParams, "rlctl prep verifiers wordle --python envs/wordle/bin/python --out data/wordle"
)
def verifiers(params: VerifiersParams) -> dict[str, list[PromptRow]]:
    """Data sets of an environment of verifiers: train.parquet and, if it has one, val.parquet."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "rows.jsonl"
        python = params.python or sys.executable
        command = [python, "-c", _SCRIPT, params.environment, params.arguments, str(file)]
        try:
            subprocess.run(command, check=True, capture_output=True, text=True, timeout=_LOAD_S)
        except (OSError, subprocess.SubprocessError) as error:
            failed = isinstance(error, subprocess.CalledProcessError)
            reason = (failed and error.stderr) or str(error)
            raise UsageError(
                f"{python} cannot load the environment {params.environment!r}: "
                f"{reason.strip().splitlines()[-1]}",
                hint="`rlctl env ls --python PATH` lists the installed ones",
            ) from error
        found: dict[str, list[PromptRow]] = defaultdict(list)
        for line in file.read_text(encoding="utf-8").splitlines():
            split, row = json.loads(line)
            found[split].append(_row(params.environment, split, len(found[split]), row))
    return found


def _row(environment: str, split: str, index: int, row: dict[str, Any]) -> PromptRow:
    prompt = [
        {key: value for key, value in message.items() if value is not None}
        for message in row.pop("prompt")
    ]
    return PromptRow(
        data_source=f"verifiers/{environment}",
        prompt=prompt,
        ground_truth=str(row.get("answer", "")),
        extra_info={"split": split, "index": index, "verifiers": row},
    )


def installed(python: str | None = None) -> dict[str, str]:
    """Return the environments of verifiers that an interpreter has, and what each is."""
    if python is None:
        found = distributions()
    else:
        folders = Path(python).parent.parent.glob("lib/python*/*-packages")
        found = distributions(path=list(map(str, folders)))
    return {
        package.name: package.metadata["Summary"] or ""
        for package in sorted(found, key=lambda package: package.name)
        if any(map(_NEEDS_VERIFIERS.match, package.requires or ())) and _has_loader(package)
    }


def _has_loader(found: Distribution) -> bool:
    """Return True if the module of a distribution defines `load_environment`."""
    name = found.name.replace("-", "_")
    texts = [found.read_text(f"../{name}.py"), found.read_text(f"../{name}/__init__.py")]
    return any("load_environment" in text for text in texts if text)
