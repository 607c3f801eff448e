"""Log-probs and entropies of a vocabulary that is divided over ranks.

Each rank has the logits of its tokens only; of all tokens, ranks exchange a few numbers per row.

Axes: T rows of logits, V vocabulary, N ranks, K tokens whose log-probs are requested.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from rlctl.runtime.base.ops import LOG_ZERO, chunks_of, scaled


@dataclass(frozen=True)
class Vocabulary:
    """The N ranks of which each has V / N adjacent tokens, in the order of the ranks."""

    group: dist.ProcessGroup

    def first(self, logits: Tensor) -> int:
        """Return the first token of this rank, for its logits (T, V/N)."""
        return dist.get_rank(self.group) * logits.shape[-1]

    def log_probs_and_entropy(
        self, logits: Tensor, ids: Tensor, temperature: float, with_entropy: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Return log softmax(logits/τ) of `ids` (T, K), and the entropy (T,) if requested.

        `logits` are those of this rank, (T, V/N). All ranks get the same results, and each the
        gradient of its logits: all have the same loss.
        """
        apply: Any = _Score.apply
        log_probs, entropy = apply(logits, ids, temperature, with_entropy, self)
        return log_probs, entropy if with_entropy else None

    @torch.no_grad()
    def sum_of_squared_probs(self, logits: Tensor, temperature: float) -> Tensor:
        """Return Σ_v π(v)²: logits (T, V/N) -> (T,), without a graph."""
        once, twice = (
            self.log_sum_exp(
                torch.cat([(k * z).logsumexp(-1) for _, z in _parts(logits, temperature)])
            )
            for k in (1, 2)
        )
        return (twice - 2 * once).exp()

    @torch.no_grad()
    def top_k(self, logits: Tensor, k: int) -> Tensor:
        """Return the `k` most probable tokens: logits (T, V/N) -> (T, k) int64."""
        best = logits.topk(min(k, logits.shape[-1]))
        values, ids = (
            self._gathered(part).movedim(0, 1).flatten(1)  # (T, N·k)
            for part in (best.values, best.indices + self.first(logits))
        )
        return ids.gather(-1, values.topk(k).indices)

    def log_sum_exp(self, local: Tensor) -> Tensor:
        """Return log Σ exp over all ranks of their values (T,)."""
        return self._gathered(local).logsumexp(0)

    def summed(self, local: Tensor) -> Tensor:
        """Return the sum of values (T, ...) over all ranks, in place."""
        dist.all_reduce(local, group=self.group)
        return local

    def _gathered(self, local: Tensor) -> Tensor:
        """Return the values (…) of all ranks: (N, …)."""
        shape = dist.get_world_size(self.group), *local.shape
        values = local.new_empty(shape)
        dist.all_gather(list(values), local.contiguous(), group=self.group)
        return values


def _parts(logits: Tensor, temperature: float) -> Any:
    """Yield slices of rows, and their logits/τ (t, V/N) in float32 or better."""
    return ((part, scaled(logits[part], temperature)) for part in chunks_of(logits))


class _Score(torch.autograd.Function):
    """Log-probs of K tokens and entropies.

    With p = softmax(z) and z = logits/τ: ∂log p_k/∂z_v = 1[v = k] − p_v and
    ∂H/∂z_v = −p_v·(log p_v + H), of which each rank computes its columns v.
    """

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        ids: Tensor,
        temperature: float,
        with_entropy: bool,
        vocabulary: Vocabulary,
    ) -> tuple[Tensor, Tensor]:
        """Map logits (T, V/N) and ids (T, K) to log-probs (T, K) and entropies (T,) or (0,)."""
        dtype = torch.promote_types(logits.dtype, torch.float32)
        log_norm = torch.empty(len(logits), dtype=dtype, device=logits.device)
        for part, z in _parts(logits, temperature):
            log_norm[part] = z.logsumexp(-1)
        log_norm = vocabulary.log_sum_exp(log_norm)
        entropy = torch.zeros_like(log_norm if with_entropy else log_norm[:0])
        if with_entropy:
            for part, z in _parts(logits, temperature):
                log_p = (z - log_norm[part, None]).clamp_(min=LOG_ZERO)
                entropy[part] = -log_p.exp().mul_(log_p).sum(-1)
            vocabulary.summed(entropy)
        local = ids - vocabulary.first(logits)
        inside = (local >= 0) & (local < logits.shape[-1])
        local = local.clamp(0, logits.shape[-1] - 1)
        picked = torch.where(inside, scaled(logits.gather(-1, local), temperature), 0.0)
        log_probs = vocabulary.summed(picked) - log_norm[:, None]
        ctx.save_for_backward(logits, local, inside, log_norm, entropy)
        ctx.temperature = temperature
        ctx.set_materialize_grads(False)
        return log_probs, entropy

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, grad_log_probs: Tensor | None, grad_entropy: Tensor | None
    ) -> tuple[Tensor, None, None, None, None]:
        """Map gradients (T, K) and (T,), or None, to the gradient (T, V/N) of the logits."""
        logits, local, inside, log_norm, entropy = ctx.saved_tensors
        if grad_log_probs is None:
            grad_log_probs = torch.zeros_like(local, dtype=log_norm.dtype)
        grad = torch.empty_like(logits)
        for part, z in _parts(logits, ctx.temperature):
            g = grad_log_probs[part] / ctx.temperature
            log_p = (z - log_norm[part, None]).clamp_(min=LOG_ZERO)
            factor = -g.sum(-1, keepdim=True).expand_as(log_p)
            if grad_entropy is not None:
                scale = grad_entropy[part, None] / ctx.temperature
                factor = factor - (log_p + entropy[part, None]) * scale
            dz = log_p.exp() * factor
            dz.scatter_add_(-1, local[part], torch.where(inside[part], g, 0.0))
            grad[part] = dz
        return grad, None, None, None, None
