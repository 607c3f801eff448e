"""The policy's LoRA adapter in vLLM 0.31 and 0.32: one slot, filled in memory by each sync."""

# pyright: reportMissingImports=false, reportMissingModuleSource=false
# (an extra: types are checked where it is installed)
from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor, nn

from rlctl.errors import ConfigError
from rlctl.recipes import schema
from rlctl.runtime.model.adapter_names import is_adapter
from rlctl.runtime.model.load import empty_model
from rlctl.runtime.model.padded_rows import decoder_of
from rlctl.runtime.rollout.engine import EngineSpec
from rlctl.runtime.rollout.engine_weights import AdapterSync
from rlctl.runtime.rollout.vllm_engine.versions import MERGE_HINT

if TYPE_CHECKING:
    from vllm.lora.request import LoRARequest

_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # that vLLM allocates
_ID = 1


def vllm_adapter_sync(
    rollout: schema.Rollout, model: schema.Model, dtype: torch.dtype, device: str
) -> AdapterSync:
    """Return ADAPTERS if vLLM computes the adapters of `model`, else MERGED.

    It has no DoRA, no kernels for float32 on a GPU, and no adapters of the head of some models.
    """
    merges = rollout.lora_merge
    if merges is None:
        merges = device == "cpu"
    merges = (
        merges
        or model.use_dora
        or model.lora_rank > _RANKS[-1]
        or "lm_head" in model.target_modules
        or (device == "cuda" and dtype is torch.float32)
    )
    return AdapterSync.MERGED if merges else AdapterSync.ADAPTERS


def takes_adapters(spec: EngineSpec) -> bool:
    """Return True if the engine gets the adapters of a policy, instead of merged weights."""
    device = spec.rank_info.device
    sync = vllm_adapter_sync(spec.rollout, spec.model, spec.dtype, device)
    return spec.model.lora_rank > 0 and sync is AdapterSync.ADAPTERS


def adapter_arguments(spec: EngineSpec) -> dict[str, Any]:
    """Return the arguments of `vllm.LLM` for one adapter on its layers; none for merged weights."""
    if not takes_adapters(spec):
        return {}
    model = spec.model
    names = {name.rpartition(".")[2] for name in model.target_modules}
    if names == {"all-linear"}:  # without peft, whose import takes seconds
        layers = decoder_of(empty_model(model)).named_modules()
        linear = (name for name, module in layers if isinstance(module, nn.Linear))
        names = {name.rpartition(".")[2] for name in linear}
    return {
        "enable_lora": True,
        "max_loras": 1,
        "max_lora_rank": next(rank for rank in _RANKS if rank >= model.lora_rank),
        "lora_target_modules": sorted(names),
    }


def apply_one_adapter() -> None:
    """Patch LoRA layers to multiply by the matrices of the only adapter, which all rows use.

    vLLM's layers for CPUs copy both matrices for every token.
    """
    from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU

    def add_lora_linear(
        self: PunicaWrapperCPU,
        y: Tensor,
        x: Tensor,
        lora_a_stacked: tuple[Tensor, ...],
        lora_b_stacked: tuple[Tensor, ...],
        scale: float,
        output_slices: tuple[int, ...],
        **kwargs: object,
    ) -> None:
        """Add x A^T B^T of each slice to y (T, out), for x (T, in), A (1, 1, R, in)."""
        del kwargs
        if self.no_lora:
            return
        y, x = y.view(-1, y.shape[-1]), x.view(-1, x.shape[-1])
        slices = y[:, : sum(output_slices)].split(output_slices, dim=1)
        for part, a, b in zip(slices, lora_a_stacked, lora_b_stacked, strict=True):
            part.addmm_(x @ a[0, 0].T, b[0, 0].T, alpha=scale)

    PunicaWrapperCPU.add_lora_linear = add_lora_linear  # pyright: ignore[reportAttributeAccessIssue]


class AdapterSlot:
    """The slot of the adapter in the model `runner` of one rank; `request` selects it."""

    def __init__(self, runner: Any, model: schema.Model) -> None:
        from vllm.lora.peft_helper import PEFTHelper
        from vllm.lora.request import LoRARequest

        self.runner = runner
        self.settings = PEFTHelper(
            r=model.lora_rank,
            lora_alpha=model.lora_alpha,
            target_modules=list(model.target_modules),
            use_rslora=model.use_rslora,
        )
        # The path is never read: the adapter is in the slot before the first request.
        self.request: LoRARequest = LoRARequest("policy", _ID, "memory")

    @classmethod
    def from_spec(cls, spec: EngineSpec, runner: Any) -> Self | None:
        """Return the slot of an engine that gets adapters, else None."""
        return cls(runner, spec.model) if takes_adapters(spec) else None

    @staticmethod
    def set_aside(
        weights: Iterable[tuple[str, Tensor]], adapter: dict[str, Tensor]
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield weights (N, ...) of the base, and add copies of the adapter's to `adapter`."""
        for name, value in weights:
            if is_adapter(name):
                adapter[name] = value.clone()
            else:
                yield name, value

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Replace the adapter by matrices (R, in), (out, R) under peft's names.

        Raises ConfigError if the model's class in vLLM has no adapter for one of the layers.
        """
        from vllm.lora.lora_model import LoRAModel

        manager = self.runner.lora_manager._adapter_manager
        mapper = getattr(self.runner.get_model(), "hf_to_vllm_mapper", None)
        adapter = LoRAModel.from_lora_tensors(
            _ID,
            dict(tensors),
            self.settings,
            device="cpu",
            dtype=manager.lora_config.lora_dtype,
            weights_mapper=mapper and mapper.get_rename_mapper(),
        )
        manager.remove_adapter(_ID)
        manager.add_adapter(adapter)  # stacks query, key and value, as the model does
        missing = sorted(adapter.loras.keys() - manager.modules.keys())
        if missing:
            raise ConfigError(
                f"vLLM has no adapter for the layer {missing[0]} of this model",
                where="actor_rollout_ref.model.target_modules",
                hint=MERGE_HINT,
            )
        manager.activate_adapter(_ID)
