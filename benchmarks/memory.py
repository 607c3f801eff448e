"""Peak memory of updates on one rank, beside the estimate of `--dry-run`.

    python -m benchmarks.memory [--cases "NAME; …"] [--hidden 512] [--layers 8] [--json]

`peak` and `plan` are MiB of tensors: on a CPU from the profiler's record of allocations, on CUDA
from its allocator. `resident` is the largest memory of the process, with its programs, in MiB. The
peak is that of any rank in the second to fourth update; building a model is not in it.
"""

from __future__ import annotations

import json
import multiprocessing
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch import multiprocessing as mp
from torch.autograd.profiler import profile, record_function
from transformers import Qwen2Config

from benchmarks.results import record
from benchmarks.table import Row, parse_arguments, show
from rlctl.recipes import schema
from rlctl.recipes.compose import compose
from rlctl.runtime.base.batch import Experience, Ragged
from rlctl.runtime.base.metrics import to_floats
from rlctl.runtime.base.rank_info import RankInfo
from rlctl.runtime.build import load_algorithm
from rlctl.runtime.model.sharding import local_part
from rlctl.runtime.planning.devices import Devices
from rlctl.runtime.planning.memory import RoleMemory
from rlctl.runtime.planning.role_memory import plan_memory
from rlctl.runtime.rollout.sampling_params import SamplingConfig
from rlctl.runtime.workers.actor import ActorSpec, ActorWorker
from rlctl.runtime.workers.critic import CriticSpec, CriticWorker
from rlctl.runtime.workers.pool_process import Process

MIB = 2**20
PEAK_METRIC = "perf/max_memory_allocated_gb"  # on a GPU, of an update
PROMPT, RESPONSE, ROWS = 16, 112, 4  # rows of a micro-batch
MICRO_BATCHES = 2  # of an update: the second one meets the gradients of the first
# That are measured, on all ranks: gloo's threads free buffers at random times.
UPDATES = 3
_MODELS = ("actor_rollout_ref.model", "critic.model")
_SECTIONS = ("actor_rollout_ref.actor", "critic")


@dataclass(frozen=True)
class Case:
    """One combination: the role, its ranks, and settings of its model, section and sharding."""

    ranks: int = 1
    role: str = "actor"
    model: tuple[str, ...] = ()
    fsdp: tuple[str, ...] = ()
    section: tuple[str, ...] = ()


_FP32 = ("dtype=float32",)
_ALL = ("enable_gradient_checkpointing=false",)
_SOME = ("enable_gradient_checkpointing=true", "gradient_checkpointing_every_n_layers=2")
_8BIT = ("optim.optimizer_impl=torchao.optim", "optim.optimizer=AdamW8bit")
EIGHT_BITS = "8-bit AdamW"  # its step is not compiled on a CPU, and has temporary tensors
CASES = {
    "fp32, all activations": Case(model=_ALL),
    "fp32": Case(),
    "fp32, every other layer": Case(model=_SOME),
    "fp32 weights, bf16 passes": Case(model=("dtype=bfloat16",)),
    "bf16": Case(model=("dtype=bfloat16",), fsdp=("model_dtype=bf16",)),
    "LoRA": Case(model=("lora_rank=16", *_ALL)),
    "critic": Case(role="critic", model=_ALL),
    EIGHT_BITS: Case(section=_8BIT),
    "2 ranks": Case(ranks=2),
    "2 ranks, bf16 passes": Case(ranks=2, model=("dtype=bfloat16",)),
    "2 ranks, no reshard": Case(ranks=2, fsdp=("reshard_after_forward=false",)),
    "2 ranks, LoRA": Case(ranks=2, model=("lora_rank=16",)),
    "2 ranks, critic, all activations": Case(ranks=2, role="critic", model=_ALL),
    "4 ranks": Case(ranks=4),
    "4 ranks, fsdp_size 2": Case(ranks=4, fsdp=("fsdp_size=2",)),
    "tensor 2": Case(ranks=2, fsdp=("tensor_model_parallel_size=2",)),
    "tensor 2, all activations": Case(ranks=2, model=_ALL, fsdp=("tensor_model_parallel_size=2",)),
    "sequence 2, all activations": Case(
        ranks=2, model=_ALL, fsdp=("ulysses_sequence_parallel_size=2",)
    ),
    "2 × tensor 2": Case(ranks=4, fsdp=("tensor_model_parallel_size=2",)),
}
# What is offloaded is in the host's memory on a CPU, with or without the setting. Each case has the
# weights of the other one.
OFFLOADED = {
    "optimizer offload": ("fp32", Case(fsdp=("optimizer_offload=true",))),
    "activation offload": (
        "fp32, all activations",
        Case(model=("enable_activation_offload=true", *_ALL)),
    ),
    "activation offload, recomputed": ("fp32", Case(model=("enable_activation_offload=true",))),
}


