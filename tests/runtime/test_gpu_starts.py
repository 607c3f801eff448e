"""Starts on GPUs, and defaults that make runs there fast, tested on a machine without one."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from rlctl.errors import MissingExtraError, ResourceError
from rlctl.recipes.compose import compose
from rlctl.runtime.algorithms.base import Needs
from rlctl.runtime.base.rank_info import RankInfo
from rlctl.runtime.build import load_algorithm
from rlctl.runtime.cluster import gpus, pool
from rlctl.runtime.cluster.gpus import ClusterGpus, NodeGpus
from rlctl.runtime.cluster.pool import PoolSpec, RayPool
from rlctl.runtime.cluster.session import _options
from rlctl.runtime.model import causal_lm, compiled, gpu_kernels
from rlctl.runtime.model.causal_lm import has_score_kernel
from rlctl.runtime.model.compiled import compiles_by_default, enable_compiler
from rlctl.runtime.planning import devices
from rlctl.runtime.planning.capacity import memory_of
from rlctl.runtime.planning.devices import Devices, pool_device
from rlctl.runtime.planning.placement import check_placement
from rlctl.runtime.planning.role_memory import plan_memory
from rlctl.runtime.rollout import auto
from rlctl.runtime.rollout.engine import EngineSpec
from rlctl.runtime.rollout.hf import HFEngine
from rlctl.runtime.rollout.sampling_params import rows_at_a_time
from rlctl.runtime.rollout.vllm_engine import versions
from rlctl.runtime.rollout.vllm_engine.vllm_in_process import VLLMEngine
from rlctl.runtime.rollout.vllm_engine.vllm_startup import _quiet, engine_arguments
from rlctl.runtime.workers.pool_process import Process
from tests.models import mixture_model, tiny_model, write_tiny_model
from tests.settings import KEYS, given
from tests.workers import actor_of

CPU = RankInfo(0, 1, "cpu", 1, 60.0, False, None)
GPU = replace(CPU, device="cuda")


@pytest.mark.parametrize(("where", "compiles"), [(CPU, False), (GPU, True)])
def test_workers_compile_on_a_gpu(
    where: RankInfo, compiles: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray's workers begin without a compiler. vLLM does not start if this attribute is missing."""
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "")
    with torch._dynamo.config.patch(disable=True):
        Process(where)
        compiled = torch.compile(lambda x: x, fullgraph=True)
        assert hasattr(compiled, "aot_compile") is compiles


def spec_of(where: RankInfo, *overrides: str) -> EngineSpec:
    config = compose("ppo", overrides).config.actor_rollout_ref
    return EngineSpec(config.model, config.rollout, torch.bfloat16, where, 64, seed=0)


