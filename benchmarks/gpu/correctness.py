"""Rungs of correctness: the device computes what a CPU computes in float32.

Kernels in bfloat16 round differently, so their error is compared with that of transformers' own
attention on the same device: rlctl's may be at most twice as large.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

import rlctl
from benchmarks.gpu.attention import (
    LENGTHS,
    LIMIT,
    attention_error,
    relative,
    sinks_error,
    window_error,
)
from benchmarks.gpu.capturing import capturer_of
from benchmarks.gpu.recorder import Recorder, Settings
from benchmarks.gpu.shapes import write_config
from benchmarks.gpu.work import ACTOR, build_actor, experience, pool
from rlctl.runtime.base.batch import Ragged
from rlctl.runtime.cluster.pools import InlinePool
from rlctl.runtime.model.attention import use_rlctl_attention
from rlctl.runtime.model.causal_lm import PolicyModel
from rlctl.runtime.model.sequences import Sequences
from rlctl.runtime.rollout.engine import SamplingParams
from rlctl.runtime.rollout.hf import HFEngine, Steps

_NOISE = 2.0  # multiple of the error of transformers' own attention
_TYPES = (torch.float32, torch.bfloat16)
Check = Callable[[str, torch.dtype], tuple[float, float]]  # returns an error and its limit


def attention(settings: Settings, recorder: Recorder) -> None:
    """Check kernels and log-probs, forward and backward, against the reference."""
    with pool(settings.device):
        _run(CHECKS, settings, recorder)


def sharding(settings: Settings, recorder: Recorder) -> None:
    """Check FSDP of one rank, and the gradient of an update in micro-batches."""
    with pool(settings.device) as opened, tempfile.TemporaryDirectory() as folder:
        _run({"FSDP of one rank": sharded_error}, settings, recorder)
        for dtype in _TYPES:
            with recorder.attempt(f"micro-batches, {_name(dtype)}"):
                error = gradient_error(opened, Path(folder), dtype)
                limit = LIMIT if dtype == torch.float32 else 2e-2
                _row(recorder, "gradient in 1 or 8 micro-batches", dtype, error, limit)


def resume(settings: Settings, recorder: Recorder) -> None:
    """Check that a resumed run has the weights of one that was not interrupted."""
    for dtype in _TYPES[: 1 if settings.tiny else None]:  # the runs' processes start for a minute
        with tempfile.TemporaryDirectory() as folder, recorder.attempt(f"resume, {_name(dtype)}"):
            differing = float(differing_bytes(settings.device, Path(folder), dtype))
            _row(recorder, "differing bytes after a resume", dtype, differing, 0.0)


def _run(checks: Mapping[str, Check], settings: Settings, recorder: Recorder) -> None:
    for dtype in _TYPES:
        for name, check in checks.items():
            with recorder.attempt(f"{name}, {_name(dtype)}"):
                error, limit = check(settings.device, dtype)
                _row(recorder, name, dtype, error, limit)


def _row(recorder: Recorder, name: str, dtype: torch.dtype, error: float, limit: float) -> None:
    recorder.row(
        "correctness", check=name, dtype=_name(dtype), error=error, limit=limit, ok=error <= limit
    )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _model(seed: int = 0) -> PreTrainedModel:
    """Return a model of two layers with heads of 64, which every kernel supports, in float32."""
    config = Qwen3Config(
        vocab_size=512,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        tie_word_embeddings=True,
    )
    torch.manual_seed(seed)
    model = Qwen3ForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    return model


def _model_on(device: str, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    model = _model()
    nn.Module.to(model, device, dtype)
    return model


def _ids() -> list[Tensor]:
    draw = torch.Generator().manual_seed(1)
    return list(torch.randint(0, 512, (sum(LENGTHS),), generator=draw).split(LENGTHS))


def _score_rows(model: PreTrainedModel, device: str) -> Tensor:
    """Return the log-probs (T,) of each row alone, with transformers' own attention."""
    parts = []
    for row in _ids():
        if len(row) > 1:
            ids = row.to(device)
            logits = model(input_ids=ids[None], use_cache=False).logits[0, :-1]
            parts.append(logits.float().log_softmax(-1).gather(1, ids[1:, None])[:, 0])
    return torch.cat(parts)


def _score_packed(policy: nn.Module, device: str) -> Tensor:
    """Return the log-probs (T,) of all rows in one packed row."""
    rows = [row for row in _ids() if len(row) > 1]
    prompts, responses = ([row[:1] for row in rows], [row[1:] for row in rows])
    first, rest = (Ragged.from_rows(part).to(device) for part in (prompts, responses))
    return policy(Sequences.from_ragged(first, rest)).log_probs


def _flat_gradient(module: nn.Module, log_probs: Tensor) -> Tensor:
    """Return the gradient (N,) of a weighted sum of log-probs (T,), which has both signs."""
    weights = torch.linspace(-1, 1, len(log_probs), device=log_probs.device)
    module.zero_grad()
    (log_probs * weights).sum().backward()
    grads = [parameter.grad for parameter in module.parameters()]
    full = [grad.full_tensor() if isinstance(grad, DTensor) else grad for grad in grads]
    return torch.cat([grad.flatten().float() for grad in full if grad is not None])


def log_prob_error(device: str, dtype: torch.dtype) -> tuple[float, float]:
    """Return the error of packed log-probs, and its limit."""
    expected = _score_rows(_model(), "cpu")
    model = _model_on(device, dtype)
    plain = relative(_score_rows(model, device), expected)
    use_rlctl_attention(model)
    packed = relative(_score_packed(PolicyModel(model, 1.0), device), expected)
    return packed, max(LIMIT if dtype == torch.float32 else 1e-3, _NOISE * plain)


