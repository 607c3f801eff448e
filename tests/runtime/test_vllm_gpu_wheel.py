"""Contracts with vLLM's GPU wheel, which is downloaded and read, but not installed.

What both builds have, rlctl calls in the tests of vLLM on a CPU.
"""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from zipfile import ZipFile

import pytest
import torch
from packaging.requirements import Requirement

from rlctl.recipes.compose import compose
from rlctl.runtime.base.rank_info import RankInfo
from rlctl.runtime.model.routing import RoutingShape
from rlctl.runtime.rollout.engine import EngineSpec
from rlctl.runtime.rollout.vllm_engine.versions import pins
from rlctl.runtime.rollout.vllm_engine.vllm_startup import engine_arguments

pytestmark = pytest.mark.soak

GPU = RankInfo(0, 1, "cuda", 1, 60.0, False, None)
MODEL = "actor_rollout_ref.model"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> ZipFile:
    folder = tmp_path_factory.mktemp("wheel")
    download = ["download", "--quiet", "--no-deps", "--only-binary=:all:", "--dest", str(folder)]
    command = [sys.executable, "-m", "pip", *download, str(pins()["vllm"]).partition(";")[0]]
    if subprocess.run(command, timeout=900).returncode:
        pytest.skip("vLLM's GPU wheel cannot be downloaded here")
    (file,) = folder.glob("vllm-*.whl")
    return ZipFile(file)


def find(wheel: ZipFile, file: str, name: str) -> Any:
    """Return the class or function of a dotted name."""
    node: ast.AST = ast.parse(wheel.read(f"vllm/{file}"))
    for part in name.split("."):
        kinds = ast.ClassDef, ast.FunctionDef
        found = [
            child for child in ast.walk(node) if isinstance(child, kinds) and child.name == part
        ]
        assert found, f"{file} has no {name}"
        node = found[0]
    return node


def fields(node: ast.ClassDef) -> set[str]:
    """Return the annotated attributes of a class."""
    lines = [line.target for line in node.body if isinstance(line, ast.AnnAssign)]
    return {target.id for target in lines if isinstance(target, ast.Name)}


def load(wheel: ZipFile, file: str, name: str, scope: dict[str, Any]) -> Any:
    """Run the definition of a function or class by itself; names that it uses are in `scope`."""
    node = find(wheel, file, name)
    node.decorator_list = [
        decorator
        for decorator in node.decorator_list
        if ast.unparse(decorator) in ("classmethod", "staticmethod")
    ]
    source = "from __future__ import annotations\n" + ast.unparse(node)
    exec(compile(source, file, "exec"), scope)
    return scope[node.name]


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["actor_rollout_ref.rollout.tensor_model_parallel_size=2"],
        [f"{MODEL}.lora_rank=16", f"{MODEL}.target_modules=[q_proj]"],
        [f"+{MODEL}.override_config={{rope_theta: 1.0}}"],
    ],
    ids=["plain", "tensor", "adapters", "overrides"],
)
def test_arguments_are_those_of_the_engine(wheel: ZipFile, overrides: list[str]) -> None:
    config = compose("ppo", overrides).config.actor_rollout_ref
    spec = EngineSpec(config.model, config.rollout, torch.bfloat16, GPU, 64, seed=0)
    spec = replace(spec, routing=RoutingShape(2, 2, torch.uint8))
    known = fields(find(wheel, "engine/arg_utils.py", "EngineArgs"))
    assert set(engine_arguments(spec)) <= known
    assert {"distributed_executor_backend", "kv_cache_memory_bytes"} <= known


def test_defaults_that_rlctl_relies_on(wheel: ZipFile) -> None:
    (metadata,) = [name for name in wheel.namelist() if name.endswith(".dist-info/METADATA")]
    lines = wheel.read(metadata).decode().splitlines()
    needed = [
        Requirement(line.split(": ")[1]) for line in lines if line.startswith("Requires-Dist")
    ]
    (exact,) = next(each for each in needed if each.name == "torch").specifier
    assert pins()["torch"].specifier.contains(exact.version)
    scope: dict[str, Any] = {"os": SimpleNamespace(environ={}, getenv=lambda _, default: default)}
    scope["is_torch_equal_or_newer"] = lambda version: version <= "2.13.0"
    source = ast.unparse(find(wheel, "envs.py", "use_aot_compile"))
    source = source.replace("from vllm.utils.torch_utils import is_torch_equal_or_newer", "pass")
    load(wheel, "envs.py", "disable_compile_cache", scope)
    exec(source, scope)
    assert scope["use_aot_compile"]() is True, "why workers on GPUs have a compiler"
    constants = {
        ast.unparse(line.target): ast.unparse(line.value)
        for line in ast.walk(ast.parse(wheel.read("vllm/envs.py")))
        if isinstance(line, ast.AnnAssign) and line.value is not None
    }
    # Otherwise the process group would need a `device_id`.
    assert constants["VLLM_DISTRIBUTED_USE_SPLIT_GROUP"] == "False"
    modes = wheel.read("vllm/config/model.py").decode()
    assert '"processed_logprobs"' in modes


def mapping(wheel: ZipFile) -> tuple[type, Callable[[int, int], bool]]:
    """Return vLLM's maps of device ids, and its check of peers with a driver that allows all."""
    scope: dict[str, Any] = {"os": os, "_assigned_physical_gpu_ids": None}
    names = (
        *("device_control_id_to_physical_device_id", "device_id_to_physical_device_id"),
        "logical_device_id_to_visible_device_id",
    )
    methods = {
        name: load(wheel, "platforms/interface.py", f"Platform.{name}", scope) for name in names
    }
    platform = type("Platform", (), {"device_control_env_var": "CUDA_VISIBLE_DEVICES", **methods})
    scope |= {
        "current_platform": platform,
        "envs": SimpleNamespace(VLLM_SKIP_P2P_CHECK=True),
        "logger": SimpleNamespace(debug=lambda *_: None),
        "torch": SimpleNamespace(cuda=SimpleNamespace(can_device_access_peer=lambda *_: True)),
    }
    file = "distributed/device_communicators/custom_all_reduce.py"
    return platform, load(wheel, file, "_can_p2p", scope)


@pytest.mark.parametrize("rank", [0, 1])
def test_ranks_of_an_engine_see_their_own_gpu(
    wheel: ZipFile, rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each has the local rank 0. The check for peers would fail, and rlctl switches it off."""
    platform: Any
    platform, can_p2p = mapping(wheel)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", str(3 + rank))
    assert platform.logical_device_id_to_visible_device_id(0) == 0
    assert platform.device_id_to_physical_device_id(0) == 3 + rank
    with pytest.raises(IndexError):
        can_p2p(rank, 2)
    config = compose("ppo", ["actor_rollout_ref.rollout.tensor_model_parallel_size=2"]).config
    part = config.actor_rollout_ref
    spec = EngineSpec(part.model, part.rollout, torch.bfloat16, GPU, 64, seed=0)
    assert engine_arguments(spec)["disable_custom_all_reduce"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,4")
    assert can_p2p(rank, 2), "with both GPUs the check works"