@pytest.mark.parametrize("has_log", [True, False])
def test_what_vllm_prints_at_its_start_is_in_the_log(
    has_log: bool, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """In a worker that is its standard output: one that is killed leaves what it printed."""
    where = replace(GPU, log_path=tmp_path / "main-0.log" if has_log else None)
    with _quiet(spec_of(where)):
        os.write(2, b"NCCL WARN\n")
    assert capfd.readouterr().err == ("NCCL WARN\n" if has_log else "")


@pytest.mark.parametrize("size", [1, 2])
def test_ranks_that_share_a_vllm_engine_see_one_gpu_each(size: int) -> None:
    arguments = engine_arguments(spec_of(GPU, *given(tensor=size)))
    assert arguments["disable_custom_all_reduce"] is (size > 1)


@pytest.mark.parametrize(
    ("where", "number", "share", "fraction"),
    [(GPU, None, None, 0.5), (GPU, 0, None, 0.9), (GPU, 0, 0.3, 0.3), (CPU, 0, None, 0.5)],
)
def test_an_engine_gets_most_of_a_gpu_of_its_own(
    where: RankInfo, number: int | None, share: float | None, fraction: float
) -> None:
    words = [] if share is None else [f"actor_rollout_ref.rollout.gpu_memory_utilization={share}"]
    assert replace(spec_of(where, *words), number=number).memory_fraction == fraction


LIMITS = "max_num_seqs", "max_num_batched_tokens"


def with_limits(folder: Path, where: RankInfo, limits: tuple[int, ...]) -> EngineSpec:
    """Return the spec of an engine for a tiny model, which is written to the folder."""
    named = zip(LIMITS, limits, strict=False)
    words = [f"actor_rollout_ref.rollout.{name}={value}" for name, value in named]
    return spec_of(where, *given(model=write_tiny_model(folder)), *words)


@pytest.mark.parametrize(
    ("where", "limits", "expected"),
    [
        (GPU, (), (None, None)),
        (GPU, (64, 512), (64, 512)),
        (CPU, (), (256, 8192)),
        (CPU, (64, 512), (64, 512)),
    ],
)
def test_engines_have_their_own_limits_by_default(
    tmp_path: Path, where: RankInfo, limits: tuple[int, ...], expected: tuple[int | None, ...]
) -> None:
    """vLLM's own depend on the GPU; on a CPU they stay as they were."""
    spec = with_limits(tmp_path, where, limits)
    assert tuple(map(engine_arguments(spec).get, LIMITS)) == expected
    assert rows_at_a_time(spec.rollout, where.device) == (expected[0] or 1024)


@pytest.mark.plugin("bridges")
@pytest.mark.parametrize("where", [GPU, CPU])
@pytest.mark.parametrize("limits", [(), (64, 512)])
def test_sglang_has_its_own_limits_by_default(
    tmp_path: Path, where: RankInfo, limits: tuple[int, ...]
) -> None:
    from rlctl.plugins.bridges.sglang import _launch_arguments

    flags = _launch_arguments(with_limits(tmp_path, where, limits))
    assert "None" not in flags
    assert ("--max-prefill-tokens" in flags) == bool(limits)
    assert ("--max-running-requests" in flags) == (bool(limits) or where is CPU)


@pytest.mark.parametrize(
    ("kind", "fraction", "per_node", "refused"),
    [
        ("cuda", 0.5, 2, True),
        ("cuda", 0.5, 1, False),
        ("cuda", 1, 2, False),
        ("cpu", 0.5, 2, False),
    ],
)
def test_two_ranks_of_a_pool_share_no_gpu(
    kind: str, fraction: float, per_node: int, refused: bool
) -> None:
    config = compose("ppo", [f"trainer.placement.device_fraction={fraction}"]).config
    problems = list(check_placement(config, Devices(kind, 1, per_node), ["main"], None))
    assert [each.where for each in problems] == ["trainer.placement.device_fraction"] * refused


@pytest.mark.plugin("bridges")
@pytest.mark.parametrize("is_client", [True, False])
def test_clients_of_servers_need_no_gpu(is_client: bool) -> None:
    rollout = "actor_rollout_ref.rollout"
    url = [f"+{rollout}.engine_kwargs.url=[http://a:1, http://b:1]"] * is_client
    pools = ["trainer.placement.rollout=engines", "trainer.placement.pools.engines=2"]
    words = [*pools, f"{rollout}.name=vllm_server", *url, "trainer.device=cuda"]
    config, one = compose("grpo", words).config, Devices("cuda", 1, 1)
    needs = load_algorithm(config, 1).needs
    problems = list(check_placement(config, one, ["main", "engines"], "engines"))
    assert [problem.where for problem in problems] == ["trainer.placement"] * (not is_client)
    found = [pool_device(config, one, needs, pool) for pool in ("main", "engines")]
    assert found == ["cuda", "cpu" if is_client else "cuda"]
    assert rows_at_a_time(config.actor_rollout_ref.rollout, found[1]) == 1024


ACTOR = "actor_rollout_ref.actor.fsdp_config"


@pytest.mark.parametrize(
    ("nodes", "overrides", "refused"),
    [
        (2, [f"{ACTOR}.tensor_model_parallel_size=4", f"{ACTOR}.fsdp_size=2"], []),
        (1, [f"{ACTOR}.tensor_model_parallel_size=3"], []),
        (3, [f"{ACTOR}.tensor_model_parallel_size=3"], [f"{ACTOR}.tensor_model_parallel_size"]),
        (2, [f"{ACTOR}.tensor_model_parallel_size=16"], [f"{ACTOR}.tensor_model_parallel_size"]),
        (3, [f"{ACTOR}.fsdp_size=6"], [f"{ACTOR}.fsdp_size"]),
        (4, [f"{ACTOR}.fsdp_size=16"], []),  # two whole nodes
        (
            3,
            [f"{ACTOR}.fsdp_size=4", f"{ACTOR}.pipeline_model_parallel_size=3"],
            [f"{ACTOR}.fsdp_size"],
        ),
        (3, given(tensor=3), [KEYS["tensor"]]),
        (4, given(tensor=16), []),
        (3, given(tensor=12), [KEYS["tensor"]]),
    ],
)
def test_no_group_of_ranks_straddles_a_node(
    nodes: int, overrides: list[str], refused: list[str]
) -> None:
    config = compose("ppo", overrides).config
    problems = list(check_placement(config, Devices("cuda", nodes, 8), ["main"], None))
    assert [each.where for each in problems] == refused


def test_a_gpu_that_torch_cannot_use_is_not_passed_over_in_silence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "0000:01:00.0").mkdir()
    monkeypatch.setattr(devices, "GPUS_OF_KERNEL", tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    trainer = compose("ppo", ["trainer.device=auto"]).config.trainer
    for hidden, num_warnings in ((True, 0), (False, 1)):
        caplog.clear()
        devices._warn_of_unused_gpus.cache_clear()
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "" if hidden else "0")
        assert Devices.from_config(trainer).kind == Devices.from_config(trainer).kind == "cpu"
        assert caplog.text.count("a GPU that torch cannot use") == num_warnings
    devices._warn_of_unused_gpus.cache_clear()


