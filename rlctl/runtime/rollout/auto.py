"""Engine `auto`: vLLM on GPUs if it is installed, otherwise `hf`."""

from __future__ import annotations

from collections.abc import Generator
from typing import TYPE_CHECKING

import torch
from transformers import PretrainedConfig, PreTrainedModel

from rlctl.errors import ConfigError, MissingExtraError, Problem
from rlctl.plugins import load
from rlctl.recipes import schema
from rlctl.runtime.model.load import load_config
from rlctl.runtime.rollout.engine import EngineSpec, RolloutEngine
from rlctl.runtime.rollout.engine_startup import run_startup, start_in_phases
from rlctl.runtime.rollout.engine_weights import AdapterSync
from rlctl.runtime.rollout.hf import HFEngine

if TYPE_CHECKING:
    from rlctl.runtime.rollout.vllm_engine.vllm_in_process import VLLMEngine


class AutoEngine:
    """Engine that delegates to vLLM on GPUs and to `hf` elsewhere."""

    @classmethod
    def check(cls, rollout: schema.Rollout, device: str, num_ranks: int) -> None:
        """Validate the config for the selected engine."""
        select_engine(device).check(rollout, device, num_ranks)

    @classmethod
    def adapter_sync(
        cls, rollout: schema.Rollout, model: schema.Model, dtype: torch.dtype, device: str
    ) -> AdapterSync:
        """See `PartialSync`."""
        return select_engine(device).adapter_sync(rollout, model, dtype, device)

    @classmethod
    def from_spec(cls, spec: EngineSpec, policy: PreTrainedModel | None) -> RolloutEngine:
        """Build the selected engine."""
        return run_startup(cls.startup_phases(spec, policy))

    @classmethod
    def startup_phases(
        cls, spec: EngineSpec, policy: PreTrainedModel | None
    ) -> Generator[str, None, RolloutEngine]:
        """Build the selected engine, yielding its startup phases."""
        return (yield from start_in_phases(select_engine(spec.rank_info.device), spec, policy))


def load_engine(name: str, device: str) -> type[RolloutEngine]:
    """Return the class of the engine `name`; for `auto` the one that it uses on `device`."""
    engine: type[RolloutEngine] = load("engines", name)
    is_auto = isinstance(engine, type) and issubclass(engine, AutoEngine)
    return select_engine(device) if is_auto else engine


def engine_model_problems(
    rollout: schema.Rollout, model: PretrainedConfig, device: str
) -> list[Problem]:
    """Return why the configured engine cannot generate with models of this config on `device`."""
    check = getattr(load_engine(rollout.name, device), "check_model", None)
    return [] if check is None else check(model, rollout, device)


def reads_images(rollout: schema.Rollout, model: schema.Model, device: str) -> bool:
    """Return True if the configured engine reads images for `model`."""
    engine = load_engine(rollout.name, device)
    if not getattr(engine, "reads_images", False):
        return False
    return load_config(model, "policy").model_type not in getattr(engine, "no_images_of", ())


def plans_vllm(name: str, device: str) -> bool:
    """Return whether the engine `name` is taken to be vLLM on a GPU.

    For `auto` it is if torch finds no GPU here: the plan is then for other machines.
    """
    if device != "cuda":
        return False
    if name == "auto" and not torch.cuda.is_available():
        return True
    from rlctl.runtime.rollout.vllm_engine.vllm_in_process import VLLMEngine

    engine = load_engine(name, device)
    return isinstance(engine, type) and issubclass(engine, VLLMEngine)


def select_engine(device: str) -> type[HFEngine] | type[VLLMEngine]:
    """Return the engine class that `auto` uses on `device` ("cpu" or "cuda")."""
    if device != "cuda" or reason_for_hf(device) is not None:
        return HFEngine
    from rlctl.runtime.rollout.vllm_engine.vllm_in_process import VLLMEngine

    return VLLMEngine


def reason_for_hf(device: str) -> str | None:
    """Return why `auto` does not use vLLM on a GPU; None if it does, and on a CPU."""
    if device != "cuda":
        return None
    from rlctl.runtime.rollout.vllm_engine.versions import check_installed

    try:
        check_installed(device)
    except (ConfigError, MissingExtraError) as error:
        return str(error)
    return None
