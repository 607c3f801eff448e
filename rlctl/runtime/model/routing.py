"""Choice of experts in mixtures: recorded in one pass, and replayed in others (router replay).

Where two scores of a router are nearly equal, engine and trainer may choose other experts for the
same token, and then differ by far more than rounding. With given choices a router still computes
its scores, so that gradients flow as always, and only the experts are those of the record (Rollout
Routing Replay, arXiv 2510.11370).

Axes: T packed tokens, L layers with a mixture, K experts of a token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from rlctl.errors import ConfigError
from rlctl.runtime.base.metrics import Mean, Metrics
from rlctl.runtime.model.attention import TokenAttention
from rlctl.runtime.model.kernels import Reach
from rlctl.runtime.model.mixture import ROUTERS
from rlctl.runtime.model.padded_rows import has_padded_rows

if TYPE_CHECKING:
    from rlctl.runtime.model.mixers import Mixer

AGREEMENT = "training/router_agreement"
OWN = -1  # in the place of an expert: the model chooses itself
# Types of models whose routers are known to choose by one call of `torch.topk` for all experts.
SUPPORTED = (
    *("deepseek_v3", "dots1", "ernie4_5_moe", "exaone_moe", "flex_olmo", "glm4_moe", "gpt_oss"),
    *("minimax_m2", "mixtral", "olmoe", "qwen2_moe", "qwen3_5_moe_text", "qwen3_moe", "qwen3_next"),
)
_ROUTER = "topkrouter"  # end of the names of transformers' classes, in lower case


class RoutingShape(NamedTuple):
    """Sizes of the record of one token."""

    layers: int  # with a mixture
    top_k: int
    dtype: torch.dtype  # the smallest that has all experts and `OWN`

    def none(self, num_tokens: int) -> Tensor:
        """Return the record (T, L, K) of tokens for which the model chooses itself."""
        return torch.full((num_tokens, self.layers, self.top_k), OWN, dtype=self.dtype)


class Routing:
    """Experts of one pass: those given, and those that the model itself chooses."""

    def __init__(self, given: Tensor | None, dtype: torch.dtype) -> None:
        """Replay the choices `given` (T, L, K), where they are not `OWN`; None: only record.

        Choices of the model are kept in `dtype`.
        """
        self.given = given
        self.dtype = dtype
        self._choices: dict[int, Tensor] = {}  # by layer

    def choose(self, layer: int, choice: Tensor) -> Tensor:
        """Return the experts of the tokens in `layer`, and note its `choice`: (T, K) int64."""
        self.note(layer, choice)
        if self.given is None:
            return choice
        given = self.given[:, layer].long()
        return torch.where(given == OWN, choice, given)

    def note(self, layer: int, choice: Tensor) -> None:
        """Keep the model's choice (T, K); the recomputation of a layer finds the same."""
        self._choices[layer] = choice.to(self.dtype)

    def choices(self) -> Tensor:
        """Return the model's choices of the pass: (T, L, K)."""
        return torch.stack([self._choices[layer] for layer in self.layers], 1)

    @property
    def layers(self) -> list[int]:
        """Numbers of the layers of the model's choices; a stage of a pipeline has some."""
        return sorted(self._choices)

    def set_choices(self, choices: Tensor, layers: list[int]) -> None:
        """Set the model's choices (T, L, K), from those of several ranks."""
        self._choices = dict(zip(layers, choices.to(self.dtype).unbind(1), strict=True))

    def agreement(self, tokens: Tensor) -> Metrics:
        """Return the share of the given experts of `tokens` (N,) that the model would choose.

        A stage of a pipeline counts those of its layers.
        """
        assert self.given is not None, "nothing is replayed"
        if not self.layers:
            return {}
        given = self.given[tokens][:, self.layers]
        choice = self.choices()[tokens]
        equal = (given[..., None] == choice[..., None, :]).any(-1)
        num_given = int((given != OWN).sum())
        if not num_given:
            return {}
        return {AGREEMENT: Mean(float(equal.sum()), num_given)}


