"""Difference between engine and trainer for a mixture of experts, with and without router replay.

    python -m benchmarks.router_replay [--prompts 16]

The engine has the trainer's weights in bfloat16, or with noise; the trainer computes in float32.
Prints the share of experts on which both agree, and |log π_train − log π_engine| of the sampled
tokens: without replay, with the experts of response tokens alone, and with those of all tokens.
"""

from __future__ import annotations

import argparse
import copy
from typing import cast

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from benchmarks.results import record_rows
from rlctl.runtime.base.batch import Ragged
from rlctl.runtime.model.attention import use_rlctl_attention
from rlctl.runtime.model.causal_lm import PolicyModel
from rlctl.runtime.model.routing import AGREEMENT, OWN, Routers
from rlctl.runtime.model.sequences import Sequences
from rlctl.runtime.rollout.engine import Responses, SamplingParams
from rlctl.runtime.rollout.hf import HFEngine, Steps
from rlctl.runtime.rollout.recorded_rows import RecordedRows

SIZES = {
    "vocab_size": 1024,
    "hidden_size": 256,
    "moe_intermediate_size": 128,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "num_experts": 64,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "initializer_range": 0.1,  # scores of experts as far apart as those of trained routers
}
PROMPT, RESPONSE, N = 48, 64, 4  # tokens, tokens, responses to a prompt


def build() -> PreTrainedModel:
    """Build a random mixture with 64 experts in 8 layers, of which a token uses 8."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen3_moe", **SIZES)).eval()
    use_rlctl_attention(model)
    return model


def engine_of(model: PreTrainedModel, dtype: torch.dtype, noise: float) -> HFEngine:
    """Return an engine with the weights of `model`, each changed by `noise` of its size."""
    own = copy.deepcopy(model)
    with torch.no_grad():
        for each in own.parameters():
            each.mul_(1 + noise * torch.randn_like(each))
    own = cast("PreTrainedModel", torch.nn.Module.to(own, dtype))
    return HFEngine(own, max_num_seqs=None, steps=Steps(rows=RecordedRows))


def log_probs(
    model: PreTrainedModel, prompts: Ragged, found: Responses, routing: Ragged | None
) -> tuple[Tensor, float]:
    """Return the trainer's log-probs (T,) of the responses, and the share of equal experts."""
    Routers.of(model)
    packed = Sequences.from_ragged(prompts, found.response_ids, routing=routing)
    with torch.no_grad():
        values = PolicyModel(model, 1.0)(packed).log_probs
    if packed.routing is None:
        return values, 1.0
    return values, packed.routing.agreement(packed.predictors)[AGREEMENT].value


def main() -> None:
    """Measure all cases and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompts", type=int, default=16)
    num_prompts = parser.parse_args().prompts
    model, rows = build(), list[dict[str, str | float]]()
    ids = torch.randint(0, SIZES["vocab_size"], (num_prompts * PROMPT,))  # pyright: ignore[reportArgumentType]
    prompts = Ragged(ids, torch.full((num_prompts,), PROMPT))
    sampling = SamplingParams(1.0, 1.0, -1, (), RESPONSE, 0, N)
    for name, dtype, noise in (
        ("same weights", torch.float32, 0.0),
        ("bfloat16", torch.bfloat16, 0.0),
        ("noise of 0.1 %", torch.float32, 1e-3),
        ("noise of 1 %", torch.float32, 1e-2),
    ):
        found = engine_of(model, dtype, noise).generate(prompts, sampling)
        assert found.routing is not None
        own = prompts.select(torch.arange(num_prompts).repeat_interleave(N))
        responses = found.routing.values.clone()
        in_row = torch.arange(len(responses)) - found.routing.offsets[found.routing.row_of_token]
        responses[in_row < PROMPT] = OWN
        for replay, routing in (
            ("none", None),
            ("responses", found.routing.like(responses)),
            ("all tokens", found.routing),
        ):
            values, agreement = log_probs(model, own, found, routing)
            diff = (values - found.log_probs.values).abs()
            mean, most = float(diff.mean()), float(diff.quantile(0.99))
            rows.append({"engine": name, "replay": replay, "mean": mean, "99 %": most})
            shown = "" if routing is None else f"{agreement:.4f}"
            print(f"{name:15} {replay:11} mean {mean:.2e}  99 % {most:.2e}  agreement {shown}")
    record_rows(rows, {"mean": "lower"})


if __name__ == "__main__":
    main()