def write_model(folder: Path, hidden: int, layers: int, vocabulary: int) -> None:
    """Write the config.json of a decoder with random weights."""
    Qwen2Config(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        num_key_value_heads=max(1, hidden // 128),
        max_position_embeddings=4096,
        tie_word_embeddings=False,
        architectures=["Qwen2ForCausalLM"],
    ).save_pretrained(folder)


def config_of(case: Case, folder: str, device: str, rows: int) -> schema.Config:
    """Return the configuration of a case, with micro-batches of `rows`."""
    tokens = rows * (PROMPT + RESPONSE)
    overrides = [
        f"data.max_prompt_length={PROMPT}",
        f"data.max_response_length={RESPONSE}",
        "trainer.placement.rollout=engines",
        f"trainer.device={device}",
        f"data.train_batch_size={MICRO_BATCHES * rows * case.ranks}",
    ]
    for model, section in zip(_MODELS, _SECTIONS, strict=True):
        overrides += [f"{model}.path={folder}", f"{model}.init=random"]
        given = case.model if any("dtype" in each for each in case.model) else _FP32 + case.model
        overrides += [f"{model}.{each}" for each in given]
        overrides += [f"{section}.{each}" for each in case.section]
        overrides += [f"{section}.fsdp_config.{each}" for each in case.fsdp]
        overrides += [f"{section}.ppo_max_token_len_per_gpu={tokens}"]
        overrides += [f"{section}.ppo_mini_batch_size={MICRO_BATCHES * rows * case.ranks}"]
    return compose("gsm8k_ppo", overrides).config


def planned(case: Case, folder: str, device: str, rows: int) -> RoleMemory:
    """Return the memory that the plan gives the role of a case."""
    config = config_of(case, folder, device, rows)
    needs = load_algorithm(config, 1).needs
    ranks = {"main": case.ranks, "engines": 1}
    plan = plan_memory(config, Devices(device, 1, case.ranks), ranks, needs)
    return next(each for each in plan.known() if each.role == case.role)


def build(case: Case, rank_info: RankInfo, folder: str, rows: int) -> ActorWorker | CriticWorker:
    """Return the worker of a case."""
    config = config_of(case, folder, rank_info.device, rows)
    algorithm: Any = load_algorithm(config, 1)
    if case.role == "critic":
        return CriticWorker(rank_info, CriticSpec(config.critic, algorithm, 0))
    part = config.actor_rollout_ref
    sampling = SamplingConfig(part.rollout, RESPONSE, (2,))
    return ActorWorker(rank_info, ActorSpec(part.model, part.actor, sampling, PROMPT, algorithm, 0))


def experience(rows: int) -> Experience:
    """Return `rows` rows with a prompt of their own each, of the longest length."""
    draw = torch.Generator().manual_seed(0)

    def ids(length: int) -> Ragged:
        drawn = torch.randint(3, 1000, (rows, length), generator=draw)
        return Ragged.from_rows(list(drawn), torch.int64)

    response_ids = ids(RESPONSE)

    def values(shift: float = 0.0) -> Ragged:
        return response_ids.like(torch.randn(rows * RESPONSE, generator=draw) * 0.1 + shift)

    return Experience(
        prompt_ids=ids(PROMPT),
        group=torch.arange(rows),
        rows=[],
        response_ids=response_ids,
        response_mask=response_ids.like(torch.ones(rows * RESPONSE)),
        rollout_log_probs=values(-9.0),
        finish=["stop"] * rows,
        scores=torch.zeros(rows),
        components={},
        failed=torch.zeros(rows, dtype=torch.bool),
        rewards=values(),
        old_log_probs=values(-9.0),
        advantages=values(),
        ref_log_probs=values(-9.0),
        values=values(),
        returns=values(),
    )


@contextmanager
def peak_of_update(device: str) -> Iterator[dict[str, int]]:
    """Yield a dictionary, which gets the peak of `record_function("update")` on a CPU in bytes."""
    found: dict[str, int] = {}
    if device == "cuda":  # each update tells its peak, and starts a new maximum
        yield found
        return
    with profile(profile_memory=True, use_kineto=True) as profiler:
        yield found
    recorded: Any = profiler
    events = recorded.kineto_results.events()
    began = next(each.start_ns() for each in events if each.name() == "update")
    held = peak = 0
    for event in sorted(
        (each for each in events if each.name() == "[memory]"), key=lambda each: each.start_ns()
    ):
        held += event.nbytes()
        peak = max(peak, held) if event.start_ns() >= began else 0
    found["peak"] = peak


def run(rank_info: RankInfo, case: Case, folder: str, rows: int) -> dict[str, int]:
    """Return the peak of the second update and of the process, in bytes, and a sum of weights."""
    with peak_of_update(rank_info.device) as found:
        worker = build(case, rank_info, folder, rows)
        slices = worker.spec.fsdp.ulysses_sequence_parallel_size  # of each row
        batch = experience(MICRO_BATCHES * rows * slices)
        worker.update(batch, lr=1e-4)
        with record_function("update"):
            for _ in range(UPDATES):
                metrics = to_floats(worker.update(batch, lr=1e-4))
                found["peak"] = max(found.get("peak", 0), int(metrics.get(PEAK_METRIC, 0) * 2**30))
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    line = next(each for each in status.splitlines() if each.startswith("VmHWM"))
    digest = sum(_checksum(local_part(each)) for each in worker.learner.model.parameters())
    return found | {"resident": int(line.split()[1]) * 1024, "digest": digest}


def _checksum(value: Tensor) -> int:
    """Return the sum of the bits (N, ...) as integers."""
    kind = {2: torch.int16, 4: torch.int32}[value.element_size()]
    return int(value.detach().view(kind).sum(dtype=torch.int64))


def _rank(rank: int, case: Case, folder: str, rows: int, output: Path) -> None:
    """Run a case on one rank, which writes the result."""
    process = Process(RankInfo(rank, case.ranks, "cpu", 1, 600.0, False, None))
    meet = output / "address"
    if case.ranks > 1:
        if rank == 0:
            (output / "new").write_text(process.address())
            (output / "new").rename(meet)
        while not meet.exists():  # the first rank that fails ends the others
            time.sleep(0.01)
        process.join(meet.read_text())
    found = run(process.rank_info, case, folder, rows)
    (output / f"found-{rank}").write_text(json.dumps(found))
    process.leave()


def on_ranks(case: Case, folder: str, rows: int) -> dict[str, int]:
    """Run a case on CPU ranks in processes of their own; return the largest peak of any."""
    with tempfile.TemporaryDirectory() as output:
        given = (case, folder, rows, Path(output))
        start: Any = mp
        start.start_processes(_rank, given, case.ranks, start_method="forkserver")
        found = [json.loads(each.read_text()) for each in Path(output).glob("found-*")]
        return max(found, key=lambda each: each["peak"])


def row(name: str, found: dict[str, int], plan: RoleMemory) -> Row:
    """Return the line of a case."""
    return {
        "case": name,
        "peak": found["peak"] / MIB,
        "plan": plan.peak / MIB,
        "plan / peak": plan.peak / found["peak"],
        "resident": found["resident"] / MIB,
    }


def main() -> None:
    """Measure and print."""
    given = parse_arguments(__doc__, cases="", hidden=512, layers=8, vocabulary=8192)
    known = [name for name in CASES if name != EIGHT_BITS or find_spec("torchao")]
    chosen = [each.strip() for each in given.cases.split(";")] if given.cases else known
    multiprocessing.get_context("forkserver").set_forkserver_preload(["benchmarks.memory"])
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder), given.hidden, given.layers, given.vocabulary)
        for name in chosen:
            plan = planned(CASES[name], folder, "cpu", ROWS)
            rows.append(row(name, on_ranks(CASES[name], folder, ROWS), plan))
            print(rows[-1], file=sys.stderr, flush=True)
    worst = max(rows, key=lambda each: abs(float(each["plan / peak"]) - 1))
    show("peak memory of an update on one rank, MiB", rows, given.json)
    off = abs(float(worst["plan / peak"]) - 1)
    print(f"largest difference of plan and peak: {off:.0%} ({worst['case']})", file=sys.stderr)
    record("plan and peak, largest difference", off, "lower")


if __name__ == "__main__":
    main()
