"""Prompts of ranks, conversion of a request to vLLM's parameters, and of its output."""

# pyright: reportMissingImports=false, reportMissingModuleSource=false
# (an extra: types are checked where it is installed)
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from rlctl.runtime.base.batch import Ragged
from rlctl.runtime.rollout.requests import Completion, Request

if TYPE_CHECKING:
    from vllm import RequestOutput
    from vllm import SamplingParams as VLLMSamplingParams
    from vllm.logprobs import FlatLogprobs

    from rlctl.runtime.base.image_processor import Images


@dataclass(frozen=True, eq=False)
class RankPrompts:
    """Prompts of one rank, with a limit and a seed per response."""

    prompt_ids: Ragged  # (B rows) int64
    max_tokens: Tensor  # (B·n,) int64
    seeds: Tensor  # (B·n,) int64
    images: Sequence[Images]  # B

    def join_ranks(self, ranks_per_engine: int) -> tuple[RankPrompts, int]:
        """Join the prompts of all ranks of an engine, in order of ranks.

        Also returns the index of this rank's first row.
        """
        if ranks_per_engine == 1:
            return self, 0
        from vllm.distributed.parallel_state import get_tp_group

        group = get_tp_group()
        ranks = [self] * ranks_per_engine
        dist.all_gather_object(ranks, self, group=group.cpu_group)
        first = sum(len(rank.seeds) for rank in ranks[: group.rank_in_group])
        prompts = Ragged(
            torch.cat([rank.prompt_ids.values for rank in ranks]),
            torch.cat([rank.prompt_ids.lengths for rank in ranks]),
        )
        return RankPrompts(
            prompts,
            torch.cat([rank.max_tokens for rank in ranks]),
            torch.cat([rank.seeds for rank in ranks]),
            [images for rank in ranks for images in rank.images],
        ), first


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
        "logprobs": request.num_top,  # besides that of the sampled token
        "detokenize": False,
    }


def to_completion(request: Request, index: int, output: RequestOutput) -> Completion:
    """Convert the output of a finished response."""
    completion = output.outputs[0]
    flat = cast("FlatLogprobs", completion.logprobs)
    # Of each position: the sampled token, then the most probable ones.
    log_probs = [flat.logprobs[start] for start in flat.start_indices]
    tops = [
        zip(flat.token_ids[start + 1 : end], flat.logprobs[start + 1 : end], strict=True)
        for start, end in zip(flat.start_indices, flat.end_indices, strict=True)
    ]
    return Completion.of(request, index, completion.token_ids, log_probs, tops)
