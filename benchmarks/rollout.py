"""Tokens per second of rlctl's engines against transformers' `model.generate`, on the same model, in turn, in one process; and what it
takes to start vLLM and to hand weights over to it.

256 answers: 32 prompts of 30 to 90 tokens, 8 answers each, lengths spread evenly over 8 to 64 tokens (forced on both: `max_tokens` a row
here, a stopping criterion a row there). Both sample at temperature 1 from the whole vocabulary without gradients; `generate` runs with
SDPA, left padding and num_return_sequences, and is not asked for the log-probs that `hf` returns. Counted are the tokens of the answers.

`vllm` is measured where it is installed. Its parameters are the model's here; "streamed" is the hand-over to an engine that has its own.

    python -m benchmarks.rollout [--runs 5] [--threads 2] [--sizes 1m,20m,100m]
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from importlib.util import find_spec

import torch
from torch import Tensor
from transformers import Qwen2Config, Qwen2ForCausalLM, StoppingCriteria, StoppingCriteriaList

from rlctl.recipes.compose import compose
from rlctl.runtime.batch import Ragged
from rlctl.runtime.model.attention import use_rlctl_attention
from rlctl.runtime.place import Place
from rlctl.runtime.rollout.engine import EngineSpec, RolloutEngine, SamplingParams
from rlctl.runtime.rollout.hf import HFEngine

Answer = Callable[[Ragged, Tensor], int]  # of prompts and limits: the number of tokens

NUM_PROMPTS, N = 32, 8
SHAPES = {  # layers, hidden, intermediate, heads, key-value heads, vocabulary
    "1m": (4, 128, 384, 4, 2, 2048),
    "20m": (10, 384, 1152, 6, 2, 8192),
    "100m": (14, 768, 2304, 12, 4, 16384),
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


def answer(engine: RolloutEngine, prompts: Ragged, limits: Tensor) -> int:
    """One of rlctl's engines, with log-probs."""
    sampling = SamplingParams(temperature=1.0, top_p=1.0, top_k=0, max_tokens=limits, stop_token_ids=(), seed=1, n=N)
    responses = engine.generate(prompts, sampling)
    assert torch.equal(responses.response_ids.lengths, limits)
    return len(responses.response_ids.values)


def vllm_engine(model: Qwen2ForCausalLM, folder: str, shared: bool) -> RolloutEngine:
    """With the model's weights, or with a copy."""
    from rlctl.runtime.rollout.vllm_engine import VLLMEngine

    settings = [f"actor_rollout_ref.model.path={folder}", "data.train_files=none", "actor_rollout_ref.rollout.name=vllm"]
    part = compose("ppo_trainer", settings).config.actor_rollout_ref
    place = Place(0, 1, "cpu", torch.get_num_threads(), 600.0, False, None)
    spec = EngineSpec(part.model, part.rollout, torch.float32, place, max_length=256, seed=0)
    engine = VLLMEngine.from_spec(spec, model if shared else None)
    engine.load_weights(model.named_parameters())
    return engine


def hand_over_ms(engine: RolloutEngine, model: Qwen2ForCausalLM) -> float:
    times: list[float] = []
    for _ in range(6):
        start = time.perf_counter()
        engine.load_weights((name, value.detach()) for name, value in model.named_parameters())
        times.append(time.perf_counter() - start)
    return 1000 * statistics.median(times[1:])


def with_vllm(size: str, model: Qwen2ForCausalLM, engines: dict[str, Answer]) -> None:
    """Adds vLLM to `engines`, and says what starting and handing over take."""
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        start = time.perf_counter()
        engine = vllm_engine(model, folder, shared=True)
        seconds = time.perf_counter() - start
        streaming = vllm_engine(model, folder, shared=False)
    shared_ms, streamed_ms = hand_over_ms(engine, model), hand_over_ms(streaming, model)
    engines["vllm"] = lambda prompts, limits: answer(engine, prompts, limits)
    print(f"{size}: vllm starts in {seconds:.1f} s; hand-over shared {shared_ms:.2f} ms, streamed {streamed_ms:.1f} ms", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--sizes", default="1m,20m,100m")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    random = torch.Generator().manual_seed(0)
    lengths = torch.randint(30, 91, (NUM_PROMPTS,), generator=random)
    limits = torch.linspace(8, 64, NUM_PROMPTS * N).round().long()[torch.randperm(NUM_PROMPTS * N, generator=random)]
    for size in arguments.sizes.split(","):
        model = build(size)
        prompts = Ragged(torch.randint(1, model.config.vocab_size, (int(lengths.sum()),), generator=random), lengths)
        hf = HFEngine(model, max_num_seqs=None)
        engines: dict[str, Answer] = {
            "generate": lambda prompts, limits, model=model: generate(model, prompts, limits),
            "hf": lambda prompts, limits, model=model, hf=hf: (use_rlctl_attention(model), answer(hf, prompts, limits))[1],
        }
        if find_spec("vllm"):
            with_vllm(size, model, engines)
        speeds: dict[str, list[float]] = {name: [] for name in engines}
        for run in range(arguments.runs + 1):  # the first warms up
            for name, function in engines.items():
                start = time.perf_counter()
                tokens = function(prompts, limits)
                if run:
                    speeds[name].append(tokens / (time.perf_counter() - start))
        base = speeds["generate"]
        print(f"{size}: {sum(p.numel() for p in model.parameters()) / 1e6:.1f} M parameters, {torch.get_num_threads()} threads")
        for name, speed in speeds.items():
            ratios = [ours / theirs for ours, theirs in zip(speed, base, strict=True)]
            spread = f"(of {arguments.runs} runs: {min(ratios):.2f} to {max(ratios):.2f})"
            print(f"  {name:8s} {statistics.median(speed):9,.0f} tokens/s, {statistics.median(ratios):.2f} × generate {spread}", flush=True)


if __name__ == "__main__":
    main()
