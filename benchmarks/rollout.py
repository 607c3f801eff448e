"""Tokens per second of rlctl's engines relative to transformers' `model.generate`.

    python -m benchmarks.rollout [--runs 3] [--threads 2] [--sizes 1m,20m,100m] [--json]

1 M and 20 M parameters: 256 responses, 32 prompts of 30 to 90 tokens, 8 responses each, lengths
spread evenly over 8 to 64 tokens; 100 M: 64 responses, 16 prompts, 4 responses each, 8 to 32
tokens. Lengths are forced for all (`max_tokens` per row here, a stopping criterion per row there).
All sample at temperature 1 from the entire vocabulary without gradients. `generate` uses SDPA, left
padding and num_return_sequences, and returns no log-probs. Response tokens are counted; engines
alternate in one process and a ratio is the median over runs.

`vllm` is measured if it is installed, with the policy's weights. See also `benchmarks.weight_sync`
and `benchmarks.vllm_start`.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from importlib.util import find_spec

import torch
from torch import Tensor
from transformers import Qwen2Config, Qwen2ForCausalLM, StoppingCriteria, StoppingCriteriaList

from benchmarks.results import record_rows
from benchmarks.table import Row, in_fresh_process, parse_arguments, show
from rlctl.cores import available_cores
from rlctl.recipes import schema
from rlctl.recipes.compose import compose
from rlctl.runtime.base.batch import Ragged
from rlctl.runtime.base.rank_info import RankInfo
from rlctl.runtime.model.attention import use_rlctl_attention
from rlctl.runtime.rollout.engine import EngineSpec, RolloutEngine, SamplingParams
from rlctl.runtime.rollout.hf import HFEngine

# prompts, responses each, longest response
WORK = {"1m": (32, 8, 64), "20m": (32, 8, 64), "100m": (16, 4, 32)}
SHAPES = {  # layers, hidden, intermediate, heads, key-value heads, vocabulary
    "1m": (4, 128, 384, 4, 2, 2048),
    "20m": (10, 384, 1152, 6, 2, 8192),
    "100m": (14, 768, 2304, 12, 4, 16384),
}


class RowLimits(StoppingCriteria):
    """Criterion that ends row i after limits[i] new tokens; limits (B,)."""

    def __init__(self, prompt_length: int, limits: Tensor) -> None:
        self.ends = prompt_length + limits

    def __call__(self, input_ids: Tensor, *_: object, **__: object) -> Tensor:  # type: ignore[override]
        """Return which rows are finished: input_ids (B, T) -> (B,) bool."""
        return input_ids.shape[1] >= self.ends


def build(size: str) -> Qwen2ForCausalLM:
    """Build a random model of a size in `SHAPES`."""
    layers, hidden, intermediate, heads, kv_heads, vocabulary = SHAPES[size]
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
    )
    return Qwen2ForCausalLM(config).eval()


def generate(model: Qwen2ForCausalLM, prompts: Ragged, limits: Tensor) -> int:
    """Sample with transformers from left-padded prompts; return the number of response tokens.

    `limits` (B·n,) are the lengths of the responses.
    """
    width = int(prompts.lengths.max())
    ids = torch.zeros(len(prompts), width, dtype=torch.int64)
    mask = torch.arange(width) >= width - prompts.lengths[:, None]
    ids[mask] = prompts.values
    model.set_attn_implementation("sdpa")
    with torch.inference_mode():
        out = model.generate(  # type: ignore[attr-defined]
            input_ids=ids,
            attention_mask=mask.long(),
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            num_return_sequences=len(limits) // len(prompts),
            max_new_tokens=int(limits.max()),
            pad_token_id=0,
            eos_token_id=None,
            stopping_criteria=StoppingCriteriaList([RowLimits(width, limits)]),
        )
    assert out.shape == (len(limits), width + int(limits.max())), out.shape
    return int(limits.sum())


def sample(engine: RolloutEngine, prompts: Ragged, limits: Tensor) -> int:
    """Sample with an engine of rlctl; return the number of response tokens. limits (B·n,)."""
    sampling = SamplingParams(
        temperature=1.0,
        top_p=1.0,
        top_k=0,
        max_tokens=limits,
        stop_token_ids=(),
        seed=1,
        n=len(limits) // len(prompts),
    )
    responses = engine.generate(prompts, sampling)
    assert torch.equal(responses.response_ids.lengths, limits)
    return len(responses.response_ids.values)


def vllm_engine(model: Qwen2ForCausalLM, shared: bool) -> RolloutEngine:
    """Build a vLLM engine that shares the model's weights, or has a copy."""
    from rlctl.runtime.rollout.vllm_engine.vllm_in_process import VLLMEngine

    rank_info = RankInfo(0, 1, "cpu", torch.get_num_threads(), 600.0, False, None)
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        part = vllm_settings(folder)
        engine = VLLMEngine.from_spec(
            EngineSpec(part.model, part.rollout, torch.float32, rank_info, 256, seed=0),
            model if shared else None,
        )
    engine.load_weights((name, value.detach()) for name, value in model.named_parameters())
    return engine