def test_a_driver_without_a_gpu_plans_for_those_of_the_cluster(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    trainer = compose("ppo", ["trainer.device=auto"]).config.trainer
    found = Devices.from_config(trainer, ClusterGpus(8, "H100"))
    assert (found.kind, found.per_node) == ("cuda", 8)
    assert memory_of(found, 8) == 81559 * 2**20
    assert memory_of(Devices.from_config(trainer, ClusterGpus(8, "TPU")), 8) is None
    nodes = [NodeGpus("10.0.0.1", "2.13.0", "13.0", (f"GPU, {n} MiB, 9.0, 580.1",)) for n in (9, 8)]
    found = Devices.from_config(trainer, ClusterGpus(8, None, tuple(nodes)))
    assert memory_of(found, 8) == 8 * 2**20
    assert found.has_bf16
    nine = compose("ppo", ["trainer.device=cuda", "trainer.n_gpus_per_node=9"]).config.trainer
    with pytest.raises(ResourceError, match="each node of the cluster has 8 GPUs"):
        Devices.from_config(nine, ClusterGpus(8, "H100"))


def test_gpus_elsewhere_without_bfloat16_are_planned_in_float32(tmp_path: Path) -> None:
    model = f"actor_rollout_ref.model.path={write_tiny_model(tmp_path)}"
    config = compose("ppo", ["trainer.device=cuda", model]).config
    old = NodeGpus("10.0.0.1", "2.13.0", "13.0", ("Tesla T4, 15360 MiB, 7.5, 580.1",))
    new = NodeGpus("10.0.0.2", "2.13.0", "13.0", ("NVIDIA A10, 23028 MiB, 8.6, 580.1",))
    sizes = []
    for nodes in ((new,), (new, old)):
        found = Devices.from_config(config.trainer, ClusterGpus(1, None, nodes))
        plan = plan_memory(config, found, {"main": 1}, Needs.ENGINE)
        sizes.append(plan.roles[0].storage.compute)
    assert sizes == [2, 4]  # bytes


def test_engines_on_gpus_have_time_to_compile() -> None:
    timeouts = compose("ppo").config.trainer.timeouts
    assert timeouts.worker_start("cpu") == 300 < timeouts.worker_start("cuda")
    own = compose("ppo", ["trainer.timeouts.worker_start_s=7"]).config.trainer.timeouts
    assert own.worker_start("cuda") == 7


@pytest.mark.parametrize(
    ("gpu", "message"),
    [
        ("H100, 81559 MiB, 9.0, 550.1", "which needs driver 580"),
        ("V100, 32768 MiB, 7.0, 580.1", "is for GPUs of capability 7.5 or more"),
    ],
)
def test_a_node_whose_gpus_torch_cannot_use_is_refused(gpu: str, message: str) -> None:
    trainer = compose("ppo", ["trainer.device=cuda"]).config.trainer
    cluster = ClusterGpus(8, None, (NodeGpus("10.0.0.1", "2.13.0", "13.0", (gpu,)),))
    with pytest.raises(ResourceError, match=f"GPUs of 10.0.0.1: .*{message}"):
        Devices.from_config(trainer, cluster)


def test_an_old_driver_of_this_machine_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(gpus, "visible_gpus", lambda: ["H100, 81559 MiB, 9.0, 570.1"])
    trainer = compose("ppo", ["trainer.device=cuda"]).config.trainer
    with pytest.raises(ResourceError, match=r"GPUs of this machine: .*needs driver 580"):
        Devices.from_config(trainer)


def test_ranks_meet_at_the_address_that_ray_has_of_the_first_node(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The name of a host is often 127.0.1.1, where no other node finds it."""
    joined: list[str] = []

    class Process:
        address = SimpleNamespace(remote=lambda host: f"{host}:7000")
        join = SimpleNamespace(remote=joined.append)
        listen_for_interrupts = SimpleNamespace(remote=lambda _: None)

    nodes = ["10.0.0.5 0a", "10.0.0.6 0b"]
    replaced = {"reserve": lambda _: None, "nodes_of": lambda _: nodes}
    for name, function in replaced.items():
        monkeypatch.setattr(pool, name, function)
    monkeypatch.setattr(RayPool, "_start", lambda *_: Process())
    monkeypatch.setattr(RayPool, "_gather", lambda _, results, *__: results)
    monkeypatch.setattr(RayPool, "_relayed", lambda _: [])
    RayPool(PoolSpec("main", 4, replace(GPU, world_size=4), 1.0, 1.0, False, 1.0, (2, 2)))
    assert joined == ["10.0.0.5:7000"] * 4


def test_auto_says_why_it_does_not_use_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(_: str) -> None:
        raise MissingExtraError("vLLM is not installed")

    monkeypatch.setattr(versions, "check_installed", missing)
    assert (auto.reason_for_hf("cuda"), auto.select_engine("cuda")) == (
        "vLLM is not installed",
        HFEngine,
    )
    assert (auto.reason_for_hf("cpu"), auto.select_engine("cpu")) == (None, HFEngine)


@pytest.mark.parametrize(
    ("address", "gloo"), [(None, ""), ("127.0.0.1:6379", ""), ("10.0.0.1:6379", "eth1")]
)
def test_interfaces_reach_workers_of_other_machines(
    address: str | None, gloo: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.setenv(name, "eth1")
    variables = _options(compose("ppo").config.ray_kwargs.ray_init, 1, address)["runtime_env"][
        "env_vars"
    ]
    assert (variables["GLOO_SOCKET_IFNAME"], variables["NCCL_SOCKET_IFNAME"]) == (gloo, "eth1")


class Sleeper(HFEngine):
    """Engine that drops its weights when it sleeps."""

    num_sleeps = 0

    def sleep(self) -> bool:
        type(self).num_sleeps += 1
        return True


def test_an_engine_sleeps_while_other_models_are_loaded(tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path)
    name = f"actor_rollout_ref.rollout.name={__name__}:Sleeper"
    config = compose("ppo", [f"actor_rollout_ref.model.path={model}", name]).config
    assert Needs.ENGINE in load_algorithm(config, num_steps=1).needs
    worker = actor_of(CPU, config)
    worker.start_engine()
    assert (Sleeper.num_sleeps, worker.engine_is_stale) == (1, True)
    worker.update_weights()
    assert not worker.engine_is_stale


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
    how = config.model, config.actor.fsdp_config, device
    assert compiles_by_default(tiny_model(), *how) is expected
    assert ("torch.compile needs a C compiler" in caplog.text) is (missing is not None)
    assert not compiles_by_default(mixture_model("mixtral"), *how)


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
    for level, expected in ((None, "WARN"), ("INFO", "INFO")):
        monkeypatch.delenv("NCCL_DEBUG", raising=False)
        if level:
            monkeypatch.setenv("NCCL_DEBUG", level)
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

    monkeypatch.setattr(gpu_kernels, "find_spec", lambda _: installed or None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr(torch.nn.attention, "activate_flash_attention_impl", activate)
    assert gpu_kernels.use_flash_attention_3() is used
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


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave the compiler and the settings of the allocator as they are."""
    monkeypatch.setattr(compiled, "enable_compiler", lambda: None)
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
