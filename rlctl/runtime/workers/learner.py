"""Model on one rank with its optimizer: micro-batches, gradient normalization and updates.

The gradient of a mini-batch must not depend on its split into ranks and micro-batches. Therefore
each micro-batch adds the gradient of its loss *sum*, the counts are summed over micro-batches and
ranks, and the gradient is divided once, before clipping.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from rlctl.recipes import schema
from rlctl.runtime.algorithms.base import Loss
from rlctl.runtime.algorithms.sampled_tokens import PROBS_DIFF
from rlctl.runtime.base.balance import TokenCounts
from rlctl.runtime.base.batch import LogProbs, Ragged, Rollouts
from rlctl.runtime.base.budget import Budget, OomRetry, free_memory, is_oom
from rlctl.runtime.base.metrics import Mean, Metrics, Sum, merge
from rlctl.runtime.base.ops import PolicyOutputs
from rlctl.runtime.base.rank_info import RankInfo
from rlctl.runtime.base.roles import REFUSED
from rlctl.runtime.model.causal_lm import PackedModel, PolicyModel
from rlctl.runtime.model.mixture import has_routers
from rlctl.runtime.model.phase_offload import PhaseOffload
from rlctl.runtime.model.sequences import Sequences
from rlctl.runtime.model.sharding import local_gradients, reset_gradients, total_norm
from rlctl.runtime.model.stage import stage_of
from rlctl.runtime.workers.background import PARTS, BackgroundWriter
from rlctl.runtime.workers.interrupts import INTERRUPTS
from rlctl.runtime.workers.learner_state import StoredState, load_state, save_state
from rlctl.runtime.workers.micro_batches import count_tokens, pack_rows
from rlctl.runtime.workers.optimizers import build_optimizer, set_lr
from rlctl.runtime.workers.passes import Compute, enter_training, in_order, passes
from rlctl.runtime.workers.rng import rng_state

if TYPE_CHECKING:
    from rlctl.runtime.model.average import Average

B = TypeVar("B", bound=Rollouts)
R = TypeVar("R")


class Learner:
    """Model on one rank, and its optimizer if it is trained (`optim` is not None)."""

    def __init__(
        self,
        model: PackedModel,
        rank_info: RankInfo,
        optim: schema.Optim | None,
        fsdp: schema.FSDP,
        name: str = "",
    ) -> None:
        """Build the optimizer; `fsdp` has the parts that are in host memory between uses.

        `name` is the prefix of the metrics of updates.
        """
        self.model = model
        self.name = name
        self.rank_info = rank_info
        self.oom_retries: list[OomRetry] = []
        self.average: Average | None = None  # of the weights, saved with them
        self.of_passes: list[Metrics] = []  # without gradients, since the last update, on GPUs
        self.random_state: dict[str, Any] | None = None  # that is saved; None: the present one
        self.optimizer: torch.optim.Optimizer | None = None
        if optim is not None:
            trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
            self.optimizer = build_optimizer(trained, optim, fsdp.optimizer_offload)
            self.writer = BackgroundWriter(rank_info)
        self.parameters = PhaseOffload(model, fsdp.param_offload)

    def keep_average(self) -> None:
        """Keep a moving average of the weights."""
        from rlctl.runtime.model.average import Average

        self.average = Average(self.model)
        self.parameters.add(self.average.values.values())

    @property
    def num_updates(self) -> int:
        """Number of optimizer steps of the run, also before a resume."""
        assert self.optimizer is not None, "this model is not trained"
        first = next(iter(self.optimizer.state.values()), {"step": 0})
        return int(first["step"])

    def infer(
        self,
        batch: Rollouts,
        budget: Budget,
        forward: Callable[[Sequences], tuple[Tensor, ...]],
        per_row: bool = False,
        num_whole: int = 0,
    ) -> tuple[Ragged, ...]:
        """Run `forward` without gradients in micro-batches; rows keep the order of `batch`.

        `forward` returns tensors (T,) of values per response token, or (B,) of values per row with
        `per_row`; the last `num_whole` have values per token of prompts, too. Returns ragged rows.
        """

        def outputs(part: Rollouts, sequences: Sequences) -> tuple[tuple[Tensor, ...], None]:
            if self.rank_info.world_size == 1:  # else others would wait for its collectives
                INTERRUPTS.permit()
            return tuple(x if len(part) else x[:0] for x in forward(sequences)), None

        begin = time.perf_counter()
        self.model.eval()
        with torch.no_grad():
            results, order = self.in_micro_batches(batch, budget, outputs)
        lengths = batch.response_ids.lengths
        values = list(zip(*results, strict=True))
        if per_row:
            lengths = torch.ones_like(lengths)
        sizes = [lengths] * (len(values) - num_whole) + [batch.num_tokens] * num_whole
        found = tuple(in_order(x, order, y) for x, y in zip(values, sizes, strict=True))
        if self.rank_info.device == "cuda" and self.optimizer is not None:
            from rlctl.runtime.workers.device_usage import utilization

            seconds = (time.perf_counter() - begin) * self.model.ranks_per_row
            work = self.model.hf.config, batch.num_tokens.tolist(), seconds
            self.of_passes.append(utilization(*work, f"{self.name}_infer", passes=1))
        return found

    def infer_policy(
        self, policy: PolicyModel, batch: Rollouts, budget: Budget, top_k: int
    ) -> LogProbs:
        """Return log-probs under `policy`, and its `top_k` most probable tokens if that is not 0.

        Rows keep the order of `batch`.
        """

        def forward(sequences: Sequences) -> tuple[Tensor, ...]:
            outputs = policy(sequences, top_k=top_k)
            if not top_k:
                return (outputs.log_probs,)
            return outputs.log_probs, outputs.candidates, outputs.candidate_log_probs

        log_probs, *best = self.infer(batch, budget, forward)
        return LogProbs(log_probs, None, None, *best)

    def learn(
        self,
        batch: B,
        budget: Budget,
        loss: Callable[[Sequences, B], Loss],
        lr: float,
        grad_clip: float,
        max_probs_diff: float | None = None,
    ) -> tuple[Metrics, Ragged | None]:
        """Take one optimizer step on `batch`; return metrics and values.

        The latter are the `values` of the losses, B rows, or None if a loss has none.
        Without an unmasked token on any rank, or with a difference to the engine above
        `max_probs_diff`, weights and optimizer state stay as they are. The metrics cover this
        rank's rows; the controller merges those of all rows.
        """

        def losses_of(part: B, sequences: Sequences) -> tuple[Loss, Tensor]:
            result = loss(sequences, part) if len(part) else self._no_loss(sequences)
            return replace(result, total=result.total.detach()), result.total

        begin = time.perf_counter()
        enter_training(self.model)
        losses, order = self.in_micro_batches(batch, budget, losses_of)
        kept = [loss.num_tokens for loss in losses if loss.num_tokens is not None]
        diffs = [loss.metrics.get(PROBS_DIFF, Mean(0, 0)) for loss in losses]
        sums = (
            sum(float(loss.total) for loss in losses),
            sum(loss.count or 0.0 for loss in losses),
            sum(loss.count is None for loss in losses),
            sum(kept) if kept else float(batch.response_mask.values.sum()),
            sum(diff.total for diff in diffs if isinstance(diff, Mean)),
            sum(diff.count for diff in diffs if isinstance(diff, Mean)),
        )
        summed = self.sum_over_ranks(torch.tensor(sums, dtype=torch.float64))
        total, count, num_undivided, num_tokens, diff, compared = summed.tolist()
        metrics = [loss.metrics for loss in losses]
        divisor = 1.0 if num_undivided else count
        if max_probs_diff is not None and compared and not diff / compared <= max_probs_diff:
            reset_gradients(self.model)
            metrics.append({REFUSED: Sum(1.0)})
        elif num_tokens and divisor:
            metrics.append({f"{self.name}/loss": Mean(total / divisor)})
            metrics.append(self._step(divisor, lr, grad_clip))
            if not isfinite(norm := metrics[-1][f"{self.name}/grad_norm"].value):
                from rlctl.runtime.workers.broken_update import examine

                examine(self, batch, budget, losses_of, lr=lr, grad_norm=norm)
        else:  # a step would still apply momentum and weight decay
            reset_gradients(self.model)
            is_first = self.rank_info.rank == 0
            metrics.append({f"{self.name}/empty_mini_batches": Sum(float(is_first))})
        if self.rank_info.device == "cuda":
            from rlctl.runtime.workers.device_usage import usage_of_update

            metrics += usage_of_update(self, batch, time.perf_counter() - begin)
        parts = [loss.values for loss in losses if loss.values is not None]
        if len(parts) < len(losses):
            return merge(metrics), None
        return merge(metrics), in_order(parts, order, batch.response_ids.lengths)

    def _step(self, divisor: float, lr: float, grad_clip: float) -> Metrics:
        """Divide and clip the gradients in one pass, and step.

        A gradient that is not finite is dropped and counted as a skipped update.
        """
        assert self.optimizer is not None, "this model is not trained"
        norm = float(total_norm(self.model)) / divisor
        if finite := isfinite(norm):
            scale = min(1.0, grad_clip / (norm + 1e-6)) / divisor
            gradients = local_gradients(self.model)
            torch._foreach_mul_(gradients, scale)  # pyright: ignore[reportPrivateImportUsage]
            set_lr(self.optimizer, lr)
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        skipped = Sum(0.0 if finite or self.rank_info.rank else 1.0)
        return {
            f"{self.name}/grad_norm": Mean(norm),
            f"{self.name}/lr": Mean(lr),
            f"{self.name}/skipped_updates": skipped,
        }

    def in_micro_batches(
        self, batch: B, budget: Budget, compute: Compute[B, R]
    ) -> tuple[list[R], list[Tensor]]:
        """Return the result of `passes` for each micro-batch, and its row indices (N,).

        After an out-of-memory error all micro-batches are computed again with half the limit,
        because an interrupted backward pass has already added part of its gradient.
        """
        self.parameters.enter()
        if not has_routers(self.model.hf):
            batch = replace(batch, routing=None)
        counts = count_tokens(self.model, batch)
        device = self.rank_info.device
        while True:
            cut = self._cut(counts, budget)
            results: list[R] = []
            try:
                parts = (pack_rows(self.model, batch, rows, counts, device) for rows in cut)
                results.extend(passes(self.model, parts, len(cut), compute))  # one by one
                return results, cut
            except RuntimeError as error:
                if not is_oom(error):
                    raise
                reason = str(error).splitlines()[0]
            # Outside the handler: the error references all its frames, which hold the memory.
            tokens = [counts.together(rows) for rows in cut]
            alone = self.rank_info.world_size == 1
            self.oom_retries.append(budget.halve(tokens, len(results), alone, reason))
            reset_gradients(self.model)
            free_memory(self.rank_info.device)

    def _cut(self, counts: TokenCounts, budget: Budget) -> list[Tensor]:
        """Split the rows of a batch into the same number of micro-batches on every rank.

        Different numbers would leave some ranks waiting in FSDP's collectives. A rank with too few
        rows, or none, gets empty ones. Returns row indices.
        """
        num_rows = len(counts.lengths)
        parts = budget.cut(counts) if num_rows else []
        if self.rank_info.world_size > 1:
            stage = stage_of(self.model)  # each stage has a micro-batch to work on
            most = torch.tensor(max(len(parts), 0 if stage is None else stage.size))
            dist.all_reduce(most, dist.ReduceOp.MAX)
            if len(parts) < min(int(most), num_rows):
                parts = budget.cut(counts, at_least=int(most))
            parts += [torch.empty(0, dtype=torch.int64)] * (int(most) - len(parts))
        return parts

    def _no_loss(self, sequences: Sequences) -> Loss:
        """Return the loss of an empty micro-batch: 0, with a graph of the whole model."""
        outputs = self.model(sequences)
        values = outputs.log_probs if isinstance(outputs, PolicyOutputs) else outputs
        return Loss(0.0 * values.sum(), 0.0, {}, values=values.detach()[:0])

    def sum_over_ranks(self, numbers: Tensor) -> Tensor:
        """Return the sums of `numbers` (N,), on the CPU, over ranks with different rows.

        Collective; in place.
        """
        if self.rank_info.rank % self.model.ranks_per_row:
            numbers.zero_()  # the first rank with the same rows adds them
        if self.rank_info.world_size > 1:
            dist.all_reduce(numbers)
        return numbers

    def save(self, folder: Path, contents: Sequence[str] = PARTS) -> None:
        """Copy weights, optimizer and random state, and write them to `folder` in the background.

        Collective.
        """
        assert self.optimizer is not None, "this model is not trained"
        self.parameters.enter()
        random_state = self.random_state or rng_state()
        stored = StoredState(self.model, self.optimizer, self.average, random_state)
        save_state(stored, contents, self.rank_info, folder, self.writer)

    def load(self, folder: Path, with_optimizer: bool = True) -> None:
        """Restore what `save` wrote, on any number of ranks. Collective.

        The average starts as a copy of the weights if the checkpoint has none.
        """
        assert self.optimizer is not None, "this model is not trained"
        self.parameters.enter()
        self.random_state = None
        stored = StoredState(self.model, self.optimizer, self.average, {})
        found = load_state(stored, with_optimizer, self.rank_info, folder)
        if self.average is not None and not found:
            self.average.restart()
