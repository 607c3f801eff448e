"""Defaults that make runs on GPUs fast, tested on a machine without one."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from rlctl.recipes.compose import compose
from rlctl.runtime.model import causal_lm, compiled, kernels
from rlctl.runtime.model.causal_lm import has_score_kernel
from rlctl.runtime.model.compiled import compiles_by_default, enable_compiler
from rlctl.runtime.rank_info import RankInfo
from rlctl.runtime.rollout.vllm_engine.engine import VLLMEngine
from rlctl.runtime.workers import process as process_module
from rlctl.runtime.workers.process import Process
from tests.models import mixture_model, tiny_model

GPU = RankInfo(0, 1, "cuda", 1, 60.0, False, None)
FSDP = "actor_rollout_ref.actor.fsdp_config"


@pytest.mark.parametrize(
    ("device", "setting", "missing", "expected"),
    [
        ("cuda", "", None, True),
        ("cpu", "", None, False),
        ("cuda", f"{FSDP}.tensor_model_parallel_size=2", None, False),
        ("cuda", f"{FSDP}.pipeline_model_parallel_size=2", None, False),
        ("cuda", "actor_rollout_ref.model.load_in_4bit=true", None, False),
        ("cuda", "actor_rollout_ref.model.lora_rank=8", None, False),
        ("cuda", "", "a C compiler", False),
    ],
)
def test_dense_layers_are_compiled_on_gpus(
    device: str,
    setting: str,
    missing: str | None,
    expected: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(compiled, "missing_for_compiler", lambda _: missing)
    config = compose("ppo", [setting] if setting else []).config.actor_rollout_ref
    assert config.actor.use_torch_compile is None
    given = config.model, config.actor.fsdp_config, device
    assert compiles_by_default(tiny_model(), *given) is expected
    assert ("torch.compile needs a C compiler" in caplog.text) is (missing is not None)
    assert not compiles_by_default(mixture_model("mixtral"), *given)


def test_logits_are_scored_by_a_kernel_that_can_be_built(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.zeros(2, 3)
    assert not has_score_kernel(logits)
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    for missing in (None, "a C compiler"):
        monkeypatch.setattr(causal_lm, "missing_for_compiler", lambda _, missing=missing: missing)
        causal_lm._builds_kernels.cache_clear()
        assert has_score_kernel(logits) is (missing is None)
    causal_lm._builds_kernels.cache_clear()
    assert not has_score_kernel(torch.zeros(3, 2).T)


def test_compiled_code_is_kept_where_it_can_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A home folder may be missing, or that of nobody; torch's own folder is then used."""
    key, file = "TORCHINDUCTOR_CACHE_DIR", tmp_path / "file"
    file.touch()
    for home, expected in ((file, None), (tmp_path, str(tmp_path / "rlctl" / "inductor"))):
        monkeypatch.delenv(key, raising=False)
        monkeypatch.setenv("XDG_CACHE_HOME", str(home))
        with torch._dynamo.config.patch(disable=True):
            enable_compiler()
        assert os.environ.get(key) == expected
    monkeypatch.delenv(key)


def test_warnings_of_nccl_go_to_the_log(monkeypatch: pytest.MonkeyPatch) -> None:
    for given, expected in ((None, "WARN"), ("INFO", "INFO")):
        monkeypatch.delenv("NCCL_DEBUG", raising=False)
        if given:
            monkeypatch.setenv("NCCL_DEBUG", given)
        with torch._dynamo.config.patch(disable=True):
            Process(GPU)
        assert os.environ["NCCL_DEBUG"] == expected
    monkeypatch.delenv("NCCL_DEBUG")


@pytest.mark.parametrize(
    ("installed", "capability", "error", "used"),
    [
        (True, (9, 0), None, True),
        (True, (9, 0), RuntimeError("undefined symbol"), False),
        (True, (8, 0), None, False),
        (False, (9, 0), None, False),
    ],
)
def test_flash_attention_3_is_used_where_it_is(
    installed: bool,
    capability: tuple[int, int],
    error: Exception | None,
    used: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    activated: list[str] = []

    def activate(name: str) -> None:
        if error is not None:
            raise error
        activated.append(name)

    monkeypatch.setattr(kernels, "find_spec", lambda _: installed or None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr(torch.nn.attention, "activate_flash_attention_impl", activate)
    assert kernels.use_flash_attention_3() is used
    assert activated == ["FA3"] * used
    assert ("undefined symbol" in caplog.text) is (error is not None)


def test_vllm_chooses_its_own_algorithms() -> None:
    """With `trainer.deterministic` torch refuses some that vLLM calls on a GPU."""
    seen: list[bool] = []

    def step() -> list[Any]:
        seen.append(torch.are_deterministic_algorithms_enabled())
        return []

    engine = SimpleNamespace(llm=SimpleNamespace(llm_engine=SimpleNamespace(step=step)))
    torch.use_deterministic_algorithms(True)
    try:
        assert VLLMEngine.step(cast(VLLMEngine, engine)) == []
        assert torch.are_deterministic_algorithms_enabled()
    finally:
        torch.use_deterministic_algorithms(False)
    assert seen == [False]


CPU = RankInfo(0, 1, "cpu", 1, 60.0, False, None)


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave the compiler and the settings of the allocator as they are."""
    monkeypatch.setattr(process_module, "enable_compiler", lambda: None)
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "")


@pytest.mark.usefixtures("compiler")
def test_segments_of_gpus_grow_unless_the_environment_says_otherwise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("PYTORCH_ALLOC_CONF")
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "backend:native")
    Process(GPU)
    assert "PYTORCH_ALLOC_CONF" not in os.environ
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF")
    Process(CPU)
    assert "PYTORCH_ALLOC_CONF" not in os.environ
    Process(GPU)
    assert os.environ["PYTORCH_ALLOC_CONF"] == "expandable_segments:True"
