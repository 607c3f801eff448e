"""Inside a vLLM engine of this process: where each of the policy's parameters lies, and which log-probs are reported."""

# pyright: reportMissingImports=false, reportMissingModuleSource=false
# (an extra: types are checked where it is installed)
from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from vllm import LLM


def model_runner(llm: LLM) -> Any:
    """vLLM's model runner of this rank."""
    return llm.llm_engine.model_executor.driver_worker.model_runner


def places(model: nn.Module, policy: nn.Module) -> dict[str, Tensor] | None:
    """Where each parameter of `policy` lies in vLLM's `model`, by its transformers name: a view of the same shape.

    vLLM stores query, key and value, and gate and up, as one matrix each (`packed_modules_mapping`), one below the other, and pads the
    vocabulary. None where a parameter has no such place: with another layout, or where vLLM holds a part of the model only.
    """
    theirs = dict(model.named_parameters())
    ours = dict(policy.named_parameters())
    merged = {
        part: (name, parts)
        for name, parts in getattr(model, "packed_modules_mapping", {}).items()
        for part in parts
    }
    found: dict[str, Tensor] = {}
    for name, value in ours.items():
        part = next((each for each in name.split(".") if each in merged), None)
        first, target = 0, theirs.get(name)
        if part is not None:
            whole, parts = merged[part]
            target = theirs.get(name.replace(f".{part}.", f".{whole}."))
            before = [
                ours.get(name.replace(f".{part}.", f".{each}."))
                for each in parts[: parts.index(part)]
            ]
            first = sum(len(each) for each in before if each is not None)
        if (
            target is None
            or target.shape[1:] != value.shape[1:]
            or first + len(value) > len(target)
        ):
            return None
        found[name] = target.data[first : first + len(value)]
    return found


def share(model: nn.Module, policy: nn.Module) -> dict[str, Tensor] | None:
    """Make the parameters of `policy` views of vLLM's, so that there is one copy of the weights and no hand-over. See `places`."""
    found = places(model, policy)
    if found is None or any(
        found[name].dtype != parameter.dtype for name, parameter in policy.named_parameters()
    ):
        return None
    for name, parameter in policy.named_parameters():
        found[name].copy_(parameter.data)
        parameter.data = found[name]
    return found


def report_whole_distribution(runner: Any) -> None:
    """Have vLLM report log-probs under `log_softmax(logits / temperature)` also where top-k or top-p restrict what is drawn.

    vLLM's `processed_logprobs` are those of the restricted distribution. The trainer computes the whole one, and so both agree.
    """
    sampler = runner.sampler
    if hasattr(sampler, "topk_topp_sampler"):
        _of_runner_v1(sampler.topk_topp_sampler)
    else:
        _of_runner_v2(sampler)


def _of_runner_v1(restricted: Any) -> None:
    """The runner on CPUs: `forward` is given logits that have been divided by the temperature, draws, and gives log-probs along."""
    restricted.logprobs_mode = "raw_logprobs"  # compute none there
    draw = restricted.forward

    def forward(
        logits: Tensor,
        generators: dict[int, torch.Generator],
        top_k: Tensor | None,
        top_p: Tensor | None,
    ) -> tuple[Tensor, Tensor | None]:
        log_probs = logits.log_softmax(-1, dtype=torch.float32)
        tokens, _ = draw(logits, generators, top_k, top_p)
        return tokens, log_probs

    restricted.forward = forward


def _of_runner_v2(sampler: Any) -> None:
    """The runner on GPUs: what `_sample_random` gives back as processed logits is what log-probs are computed of."""
    draw = sampler._sample_random

    def sample_random(
        logits: Tensor,
        rows: Tensor,
        rows_np: Any,
        positions: Tensor,
        top_k: Any,
        top_p: Any,
        fused: bool,
    ) -> Any:
        whole = logits if top_k is None and top_p is None else logits.clone()
        tokens, _ = draw(logits, rows, rows_np, positions, top_k, top_p, fused)
        return tokens, whole

    sampler._sample_random = sample_random
