"""Tolerances that do not come from one machine.

A float32 result is compared with the same computation in float64. It may be as far from it as a
second, independent float32 implementation times `FACTOR`, whatever kernels this CPU has. The floor
is the rounding of the result itself.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar
from unittest.mock import patch

import torch
from torch import Tensor

from rlctl.runtime.model import load

Model = TypeVar("Model", bound=torch.nn.Module)

FACTOR = 8.0
_FLOOR = 8 * torch.finfo(torch.float32).eps


def distance(found: Tensor, exact: Tensor) -> float:
    """Return the norm of the difference relative to that of `exact`."""
    exact = exact.detach().double()
    size = float(exact.norm())
    difference = float((found.detach().double() - exact).norm())
    return difference / size if size else difference


def assert_as_exact(found: Tensor, second: Tensor, exact: Tensor, name: str = "") -> None:
    """Fail if `found` is farther from float64 than `second` is, times `FACTOR`."""
    assert exact.dtype == torch.float64
    assert found.shape == exact.shape == second.shape, name
    limit = max(FACTOR * distance(second, exact), _FLOOR)
    error = distance(found, exact)
    assert error <= limit, f"{name} {error} > {limit}"


def assert_all_as_exact(
    found: Mapping[str, Tensor],
    second: Mapping[str, Tensor],
    exact: Mapping[str, Tensor],
) -> None:
    """Compare tensors by name; one that is tiny beside the largest counts by that."""
    assert found.keys() == second.keys() == exact.keys()
    largest = max(float(each.detach().norm()) for each in exact.values())
    for name, reference in exact.items():
        size = float(reference.detach().norm())
        rounding = FACTOR * distance(second[name], reference) * size + _FLOOR * max(
            size, 1e-3 * largest
        )
        error = float((found[name].detach().double() - reference.detach()).norm())
        assert error <= rounding, name


def in_float64(model: Model) -> Model:
    """Return a copy of a model that computes in float64."""
    exact: Any = copy.deepcopy(model).double()
    for module in exact.modules():  # other implementations of experts do not compute in float64
        if getattr(module, "_can_set_experts_implementation", lambda: False)():
            module.set_experts_implementation("eager")
    return exact


# Settings of the dtypes that `float64` changes.
PASSES = tuple(
    f"{model}.dtype=float32"
    for model in ("actor_rollout_ref.model", "critic.model", "reward.reward_model.model")
)


@contextmanager
def float64() -> Iterator[None]:
    """Give models weights and passes in float64 where settings say float32."""
    names = ("fp32", "float32")
    with patch.dict(load._DTYPES, dict.fromkeys(names, torch.float64)):
        yield
