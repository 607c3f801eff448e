"""Kernels of log-probs and entropies under Triton's interpreter, against torch's own operations."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from rlctl.runtime.base import ops
from rlctl.runtime.base.batch import Ragged
from rlctl.runtime.model import causal_lm
from rlctl.runtime.model.attention import use_rlctl_attention
from rlctl.runtime.model.sequences import Sequences
from tests.interpreted import interpreted
from tests.models import tiny_model
from tests.tolerance import assert_as_exact, in_float64

pytestmark = pytest.mark.extra("triton")
SHAPES = [(5, 7), (2, 5000)]  # the last has two blocks


def logits_of(num_rows: int, size: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return logits (T, V), one row with forbidden tokens, and targets (T,)."""
    draw = torch.Generator().manual_seed(size)
    logits = (4 * torch.randn(num_rows, size, generator=draw)).to(dtype)
    logits[1, : size // 2] = -torch.inf
    return logits, torch.randint(size // 2, size, (num_rows,), generator=draw)


def graded(
    score: Callable[[Tensor], tuple[Tensor, Tensor]], logits: Tensor, with_entropy: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return log-probs and entropies (T,), and the gradient (T, V) of a weighted sum."""
    base = logits.clone().requires_grad_()
    log_probs, entropy = score(base * 1.0)
    weight = torch.linspace(-1, 2, len(logits))
    total = (weight * log_probs).sum()
    (total + ((2 - weight) * entropy).sum() if with_entropy else total).backward()
    assert base.grad is not None
    return log_probs.detach(), entropy.detach(), base.grad.double()


def exact(targets: Tensor, temperature: float, logits: Tensor) -> tuple[Tensor, Tensor]:
    """Return log-probs and entropies (T,) in float64."""
    found, entropy = ops.log_probs_and_entropy(logits.double(), targets, temperature, True)
    assert entropy is not None
    return found, entropy


def by_torch(targets: Tensor, temperature: float, logits: Tensor) -> tuple[Tensor, Tensor]:
    """Return log-probs and entropies (T,) in float32 by torch's own operations."""
    found, entropy = ops.log_probs_and_entropy(logits.float(), targets, temperature, True)
    assert entropy is not None
    return found.double(), entropy.double()


def by_kernel(
    targets: Tensor, temperature: float, overwrite: bool, logits: Tensor
) -> tuple[Tensor, Tensor]:
    """Return log-probs and entropies (T,) of the kernel, after a check of Σ π²."""
    from rlctl.runtime.model.score_kernels import FusedScore

    log_probs, entropy, squares = FusedScore.apply(logits, targets, temperature, overwrite)
    expected = ops.sum_of_squared_probs(logits.detach().double(), temperature)
    second = ops.sum_of_squared_probs(logits.detach().float(), temperature)
    assert_as_exact(squares, second, expected)
    assert log_probs.dtype == entropy.dtype == torch.float32
    return log_probs.double(), entropy.double()


def compare() -> None:
    """The kernels compute what the reference does."""
    cases = (
        (torch.float32, 1.0, True),
        (torch.float32, 0.7, False),
        (torch.bfloat16, 0.7, True),
    )
    for shape, (dtype, temperature, with_entropy) in product(SHAPES, cases):
        logits, targets = logits_of(*shape, dtype)
        expected = graded(partial(exact, targets, temperature), logits.double(), with_entropy)
        second = graded(partial(by_torch, targets, temperature), logits, with_entropy)
        for overwrite in (False, True):
            kernel = partial(by_kernel, targets, temperature, overwrite)
            found = graded(kernel, logits, with_entropy)
            for each in zip(found, second, expected, strict=True):
                assert_as_exact(*each)


def train() -> None:
    """A policy has the same outputs and gradient with them."""
    from rlctl.runtime.model import score_kernels

    results: list[tuple[Tensor, ...]] = []
    written: list[bool] = []
    fused: Any = score_kernels.FusedScore.apply

    def recorded(*args: Any) -> Any:
        written.append(args[-1])
        return fused(*args)

    score_kernels.FusedScore.apply = recorded
    plain = tiny_model()
    for usable, hf in ((False, in_float64(plain)), (False, plain), (True, tiny_model())):
        causal_lm.has_score_kernel = lambda _, usable=usable: usable
        use_rlctl_attention(hf)
        model = causal_lm.PolicyModel(hf, 0.8)
        given = ([[5, 6, 7], [8, 9]], [[3, 4, 5, 6], [7, 8]])
        sequences = Sequences.from_ragged(*(Ragged.from_rows(x, torch.int64) for x in given))
        outputs = model(sequences, with_entropy=True, with_squares=True)
        (outputs.log_probs.sum() - outputs.entropy.sum()).backward()
        gradient = torch.cat([x.grad.flatten() for x in hf.parameters() if x.grad is not None])
        results.append((outputs.log_probs, outputs.entropy, outputs.sum_pi_squared, gradient))
    assert written == [True]  # the gradient takes the place of the logits
    for expected, second, found in zip(*results, strict=True):
        assert_as_exact(found, second, expected)


def overwrite() -> None:
    """Logits that another operation needs are not overwritten in silence."""
    from rlctl.runtime.model.score_kernels import FusedScore, may_overwrite

    logits = torch.tanh(torch.ones(2, 8, requires_grad=True))  # kept for its own gradient
    log_probs, *_rest = FusedScore.apply(logits, torch.tensor([1, 2]), 1.0, True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        log_probs.sum().backward()
    assert not may_overwrite(logits)


@pytest.mark.parametrize(
    "check",
    [train, *(pytest.param(check, marks=pytest.mark.soak) for check in (compare, overwrite))],
    ids=lambda check: check.__name__,
)
def test_interpreted(check: Callable[[], None]) -> None:
    interpreted(check)
