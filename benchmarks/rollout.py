"""Tokens per second of the engine `hf` against transformers' `model.generate`, on the same model, in turn, in one process.

256 answers: 32 prompts of 30 to 90 tokens, 8 answers each, lengths spread evenly over 8 to 64 tokens (forced on both: `max_tokens` a row
here, a stopping criterion a row there). Both sample at temperature 1 from the whole vocabulary without gradients; `generate` runs with
SDPA, left padding and num_return_sequences, and is not asked for the log-probs that `hf` returns. Counted are the tokens of the answers.

    python benchmarks/rollout.py [--runs 5] [--threads 2] [--sizes 1m,20m]
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch
from torch import Tensor
from transformers import Qwen2Config, Qwen2ForCausalLM, StoppingCriteria, StoppingCriteriaList

from rlctl.runtime.batch import Ragged
from rlctl.runtime.rollout.engine import SamplingParams
from rlctl.runtime.rollout.hf import HFEngine

NUM_PROMPTS, N = 32, 8
SHAPES = {  # layers, hidden, intermediate, heads, key-value heads, vocabulary
    "1m": (4, 128, 384, 4, 2, 2048),
    "20m": (10, 384, 1152, 6, 2, 8192),
}


class RowLimits(StoppingCriteria):
    """Ends row i after limits[i] new tokens."""

    def __init__(self, prompt_length: int, limits: Tensor) -> None:
        self.ends = prompt_length + limits

    def __call__(self, input_ids: Tensor, *_: object, **__: object) -> Tensor:  # type: ignore[override]
        return input_ids.shape[1] >= self.ends


def build(size: str) -> Qwen2ForCausalLM:
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
    """transformers: left-padded prompts, answers cut by a stopping criterion."""
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
            num_return_sequences=N,
            max_new_tokens=int(limits.max()),
            pad_token_id=0,
            eos_token_id=None,
            stopping_criteria=StoppingCriteriaList([RowLimits(width, limits)]),
        )
    assert out.shape == (NUM_PROMPTS * N, width + int(limits.max())), out.shape
    return int(limits.sum())


def ours(model: Qwen2ForCausalLM, prompts: Ragged, limits: Tensor) -> int:
    """rlctl's engine, with log-probs."""
    sampling = SamplingParams(temperature=1.0, top_p=1.0, top_k=0, max_tokens=limits, stop_token_ids=(), seed=1, n=N)
    responses = HFEngine(model, max_num_seqs=None).generate(prompts, sampling)
    assert torch.equal(responses.response_ids.lengths, limits)
    return len(responses.response_ids.values)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--sizes", default="1m,20m")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    random = torch.Generator().manual_seed(0)
    lengths = torch.randint(30, 91, (NUM_PROMPTS,), generator=random)
    limits = torch.linspace(8, 64, NUM_PROMPTS * N).round().long()[torch.randperm(NUM_PROMPTS * N, generator=random)]
    for size in arguments.sizes.split(","):
        model = build(size)
        vocabulary = model.config.vocab_size
        prompts = Ragged(torch.randint(1, vocabulary, (int(lengths.sum()),), generator=random), lengths)
        speeds: dict[str, list[float]] = {"generate": [], "hf": []}
        for run in range(arguments.runs + 1):  # the first warms up
            for name, function in (("generate", generate), ("hf", ours)):
                start = time.perf_counter()
                tokens = function(model, prompts, limits)
                if run:
                    speeds[name].append(tokens / (time.perf_counter() - start))
        ratios = [ours / theirs for ours, theirs in zip(speeds["hf"], speeds["generate"], strict=True)]
        print(
            f"{size}: {sum(p.numel() for p in model.parameters()) / 1e6:.1f} M parameters, {torch.get_num_threads()} threads, "
            f"generate {statistics.median(speeds['generate']):,.0f} tokens/s, hf {statistics.median(speeds['hf']):,.0f} tokens/s, "
            f"ratio {statistics.median(ratios):.2f} (of {arguments.runs} runs: {min(ratios):.2f} to {max(ratios):.2f})",
            flush=True,
        )


if __name__ == "__main__":
    main()
