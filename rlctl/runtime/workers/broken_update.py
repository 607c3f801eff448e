"""Examination of an update whose gradient is not finite: which value broke it, in which layer.

Loaded when an update is skipped, and by `rlctl debug --replay`.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from rlctl.json_values import finite
from rlctl.runtime.base.batch import Ragged, Rollouts
from rlctl.runtime.base.stored_fields import fetched
from rlctl.runtime.model.sharding import full_tensor, reset_gradients

if TYPE_CHECKING:
    from rlctl.runtime.base.budget import Budget
    from rlctl.runtime.model.sequences import Sequences
    from rlctl.runtime.workers.learner import Learner
    from rlctl.runtime.workers.passes import Compute

MOST = 3  # of a run
MAX_WEIGHT_BYTES = 2**26  # of trained weights that are kept with a batch
_BEFORE = 8  # layers before the first with a value that is not finite

B = TypeVar("B", bound=Rollouts)
Stats = dict[str, float | int | str | None]


@dataclass(frozen=True)
class BrokenUpdate:
    """Rows of an update on one rank, what was found, and the trained weights if they are small."""

    facts: dict[str, Any]  # for JSON
    batch: Rollouts
    weights: Mapping[str, Tensor]  # (N, ...) by name


_found: WeakKeyDictionary[Learner, list[BrokenUpdate | None]] = WeakKeyDictionary()


def examine(
    learner: Learner, batch: B, budget: Budget, compute: Compute[B, Any], **facts: float
) -> None:
    """Repeat the passes of an update that broke, by `compute`; keep what they show. Collective.

    Does so for the first `MOST` updates of a learner.
    """
    kept = _found.setdefault(learner, [])
    if len(kept) >= MOST:
        return
    learner.parameters.enter()
    batch = fetched(batch)
    trace = Trace(learner.model)
    inputs = {name: stats(value) for name, value in tensors_of(batch)}
    named = [(name, full_tensor(each)) for name, each in trained(learner.model)]
    for kind, found in (("weights", named), ("batch", tensors_of(batch))):
        for name, value in found:
            if not value.isfinite().all():
                trace.report(kind, name, value)
    with trace.hooks(), torch.compiler.set_stance("force_eager"):
        learner.in_micro_batches(batch, budget, compute)
    for name, each in learner.model.named_parameters():
        if each.grad is not None and not (gradient := full_tensor(each.grad)).isfinite().all():
            trace.report("gradient of weights", name, gradient)
    reset_gradients(learner.model)
    small = sum(value.nbytes for _, value in named) <= MAX_WEIGHT_BYTES
    shown: dict[str, Any] = {
        "number": len(kept),  # of the attempt, and the same on all ranks
        "updates_before": learner.num_updates,
        "rank": learner.rank_info.rank,
        **facts,
        "weights": fingerprint(named),
        "first": trace.first,
        "layers": [*trace.before],
        "batch": inputs,
        "kind": type(batch).__name__,
    }
    weights: dict[str, Tensor] = {}
    if small:
        weights = {name: value.cpu().clone() for name, value in named}
    kept.append(BrokenUpdate(finite(shown), batch.to("cpu"), weights))


def examine_pass(learner: Learner, batch: Rollouts, budget: Budget) -> None:
    """Examine a pass without gradients whose log-probs are not finite. Collective."""
    model: Any = learner.model

    def compute(_: Rollouts, sequences: Sequences) -> tuple[None, None]:
        model(sequences)
        return None, None

    with torch.no_grad():
        examine(learner, batch, budget, compute)


def pop(learner: Learner) -> list[BrokenUpdate]:
    """Return what was found since the last call; it no longer takes memory then."""
    kept = _found.get(learner, [])
    found = [each for each in kept if each is not None]
    kept[:] = [None] * len(kept)
    return found


@dataclass
class Trace:
    """Outputs of a model's layers in the order of a pass, up to the first that is not finite."""

    model: nn.Module
    first: dict[str, Any] | None = None
    before: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])

    def report(self, kind: str, name: str, value: Tensor) -> None:
        """Keep the first value (N, ...) that is not finite."""
        self.first = self.first or {"where": kind, "name": name, **stats(value)}

    @contextmanager
    def hooks(self) -> Iterator[None]:
        """Watch the passes within the block."""
        names = itertools.islice(self.model.named_modules(), 1, None)
        handles = [
            module.register_forward_hook(partial(self._on_output, name)) for name, module in names
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _on_output(self, name: str, module: nn.Module, _: object, output: Any) -> None:
        value = next(_tensors(output), None)
        if value is None:
            return
        label = f"{name} ({type(module).__name__.removeprefix('FSDP')})"
        if value.requires_grad:
            value.register_hook(partial(self._on_gradient, label))
        if any(layer.get("not_finite") for layer in self.before):
            return
        self.before = [*self.before[-_BEFORE:], {"name": label, **stats(value)}]
        if not value.isfinite().all():
            self.report("output", label, value)

    def _on_gradient(self, label: str, gradient: Tensor) -> None:
        if self.first is None and not gradient.isfinite().all():
            self.report("gradient", label, gradient)


def _tensors(output: Any) -> Iterator[Tensor]:
    """Yield the floating-point tensors of a layer's output."""
    if isinstance(output, Tensor):
        if output.is_floating_point() and output.numel():
            yield output
    elif isinstance(output, Mapping | list | tuple):
        values: Iterable[Any] = output.values() if isinstance(output, Mapping) else output
        for each in values:
            yield from _tensors(each)


def tensors_of(batch: Rollouts) -> Iterator[tuple[str, Tensor]]:
    """Yield the floating-point fields (N, ...) of a batch with their names."""
    for each in fields(batch):
        value = getattr(batch, each.name)
        if isinstance(value, Ragged):
            value = value.values
        # Not the components of rewards: a row may lack one, which is NaN, and no update reads them.
        if isinstance(value, Tensor) and value.is_floating_point():
            yield each.name, value


def stats(value: Tensor) -> Stats:
    """Return shape, extremes and mean of the finite values (N, ...), and the number of others."""
    value = value.detach().float()
    good = value[value.isfinite()]
    found: Stats = {
        "shape": "×".join(map(str, value.shape)),
        "min": None,
        "max": None,
        "mean": None,
        "not_finite": value.numel() - len(good),
    }
    if len(good):
        found["min"] = float(good.min())
        found["max"] = float(good.max())
        found["mean"] = float(good.double().mean())
    return found


def trained(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the trainable parameters (N, ...) with their names."""
    return ((name, each) for name, each in model.named_parameters() if each.requires_grad)


def fingerprint(weights: Iterable[tuple[str, Tensor]]) -> str:
    """Return a digest of names and bits of weights (N, ...), whatever the layout of ranks."""
    found = hashlib.sha256()
    integers = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    for name, value in weights:
        bits = value.detach().contiguous().view(integers[value.element_size()])
        # Sums, as a hash of the bytes of large weights would take minutes.
        sums = int(bits.sum()), int(bits.flatten()[::7].sum()), int(bits.flatten()[::11].sum())
        found.update(repr((name, tuple(value.shape), *sums)).encode())
    return found.hexdigest()[:16]