class Recording(Routing):
    """The model's choices in several passes, one after the other."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__(None, dtype)
        self._passes: dict[int, list[Tensor]] = {}

    def note(self, layer: int, choice: Tensor) -> None:
        """See `Routing`; `choice`: (T, K)."""
        self._passes.setdefault(layer, []).append(choice.to(self.dtype))

    def choices(self) -> Tensor:
        """Return the choices of all passes: (T, L, K)."""
        return torch.stack([torch.cat(self._passes[layer]) for layer in sorted(self._passes)], 1)


@dataclass(frozen=True, eq=False)
class RoutedTokens:
    """Attention among packed tokens that also carries their experts; implements `TokenAttention`.

    Layers get it as `packing`, also when they are computed again in the backward pass.
    """

    packing: TokenAttention
    routing: Routing

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, reach: Reach) -> Tensor:
        """See `TokenAttention`: (T, H, D), (T, K, D), (T, K, D) -> (T, H, D)."""
        return self.packing.attend(layer, query, key, value, reach)

    def mix(self, hidden: Tensor, mixer: Mixer) -> Tensor:
        """See `TokenAttention`: (T, C) -> (T, C)."""
        return self.packing.mix(hidden, mixer)


class Routers:
    """Routers of a model, one in each layer with a mixture."""

    def __init__(self, model: PreTrainedModel) -> None:
        """Let the routers of `model` take part in passes with `Routing`; it is not sharded yet.

        Raises ConfigError if it has none of a supported kind.
        """
        found = list(_routers(model))
        supported = model.config.get_text_config().model_type in SUPPORTED
        if not supported or not found or has_padded_rows(model):
            raise ConfigError(
                f"router replay does not support models of type {model.config.model_type}",
                where="actor_rollout_ref.actor.router_replay.mode",
                hint=f"disabled, or a model of type {', '.join(SUPPORTED)}",
            )
        self.shape = _shape([router for _, router in found])
        self._recording: Routing | None = None
        for number, (layer, router) in enumerate(found):
            slot = _Slot(number)
            layer.register_forward_pre_hook(partial(self._enter, slot), with_kwargs=True)
            router.forward = partial(_route, type(router).forward, slot, router)

    @classmethod
    def of(cls, model: PreTrainedModel) -> Routers:
        """Return the routers of `model`, whose other users share them."""
        if not hasattr(model, ROUTERS):
            setattr(model, ROUTERS, cls(model))
        return getattr(model, ROUTERS)

    @contextmanager
    def recording(self) -> Iterator[Recording]:
        """Record the choices of passes that have no `Routing`."""
        self._recording = recording = Recording(self.shape.dtype)
        try:
            yield recording
        finally:
            self._recording = None

    def _enter(
        self, slot: _Slot, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        del args
        slot.routing = getattr(kwargs.get("packing"), "routing", self._recording)


def routing_shape(model: PreTrainedModel) -> RoutingShape | None:
    """Return the sizes of the record of `model`, which may be without data; None: no router."""
    routers = [router for _, router in _routers(model)]
    supported = model.config.get_text_config().model_type in SUPPORTED
    if not supported or not routers:
        return None
    return _shape(routers)


@dataclass(eq=False)
class _Slot:
    """Routing of the pass that a layer is in."""

    layer: int  # number among the layers with a mixture
    routing: Routing | None = None


class _Choice(TorchFunctionMode):
    """Mode in which `torch.topk` returns the experts that `routing` chooses, with their scores.

    Other calls choose among groups of experts, which are fewer.
    """

    def __init__(self, routing: Routing, layer: int, num_experts: int) -> None:
        super().__init__()
        self.routing = routing
        self.layer = layer
        self.num_experts = num_experts

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Call `func`, and replace the choice of `torch.topk`."""
        del types
        found = func(*args, **(kwargs or {}))
        if func is not torch.topk or args[0].shape[-1] != self.num_experts:
            return found
        split = found[1] if isinstance(found[1], DTensor) else None  # by ranks with equal tokens
        choice = found[1] if split is None else split.to_local()
        chosen = self.routing.choose(self.layer, choice)
        if chosen is choice:
            return found
        if split is not None:
            chosen = DTensor.from_local(
                chosen, split.device_mesh, split.placements, run_check=False
            )
        return args[0].gather(-1, chosen), chosen


def _route(forward: Callable[..., Any], slot: _Slot, router: Any, *inputs: Tensor) -> Any:
    """Run the `forward` of a router for hidden states (…, T, H), and a bias in some models."""
    if slot.routing is None:
        return forward(router, *inputs)
    with _Choice(slot.routing, slot.layer, router.num_experts):
        return forward(router, *inputs)


def _routers(model: PreTrainedModel) -> Iterator[tuple[nn.Module, nn.Module]]:
    """Yield each decoder layer with a router, and the router."""
    names = set(model._no_split_modules or ())
    for layer in model.modules():
        if type(layer).__name__ in names:
            for module in layer.modules():
                if type(module).__name__.lower().endswith(_ROUTER):
                    yield layer, module


def _shape(routers: list[Any]) -> RoutingShape:
    sizes = [(int(each.top_k), int(each.num_experts)) for each in routers]
    most = max(number for _, number in sizes)
    dtype = torch.int8 if most <= torch.iinfo(torch.int8).max + 1 else torch.int16
    return RoutingShape(len(routers), sizes[0][0], dtype)