def vllm_settings(folder: str, *more: str) -> schema.ActorRolloutRef:
    """Return the config of a vLLM engine for the model in `folder`."""
    settings = [
        f"actor_rollout_ref.model.path={folder}",
        "data.train_files=none",
        "actor_rollout_ref.rollout.name=vllm",
    ]
    return compose("ppo_trainer", [*settings, *more]).config.actor_rollout_ref


def measure(size: str, runs: int, threads: int) -> list[Row]:
    """Return one row per engine."""
    torch.set_num_threads(threads)
    num_prompts, n, longest = WORK[size]
    random = torch.Generator().manual_seed(0)
    lengths = torch.randint(30, 91, (num_prompts,), generator=random)
    limits = (
        torch.linspace(8, longest, num_prompts * n)
        .round()
        .long()[torch.randperm(num_prompts * n, generator=random)]
    )
    model = build(size)
    prompts = Ragged(
        torch.randint(1, model.config.vocab_size, (int(lengths.sum()),), generator=random), lengths
    )
    engines: dict[str, RolloutEngine | None] = {
        "generate": None,
        "hf": HFEngine(model, max_num_seqs=None),
    }
    if find_spec("vllm"):
        engines["vllm"] = vllm_engine(model, shared=True)
    speeds: dict[str, list[float]] = {name: [] for name in engines}
    for run in range(runs + 1):  # the first run warms up
        for name, engine in engines.items():
            if isinstance(engine, HFEngine):
                use_rlctl_attention(model)  # `generate` uses its own
            start = time.perf_counter()
            tokens = (
                generate(model, prompts, limits)
                if engine is None
                else sample(engine, prompts, limits)
            )
            if run:
                speeds[name].append(tokens / (time.perf_counter() - start))
    rows: list[Row] = []
    for name, speed in speeds.items():
        ratios = [value / base for value, base in zip(speed, speeds["generate"], strict=True)]
        rows.append(
            {
                "parameters": f"{sum(p.numel() for p in model.parameters()) / 1e6:.1f} M",
                "engine": name,
                "tokens/s": statistics.median(speed),
                "ratio": statistics.median(ratios),
                "least": min(ratios),
                "most": max(ratios),
            }
        )
    return rows


def main() -> None:
    """Measure and print."""
    arguments = parse_arguments(__doc__, runs=3, threads=available_cores(), sizes="1m,20m,100m")
    rows = [
        row
        for size in arguments.sizes.split(",")
        for row in in_fresh_process(measure, size, arguments.runs, arguments.threads)
    ]
    record_rows(rows, {"ratio": "higher"})
    show(
        f"relative to generate, {arguments.threads} threads, median of {arguments.runs} runs",
        rows,
        arguments.json,
    )


if __name__ == "__main__":
    main()
