"""Layers that mix tokens by a running state, on packed rows.

Gated delta nets, Mamba layers and short convolutions read a sequence from its start and carry a
state from token to token. On a packed row, the state of one sequence would leak into the next. So
each such module, here a mixer, gets complete sequences: the object `packing` of a pass pads them on
the right to rectangles, which a causal mixer never reads, and the engine `hf` keeps their states.
Kernels read the packed row and where its sequences start, if `check_model` finds them exact.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from functools import cache
from types import MethodType
from typing import Any, Protocol

from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedConfig, PreTrainedModel

from rlctl.errors import InternalError
from rlctl.runtime.model.padded_rows import decoder_of
from rlctl.runtime.model.state_layers import SLOT, SLOTS, argument_for_states


@dataclass
class _Slot:
    """Facts of a mixer that its calls lack; `packing` is that of the present pass."""

    layer: int
    states: str  # name of the argument
    config: PreTrainedConfig
    packing: Any = None
    is_set: bool = False  # the model, and not its decoder, was called with the packing
    fused: bool = False  # the kernels take the boundaries of sequences


class PackedMix(Protocol):
    """Pass of B sequences in one row, none of them empty."""

    def __call__(self, tokens: Tensor, boundaries: Tensor, sequence: Tensor) -> Tensor:
        """Mix (T, C) -> (T, C).

        `boundaries` (B + 1,) int32 has the starts of sequences and the end of the last, `sequence`
        (T,) the number of each token's sequence.
        """
        ...


class Mixer(Protocol):
    """Part of a model that reads sequences from their start, in one pass."""

    @property
    def is_sharded(self) -> bool:
        """True if ranks must call it equally often, because each call gathers its weights."""
        ...

    @property
    def packed(self) -> PackedMix | None:
        """Call for sequences of a packed row, if there are kernels that keep them apart."""
        ...

    def __call__(self, tokens: Tensor, states: DynamicCache | None = None) -> Tensor:
        """Mix B sequences of L tokens, from their start or `states`: (B, L, ...) -> (B, L, C)."""
        ...

    def new_states(self) -> DynamicCache:
        """Return the states before the first token of any number of sequences."""
        ...


@dataclass(eq=False)
class LayerMixer:
    """Call of a mixer of a layer, within which its weights are gathered; implements `Mixer`."""

    module: nn.Module
    slot: _Slot
    arguments: dict[str, Any]
    other_outputs: tuple[Any, ...] | None = None  # None: the mixer returns a tensor

    is_sharded = False

    @property
    def packed(self) -> PackedMix | None:
        """See `Mixer`."""
        return self._mix_packed if self.slot.fused else None

    def __call__(self, tokens: Tensor, states: DynamicCache | None = None) -> Tensor:
        """See `Mixer`: (B, L, C) -> (B, L, C)."""
        return self._call(tokens, {self.slot.states: states})

    def _mix_packed(self, tokens: Tensor, boundaries: Tensor, sequence: Tensor) -> Tensor:
        # Arguments of the kernels of flash-linear-attention, causal-conv1d and mamba-ssm.
        starts = {"cu_seq_lens_q": boundaries, "seq_idx": sequence.int()[None]}
        known = _known_arguments(type(self.module))
        if known is not None:
            starts = {name: starts[name] for name in starts.keys() & known}
        return self._call(tokens[None], starts | {self.slot.states: None})[0]

    def _call(self, tokens: Tensor, more: dict[str, Any]) -> Tensor:
        arguments = self.arguments | more | {"attention_mask": None}
        output = type(self.module).forward(self.module, tokens, **arguments)
        if isinstance(output, tuple):
            output, *others = output
            self.other_outputs = tuple(others)
        return output

    @property
    def layer(self) -> int:
        """Number of the layer, which may also have attention."""
        return self.slot.layer

    def new_states(self) -> DynamicCache:
        """See `Mixer`."""
        return DynamicCache(config=self.slot.config)


def install_mixers(model: PreTrainedModel) -> None:
    """Let the mixers of `model` take part in passes with a `packing`, in place; idempotent."""
    if hasattr(model, SLOTS):
        return
    decoder = decoder_of(model)
    slots: list[_Slot] = []
    for module in decoder.modules():
        states = argument_for_states(module)
        if states is not None:
            config = model.config.get_text_config(decoder=True)
            slot = _Slot(module.layer_idx, states, config)  # pyright: ignore[reportArgumentType]
            slots.append(slot)
            setattr(module, SLOT, slot)
            # Bound methods and hooks that are functions follow a deep copy of the model.
            module.forward = MethodType(_mix, module)
    for part in (model, decoder):
        setattr(part, SLOTS, slots)
    if slots:
        decoder.register_forward_pre_hook(_enter, with_kwargs=True)
        if model is not decoder:  # some classes do not pass unknown arguments on
            model.register_forward_pre_hook(_enter, with_kwargs=True)
            model.register_forward_hook(_leave, always_call=True)


def fuse_mixers(model: PreTrainedModel, fused: bool) -> None:
    """Let the mixers of `model` read packed rows in one call, or rectangles, in place."""
    for slot in getattr(model, SLOTS, ()):
        slot.fused = fused


@cache
def _known_arguments(kind: type[nn.Module]) -> frozenset[str] | None:
    """Return the arguments of modules of a class; None if they take any."""
    known = inspect.signature(kind.forward).parameters
    takes_any = any(item.kind is inspect.Parameter.VAR_KEYWORD for item in known.values())
    return None if takes_any else frozenset(known)


def _enter(module: PreTrainedModel, _: Any, arguments: dict[str, Any]) -> None:
    """Tell the mixers the packing of a pass, which they keep for its backward pass."""
    decoder = decoder_of(module)
    if "forward" in vars(decoder):  # it is replaced: the pass is of the head alone
        return
    for slot in getattr(module, SLOTS):
        if not slot.is_set:
            slot.packing = arguments.get("packing")
            slot.is_set = module is not decoder


def _leave(module: nn.Module, *_: Any) -> None:
    for slot in getattr(module, SLOTS):
        slot.is_set = False


def _mix(self: nn.Module, hidden_states: Tensor, *others: Any, **arguments: Any) -> Any:
    """Replace `forward` of a mixer: (1, T, C) -> (1, T, C) on a packed row."""
    slot: _Slot = getattr(self, SLOT)
    if slot.packing is None:
        return type(self).forward(self, hidden_states, *others, **arguments)
    if others:
        raise InternalError(f"{type(self).__name__} was called with positional arguments")
    arguments.pop("packing", None)
    mixer = LayerMixer(self, slot, arguments)
    mixed = slot.packing.mix(hidden_states[0], mixer)[None]
    return mixed if mixer.other_outputs is None else (mixed, *mixer.other_outputs)
