"""Conversion of a request to vLLM's parameters, and of its output to a response."""

# pyright: reportMissingImports=false, reportMissingModuleSource=false
# (an extra: types are checked where it is installed)
from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from rlctl.runtime.rollout.requests import Completion, Request

if TYPE_CHECKING:
    from vllm import RequestOutput
    from vllm import SamplingParams as VLLMSamplingParams
    from vllm.logprobs import FlatLogprobs


def vllm_params(request: Request, index: int) -> VLLMSamplingParams:
    """Build vLLM's parameters of one response."""
    from vllm import SamplingParams as VLLMSamplingParams

    return VLLMSamplingParams(**vllm_arguments(request, index), flat_logprobs=True)


def vllm_arguments(request: Request, index: int) -> dict[str, Any]:
    """Return the arguments of vLLM's `SamplingParams`, and of its server, for one response.

    Only `stop_token_ids` and the limit end a response; it is not detokenized.
    """
    decoding = request.decoding
    return {
        "temperature": decoding.temperature,
        "top_p": decoding.top_p,
        "top_k": max(decoding.top_k, 0),
        "max_tokens": request.max_tokens[index],
        "seed": request.seeds[index],
        "stop_token_ids": list(decoding.stop_token_ids),
        "ignore_eos": True,
        "logprobs": 0,  # of the sampled token only
        "detokenize": False,
    }


def to_completion(request: Request, index: int, output: RequestOutput) -> Completion:
    """Convert the output of a finished response."""
    completion = output.outputs[0]
    log_probs = cast("FlatLogprobs", completion.logprobs).logprobs
    return Completion.of(request, index, completion.token_ids, log_probs)
