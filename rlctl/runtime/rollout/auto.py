"""The engine `auto`: vLLM where there is a GPU and vLLM for it, otherwise the training model itself."""

from __future__ import annotations

from collections.abc import Generator

from transformers import PreTrainedModel

from rlctl.errors import ConfigError, MissingExtraError
from rlctl.recipes import schema
from rlctl.runtime.rollout.engine import EngineSpec, RolloutEngine, run_startup, start_in_phases
from rlctl.runtime.rollout.hf import HFEngine
from rlctl.runtime.rollout.vllm.engine import VLLMEngine
from rlctl.runtime.rollout.vllm.versions import check_installed


class AutoEngine:
    """Chooses; the engine that it makes is another's."""

    @classmethod
    def check(cls, rollout: schema.Rollout, device: str, num_ranks: int) -> None:
        """See `RolloutEngine.check`: that of the engine chosen."""
        chosen(device).check(rollout, device, num_ranks)

    @classmethod
    def from_spec(cls, spec: EngineSpec, policy: PreTrainedModel | None) -> RolloutEngine:
        """See `RolloutEngine.from_spec`."""
        return run_startup(cls.startup_phases(spec, policy))

    @classmethod
    def startup_phases(
        cls, spec: EngineSpec, policy: PreTrainedModel | None
    ) -> Generator[str, None, RolloutEngine]:
        """See `PhasedStartup`: in those of the engine chosen."""
        return (yield from start_in_phases(chosen(spec.rank_info.device), spec, policy))


def chosen(device: str) -> type[HFEngine] | type[VLLMEngine]:
    """What `auto` means on a `device`."""
    if device != "cuda":
        return HFEngine
    try:
        check_installed(device)
    except (ConfigError, MissingExtraError):
        return HFEngine
    return VLLMEngine
