"""Check before training that packed rows give what transformers computes for each row alone.

Packing relies on properties that no config declares: attention through transformers' interface and
no other state shared by tokens. A model without them would train on wrong log-probs.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from rlctl.errors import ConfigError, RlctlError
from rlctl.runtime.base.batch import Ragged
from rlctl.runtime.base.budget import is_oom
from rlctl.runtime.base.ops import log_probs_from_logits
from rlctl.runtime.model.attention import use_rlctl_attention
from rlctl.runtime.model.causal_lm import PackedModel, PolicyModel, predicting, run_backbone
from rlctl.runtime.model.mapped import RankStorage
from rlctl.runtime.model.padded_rows import (
    has_padded_rows,
    use_own_attention,
    use_padded_rows,
    warn_of_padding,
)
from rlctl.runtime.model.sequences import Sequences, prompt_numbers
from rlctl.runtime.model.sharding import decoder_layers
from rlctl.runtime.model.state_layers import has_mixers, may_have_kernels
from rlctl.runtime.model.tower import image_processor, placeholder_ids

if TYPE_CHECKING:
    from rlctl.runtime.base.image_processor import Images

LOG = logging.getLogger(__name__)
M = TypeVar("M", bound=PackedModel)

_LENGTHS = (7, 36, 4)
_TOLERANCE = 1e-4  # of float32
_TOLERANCE_HALF = 1e-2  # of bfloat16 and float16
# Rounding errors grow with the size of the model. Two of transformers' attention kernels show
# them; a difference of more than this multiple is no rounding.
_NOISE_FACTOR = 10


def first_layers(model: M, storage: RankStorage) -> M:
    """Return a copy of a complete model with its first decoder layers, as passes compute them.

    It has two layers or more, so that there is one of each kind. Weights that need no conversion
    are shared. A model without a list of layers is returned whole.
    """
    layers = decoder_layers(model.hf)
    lists = (
        (name, module)
        for name, module in model.hf.named_modules()
        if layers[:1] == list(module.children())[:1]
    )
    path, whole = next(lists, ("", None))
    holder, _, name = path.rpartition(".")
    parent = model.hf.get_submodule(holder)
    if isinstance(whole, nn.ModuleList):
        setattr(parent, name, whole[: _number_of_kinds(model.hf, whole)])
    try:
        memo: dict[int, Any] = {
            id(each): nn.Parameter(each.detach().to(storage.device, storage.compute), False)
            for each in model.parameters()
        }
        return copy.deepcopy(
            model, memo | {id(each): each.to(storage.device) for each in model.buffers()}
        )
    finally:
        if isinstance(whole, nn.ModuleList):
            setattr(parent, name, whole)


def _number_of_kinds(hf: PreTrainedModel, layers: nn.ModuleList) -> int:
    """Return how many of the first layers have one of each kind: two or more."""
    config = hf.config.get_text_config(decoder=True)
    types = getattr(config, "layer_types", None) or [""] * len(layers)
    kinds = [
        (kind, *(type(module).__name__ for module in layer.modules()))
        for kind, layer in zip(types, layers, strict=False)
    ]
    return max([2, *(kinds.index(kind) + 1 for kind in kinds)])


def check_model(model: PackedModel, storage: RankStorage | None) -> None:
    """Run `check_packing` on the first layers of `model`; on all, where they are, with None.

    A model that packed rows change computes padded rows from then on, if these are right. Fused
    kernels of layers with states are used if they are right.
    """

    def checked() -> PackedModel:
        return model if storage is None else first_layers(model, storage)

    try:
        check_packing(checked())
    except ConfigError as error:
        if has_padded_rows(model.hf):
            raise
        use_padded_rows(model.hf)
        check_packing(checked())
        warn_of_padding(model.hf, f"packed rows change it ({error.problems[0].message})")
    if has_mixers(model.hf) and may_have_kernels():
        from rlctl.runtime.model.mixers import fuse_mixers

        fuse_mixers(model.hf, True)
        try:
            check_packing(checked())
        except ConfigError as error:
            fuse_mixers(model.hf, False)
            LOG.info("layers with states compute padded rows: %s", error.problems[0].message)
    if image_processor(model.hf) is None:
        return
    from rlctl.runtime.model.image_probe import image_rows
    from rlctl.runtime.model.vision import INEXACT

    try:  # an error is raised by the first pass with images: a run may have none
        part = checked()
        check_packing(part, image_rows(part.hf))
    except RlctlError as error:
        setattr(model.hf, INEXACT, error)


class Row(NamedTuple):
    """Tokens (N,) whose first `num_prompt` are a prompt, which may have images."""

    ids: Tensor
    num_prompt: int = 1
    images: Images = ()


@torch.no_grad()
def check_packing(model: PackedModel, rows: Sequence[Row] | None = None) -> None:
    """Compare a complete, unsharded model on packed rows with plain passes of each row.

    By default three rows of text. Compares log-probs, or hidden states for a value or reward model.
    Deterministic, draws no random numbers, and leaves the model in evaluation mode.

    Raises:
        ConfigError: the results differ by more than 1e-4 (1e-2 in half precision) and more than
            rounding explains, or the model cannot run on packed rows.
    """
    model.eval()
    rows = rows or _rows(model.hf)
    what = " with images" if rows[0].images else ""
    name = f"{model.hf.config.model_type} ({model.hf.name_or_path})"
    try:
        packed = _packed(model, rows)
        plain = _row_by_row(model, rows, "eager")
        same = _row_by_row(model, rows, "sdpa" if model.hf._supports_sdpa else None)
    except ConfigError:
        raise
    except Exception as error:
        if isinstance(error, RuntimeError) and is_oom(error):
            raise
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ConfigError(
            f"models of type {name} cannot run on packed rows{what}: {reason}", hint=_HINT
        ) from error
    scale = 1.0 if isinstance(model, PolicyModel) else plain.abs().max().clamp_min(1.0)
    difference = (packed - plain).abs() / scale
    noise = float(((same - plain).abs() / scale).max())
    tolerance = _TOLERANCE_HALF
    if model.hf.dtype in (torch.float32, torch.float64):
        tolerance = _TOLERANCE
    tolerance = max(tolerance, _NOISE_FACTOR * noise)
    # Weights that are not finite have another error, in the first step.
    if plain.isfinite().all() and not float(difference.max()) <= tolerance:
        worst = int(difference.argmax())
        found = float(packed.flatten()[worst])
        expected = float(plain.flatten()[worst])
        kind = "log-prob" if isinstance(model, PolicyModel) else "hidden state"
        raise ConfigError(
            f"models of type {name} are computed wrongly on packed rows{what}: a {kind} is "
            f"{found:.6g} instead of {expected:.6g} (difference {float(difference.max()):.2g}, "
            f"limit {tolerance:.2g})",
            hint=_HINT,
        )


_HINT = (
    "use a model whose tokens depend on the preceding ones only, such as Llama, Qwen3.5 or Gemma"
)


def _rows(hf: PreTrainedModel) -> list[Row]:
    """Return three rows of arbitrary tokens, which fit into the context of the model."""
    config = hf.config.get_text_config(decoder=True)
    context = getattr(config, "max_position_embeddings", None) or 0  # -1: any length
    lengths = list(_LENGTHS)
    if context > 0:
        lengths = [max(2, min(length, context)) for length in _LENGTHS]
    return [Row(ids) for ids in arbitrary_tokens(hf, sum(lengths)).split(lengths)]


def arbitrary_tokens(hf: PreTrainedModel, count: int) -> Tensor:
    """Return arbitrary tokens (N,) without placeholders of images."""
    size = hf.config.get_text_config(decoder=True).vocab_size
    ids = (torch.arange(count, device=hf.device) * 7919 + 11) % size
    never = torch.tensor(placeholder_ids(hf.config), dtype=torch.int64, device=hf.device)
    return torch.where(torch.isin(ids, never), 0, ids)


def _packed(model: PackedModel, rows: Sequence[Row]) -> Tensor:
    """Return what rlctl computes: log-probs (T,), or hidden states (T, H), float32.

    T counts all tokens that predict a token after a prompt.
    """
    prompts = Ragged.from_rows([row.ids[: row.num_prompt] for row in rows])
    responses = Ragged.from_rows([row.ids[row.num_prompt :] for row in rows])
    images = [row.images for row in rows]
    here = (prompts.to("cpu"), responses.to("cpu"))
    # Text alone in separate rows, as transformers computes them.
    numbers = None
    if any(images):
        numbers = prompt_numbers(here[0], None, images)
    sequences = Sequences.from_ragged(prompts, responses, prompt_of_row=numbers)
    sequences = sequences.with_images(model.hf, *here, images)
    if isinstance(model, PolicyModel):
        return model(sequences, with_entropy=False).log_probs.float()
    return predicting(run_backbone(model.hf.base_model, sequences), sequences).float()


def _row_by_row(model: PackedModel, rows: Sequence[Row], attention: str | None) -> Tensor:
    """Return what transformers computes for each row alone, with its `attention`: see `_packed`."""
    use_own_attention(model.hf, attention)
    try:
        part = model.hf if isinstance(model, PolicyModel) else model.hf.base_model
        # Copies of a row are rounded otherwise, also where the attention cannot be chosen.
        copies = 1 if attention == "eager" else 2
        outputs = [
            part(
                input_ids=row.ids.expand(copies, -1), use_cache=False, **_images(part, row, copies)
            )
            for row in rows
        ]
    finally:
        use_rlctl_attention(model.hf)
    if not isinstance(model, PolicyModel):
        return torch.cat(
            [
                output.last_hidden_state[0, row.num_prompt - 1 : -1].float()
                for output, row in zip(outputs, rows, strict=True)
            ]
        )
    parts = [
        log_probs_from_logits(
            output.logits[0, row.num_prompt - 1 : -1], row.ids[row.num_prompt :], model.temperature
        ).float()
        for output, row in zip(outputs, rows, strict=True)
    ]
    return torch.cat(parts)


def _images(part: Any, row: Row, copies: int) -> dict[str, Tensor]:
    """Return the arguments of a pass of `copies` of a row for its images."""
    if image_processor(part) is None or not row.images:
        return {}
    from rlctl.runtime.model.image_probe import image_arguments

    return image_arguments(part, row, copies)