def log_prob_gradient_error(device: str, dtype: torch.dtype) -> tuple[float, float]:
    """Return the error of the gradient of packed log-probs, and its limit."""
    reference = _model()
    expected = _flat_gradient(reference, _score_rows(reference, "cpu"))
    model = _model_on(device, dtype)
    plain = relative(_flat_gradient(model, _score_rows(model, device)), expected)
    use_rlctl_attention(model)
    policy = PolicyModel(model, 1.0)
    packed = relative(_flat_gradient(policy, _score_packed(policy, device)), expected)
    return packed, max(LIMIT if dtype == torch.float32 else 1e-3, _NOISE * plain)


def sharded_error(device: str, dtype: torch.dtype) -> tuple[float, float]:
    """Return the error of the gradient under FSDP of one rank with float32 weights, and its limit.

    The same passes without FSDP may have half of this error.
    """
    reference = _model()
    expected = _flat_gradient(reference, _score_rows(reference, "cpu"))
    whole = _model_on(device, dtype)
    use_rlctl_attention(whole)
    unsharded = PolicyModel(whole, 1.0)
    plain = relative(_flat_gradient(unsharded, _score_packed(unsharded, device)), expected)
    model = _model_on(device)
    use_rlctl_attention(model)
    policy = PolicyModel(model, 1.0)
    options = {
        "mesh": init_device_mesh(device, (1,)),
        "mp_policy": MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32),
    }
    for block in [*model.model.layers, policy]:
        fully_shard(block, **options)
    found = _flat_gradient(policy, _score_packed(policy, device))
    return relative(found, expected), max(LIMIT, _NOISE * plain)


def decoding_error(device: str, dtype: torch.dtype) -> tuple[float, float]:
    """Return the error of log-probs that `hf` reports of its recorded steps, and its limit."""
    model = _model_on(device, dtype)
    engine = HFEngine(model, None, steps=Steps(capturer_of(device)))
    prompts = Ragged.from_rows([ids[:40] for ids in _ids()]).to(device)
    sampling = SamplingParams(
        temperature=1.0, top_p=1.0, top_k=0, max_tokens=80, stop_token_ids=(), seed=1, n=2
    )
    found = engine.generate(prompts, sampling)
    assert engine.static is not None
    assert engine.static.reason is None, engine.static.reason
    rows = torch.arange(len(prompts)).repeat_interleave(sampling.n)
    sequences = Sequences.from_ragged(prompts.select(rows), found.response_ids.to(device))
    expected = PolicyModel(model, 1.0)(sequences).log_probs
    error = relative(found.log_probs.values, expected)
    return error, LIMIT if dtype == torch.float32 else 2e-2


CHECKS: dict[str, Check] = {
    "log-probs": log_prob_error,
    "gradient of log-probs": log_prob_gradient_error,
    "packed attention": attention_error,
    "attention in a window": window_error,
    "attention in a window with sinks": sinks_error,
    "recorded decoding steps": decoding_error,
}


def gradient_error(opened: InlinePool, folder: Path, dtype: torch.dtype) -> float:
    """Return the difference of the gradients of one mini-batch in one and in eight micro-batches.

    Weights are float32; `dtype` is that of the passes.
    """
    shape = write_config(folder, "Qwen3-0.6B", tiny=True)
    found = []
    for rows in (8, 1):
        worker = build_actor(
            opened,
            shape,
            f"actor_rollout_ref.model.dtype={'fp32' if dtype == torch.float32 else 'bf16'}",
            f"{ACTOR}.use_dynamic_bsz=false",
            f"{ACTOR}.ppo_micro_batch_size_per_gpu={rows}",
            f"{ACTOR}.grad_clip=1e9",
        )
        optimizer = worker.learner.optimizer
        assert optimizer is not None, "an actor is trained"
        parts: list[Tensor] = []

        def keep(*_: object, held: list[Tensor] = parts, model: nn.Module = worker.policy) -> None:
            grads = [parameter.grad for parameter in model.parameters()]
            full = [grad.full_tensor() if isinstance(grad, DTensor) else grad for grad in grads]
            held += [grad.detach().flatten().clone() for grad in full if grad is not None]

        optimizer.register_step_pre_hook(keep)
        worker.update(experience(8, 96, 2048), lr=1e-3)
        found.append(torch.cat(parts))
    return relative(found[1], found[0])


def differing_bytes(device: str, folder: Path, dtype: torch.dtype) -> int:
    """Return the bytes of weights that differ between a run of 4 steps and one resumed after 2."""
    name = _name(dtype)
    overrides = [
        f"trainer.device={device}",
        f"trainer.run_dir={folder}",
        "trainer.deterministic=true",
        "trainer.save_freq=2",
        "trainer.val_before_train=false",
        "trainer.test_freq=-1",
        "data.train_batch_size=16",
        f"{ACTOR}.ppo_mini_batch_size=8",
        f"actor_rollout_ref.model.dtype={'fp32' if dtype == torch.float32 else 'bf16'}",
        "actor_rollout_ref.rollout.name=hf",
    ]
    whole, half = (
        rlctl.train(
            "grpo",
            [
                *overrides,
                f"trainer.experiment_name={kind}-{name}",
                f"trainer.total_training_steps={n}",
            ],
            inline=True,
        )
        for kind, n in (("whole", 4), ("half", 2))
    )
    resumed = rlctl.resume(half.path, ["trainer.total_training_steps=4"], inline=True)
    files = [_weights(Path(run.path)) for run in (whole, resumed)]
    assert len(files[0]) == len(files[1]), "both are the same model"
    return sum(a != b for a, b in zip(*files, strict=True))


def _weights(run: Path) -> bytes:
    file = run / "checkpoints" / "step_000004" / "huggingface" / "model.safetensors"
    return file.read_bytes()
