"""Conversion of a request to vLLM's parameters, and of its output to a response."""

# pyright: reportMissingImports=false, reportMissingModuleSource=false
# (an extra: types are checked where it is installed)
from __future__ import annotations

from typing import TYPE_CHECKING, cast

import torch

from rlctl.runtime.rollout.requests import Completion, Request

if TYPE_CHECKING:
    from vllm import RequestOutput
    from vllm import SamplingParams as VLLMSamplingParams
    from vllm.logprobs import FlatLogprobs


def vllm_params(request: Request, index: int) -> VLLMSamplingParams:
    """Build vLLM's parameters of one response.

    Only `stop_token_ids` and the limit end a response; it is not detokenized.
    """
    from vllm import SamplingParams as VLLMSamplingParams

    decoding = request.decoding
    return VLLMSamplingParams(
        temperature=decoding.temperature,
        top_p=decoding.top_p,
        top_k=max(decoding.top_k, 0),
        max_tokens=request.max_tokens[index],
        seed=request.seeds[index],
        stop_token_ids=list(decoding.stop_token_ids),
        ignore_eos=True,
        logprobs=0,  # of the sampled token only
        flat_logprobs=True,
        detokenize=False,
    )


def to_completion(request: Request, index: int, output: RequestOutput) -> Completion:
    """Convert the output of a finished response."""
    completion = output.outputs[0]
    ids = torch.tensor(completion.token_ids, dtype=torch.int64)
    log_probs = torch.tensor(cast("FlatLogprobs", completion.logprobs).logprobs)
    stopped = completion.token_ids[-1] in request.decoding.stop_token_ids
    return Completion(request.key, index, ids, log_probs, "stop" if stopped else "length")
