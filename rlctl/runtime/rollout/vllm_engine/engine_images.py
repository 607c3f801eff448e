"""Images in vLLM 0.31 and 0.32, whose engine takes those that the trainer's processor made."""

# pyright: reportMissingImports=false, reportMissingModuleSource=false
# (an extra: types are checked where it is installed)
from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import PretrainedConfig

from rlctl.data_prep.images import digest_of
from rlctl.errors import Problem
from rlctl.recipes import schema
from rlctl.runtime.base.image_processor import (
    Inputs,
    image_token,
    num_image_tokens,
    processor_of,
    reads_images,
)
from rlctl.runtime.base.ops import divisors
from rlctl.runtime.model.load import load_config
from rlctl.runtime.model.tower import placeholder_ids
from rlctl.runtime.model.vision import check_count
from rlctl.runtime.rollout.requests import Request

# Types of models whose vision tower each rank of an engine can have whole: ranks divide images.
_WHOLE_TOWERS = ("glm4v", "internvl", "qwen2_5_vl", "qwen2_vl", "qwen3_5", "qwen3_vl")


def tower_arguments(config: PretrainedConfig, num_ranks: int) -> dict[str, Any]:
    """Return the arguments of `vllm.LLM` for a vision tower whose heads ranks cannot divide."""
    whole = config.model_type in _WHOLE_TOWERS and _tower_heads(config) % num_ranks
    return {"mm_encoder_tp_mode": "data"} if whole else {}


def undivided_tower(config: PretrainedConfig, num_ranks: int) -> list[Problem]:
    """Return a problem if the ranks of an engine can neither divide a vision tower nor copy it."""
    heads = _tower_heads(config)
    if not heads % num_ranks or config.model_type in _WHOLE_TOWERS:
        return []
    key = "actor_rollout_ref.rollout.tensor_model_parallel_size"
    message = f"{key}={num_ranks} does not divide the {heads} attention heads of the vision tower"
    sizes = [size for size in divisors(heads) if size < num_ranks]
    return [Problem(message, hint=f"vLLM needs a divisor, such as {key}={sizes[-1]}")]


def _tower_heads(config: PretrainedConfig) -> int:
    """Return the attention heads of the vision tower; 0 without one."""
    vision = config.vision_config if reads_images(config) else None
    names = ("num_heads", "num_attention_heads")
    return next((getattr(vision, name) for name in names if hasattr(vision, name)), 0)


class EngineImages:
    """Images of requests to an engine, whose `model` of vLLM never predicts a placeholder."""

    def __init__(self, runner: Any, model: schema.Model) -> None:
        self.config = load_config(model, "policy")
        self.processor = processor_of(model.path, model.trust_remote_code)
        if self.processor is not None:
            _forbid(runner.get_model(), placeholder_ids(self.config))

    def prompt(self, request: Request) -> Any:
        """Return the context of a request with images as an input of vLLM's engine."""
        from vllm.inputs import mm_input
        from vllm.multimodal.inputs import MultiModalKwargsItems

        ids = request.context_ids
        assert self.processor is not None, "rows with images are refused for models of text"
        parts = self.processor.parts(request.images)
        counts = [num_image_tokens(part, self.config) for part in parts]
        places = (ids == image_token(self.config)).nonzero()[:, 0]
        check_count(sum(counts), len(places), request.images)
        return mm_input(
            ids.tolist(),
            MultiModalKwargsItems({"image": [self._item(part) for part in parts]}),
            {"image": [digest_of(image) for image in request.images]},
            {"image": [_range(tokens) for tokens in places.split(counts)]},
        )

    def _item(self, inputs: Inputs) -> Any:
        """Return the arguments of vLLM's model for an image."""
        from vllm.multimodal.inputs import (
            MultiModalBatchedField,
            MultiModalFieldElem,
            MultiModalFlatField,
            MultiModalKwargsItem,
            MultiModalSharedField,
        )

        pixels = torch.as_tensor(inputs["pixel_values"])
        grids = inputs.get("image_grid_thw")
        on_cpu = MultiModalBatchedField(keep_on_cpu=True)
        whole = slice(None)
        found: dict[str, Any] = {"pixel_values": (pixels, MultiModalFlatField(slices=[whole]))}
        if grids is not None:
            found["image_grid_thw"] = (torch.as_tensor(grids)[0], on_cpu)
        else:  # of tiles
            number = torch.tensor(image_token(self.config))
            shared = MultiModalSharedField(batch_size=1, keep_on_cpu=True)
            found["image_num_patches"] = (torch.tensor(len(pixels)), on_cpu)
            found["image_token_id"] = (number, shared)
        return MultiModalKwargsItem(
            {name: MultiModalFieldElem(data, field) for name, (data, field) in found.items()}
        )


def _range(places: Tensor) -> Any:
    """Return the range of vLLM of an image's tokens, which are at `places` (N,)."""
    from vllm.multimodal.inputs import PlaceholderRange

    first, last = int(places[0]), int(places[-1])
    mask = torch.zeros(last + 1 - first, dtype=torch.bool).index_fill_(0, places - first, True)
    return PlaceholderRange(offset=first, length=len(mask), is_embed=None if mask.all() else mask)


def _forbid(model: Any, ids: list[int]) -> None:
    """Give tokens `ids` no probability in vLLM's `model`."""
    compute = model.compute_logits
    forbidden = torch.tensor(ids)

    def compute_others(*args: Any, **kwargs: Any) -> Tensor | None:
        logits = compute(*args, **kwargs)
        if logits is None:  # on a rank without the head
            return None
        return logits.index_fill_(-1, forbidden.to(logits.device), -torch.inf)

    model.compute_logits = compute_others
