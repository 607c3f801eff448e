"""Model on one rank with its optimizer: micro-batches, gradient normalization and updates.

The gradient of a mini-batch must not depend on its split into ranks and micro-batches. Therefore
each micro-batch adds the gradient of its loss *sum*, the counts are summed over micro-batches and
ranks, and the gradient is divided once, before clipping.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from rlctl.recipes import schema
from rlctl.runtime.algorithms.base import Loss
from rlctl.runtime.batch import LogProbs, Ragged, Rollouts
from rlctl.runtime.budget import Budget, OomRetry, free_memory, is_oom
from rlctl.runtime.model.average import Average
from rlctl.runtime.model.causal_lm import PolicyModel, PolicyOutputs, ValueModel
from rlctl.runtime.model.reward_model import RewardModel
from rlctl.runtime.model.sequences import Sequences
from rlctl.runtime.model.sharding import local_gradients, reset_gradients, total_norm
from rlctl.runtime.rank_info import RankInfo
from rlctl.runtime.workers.background import BackgroundWriter
from rlctl.runtime.workers.flops import DecoderShape, peak_flops
from rlctl.runtime.workers.learner_state import load_state, save_state
from rlctl.tracking.metrics import Max, Mean, Metrics, Sum, merge

B = TypeVar("B", bound=Rollouts)
R = TypeVar("R")


class Learner:
    """Model on one rank, and its optimizer if it is trained (`optim` is not None)."""

    def __init__(
        self,
        model: PolicyModel | ValueModel | RewardModel,
        rank_info: RankInfo,
        optim: schema.Optim | None,
    ) -> None:
        self.model = model
        self.rank_info = rank_info
        self.oom_retries: list[OomRetry] = []
        self.average: Average | None = None  # of the weights, saved with them
        self.optimizer: torch.optim.Optimizer | None = None
        if optim is not None:
            betas = (optim.betas[0], optim.betas[1])
            self.optimizer = torch.optim.AdamW(
                [p for p in model.parameters() if p.requires_grad],
                lr=optim.lr,
                betas=betas,
                weight_decay=optim.weight_decay,
                fused=True,
            )
            self.writer = BackgroundWriter(rank_info)

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
    ) -> tuple[Ragged, ...]:
        """Run `forward` without gradients in micro-batches; rows keep the order of `batch`.

        `forward` returns tensors (T,) of values per response token, or (B,) of values per row with
        `per_row`. Returns them as ragged rows.
        """

        def outputs(part: Rollouts) -> tuple[Tensor, ...]:
            num_values = len(part) if per_row else len(part.response_ids.values)
            return tuple(x[:num_values].cpu() for x in forward(self._sequences(part)))

        self.model.eval()
        with torch.no_grad():
            results, order = self._in_micro_batches(batch, budget, outputs)
        back = torch.cat(order)
        lengths = torch.ones_like(back) if per_row else batch.response_ids.lengths[back]
        return tuple(
            Ragged(torch.cat(parts), lengths).select(back.argsort())
            for parts in zip(*results, strict=True)
        )

    def infer_policy(
        self, policy: PolicyModel, batch: Rollouts, budget: Budget, top_k: int
    ) -> LogProbs:
        """Return log-probs under `policy`, and its `top_k` most probable tokens if that is not 0.

        Rows keep the order of `batch`.
        """

        def forward(sequences: Sequences) -> tuple[Tensor, ...]:
            outputs = policy(sequences, top_k=top_k)
            best = (outputs.candidates, outputs.candidate_log_probs) if top_k else ()
            return (outputs.log_probs, *best)

        log_probs, *best = self.infer(batch, budget, forward)
        return LogProbs(log_probs, None, None, *best)

    def learn(
        self,
        batch: B,
        budget: Budget,
        loss: Callable[[Sequences, B], Loss],
        lr: float,
        grad_clip: float,
        name: str,
    ) -> Metrics:
        """Take one optimizer step on `batch`, and return metrics with prefix `name`.

        Without an unmasked token on any rank, weights and optimizer state stay as they are. The
        metrics cover this rank's rows; the controller merges those of all ranks.
        """

        def add_gradient(part: B) -> Loss:
            sequences = self._sequences(part)
            result = loss(sequences, part) if len(part) else self._no_loss(sequences)
            result.total.backward()
            return replace(result, total=result.total.detach())

        begin = time.perf_counter()
        self.model.train()
        losses, _ = self._in_micro_batches(batch, budget, add_gradient)
        kept = [each.num_tokens for each in losses if each.num_tokens is not None]
        total, count, num_undivided, num_tokens = self._sum_over_ranks(
            sum(float(each.total) for each in losses),
            sum(each.count or 0.0 for each in losses),
            sum(each.count is None for each in losses),
            sum(kept) if kept else float(batch.response_mask.values.sum()),
        )
        metrics = [each.metrics for each in losses]
        divisor = 1.0 if num_undivided else count
        if num_tokens and divisor:
            metrics.append({f"{name}/loss": Mean(total / divisor)})
            metrics.append(self._step(divisor, lr, grad_clip, name))
        else:  # a step would still apply momentum and weight decay
            reset_gradients(self.model)
            first = self.rank_info.rank == 0
            metrics.append({f"{name}/empty_mini_batches": Sum(1.0 if first else 0.0)})
        seconds = time.perf_counter() - begin
        return merge([*metrics, self._device_usage(batch.num_tokens.tolist(), seconds, name)])

    def _step(self, divisor: float, lr: float, grad_clip: float, name: str) -> Metrics:
        """Divide and clip the gradients in one pass, and step.

        A gradient that is not finite is dropped and counted as a skipped update.
        """
        assert self.optimizer is not None, "this model is not trained"
        norm = float(total_norm(self.model)) / divisor
        finite = norm == norm and norm != float("inf")
        if finite:
            scale = min(1.0, grad_clip / (norm + 1e-6)) / divisor
            gradients = local_gradients(self.model)
            torch._foreach_mul_(gradients, scale)  # pyright: ignore[reportPrivateImportUsage]
            for group in self.optimizer.param_groups:
                group["lr"] = lr
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        skipped = Sum(0.0 if finite or self.rank_info.rank else 1.0)
        return {
            f"{name}/grad_norm": Mean(norm),
            f"{name}/lr": Mean(lr),
            f"{name}/skipped_updates": skipped,
        }

    def _device_usage(self, lengths: list[int], seconds: float, name: str) -> Metrics:
        """Return peak memory and model FLOPs utilization (MFU) of a GPU; nothing on a CPU.

        MFU is weighted by `seconds`: merged, it is the useful work divided by the device time.
        """
        if self.rank_info.device != "cuda":
            return {}
        metrics: Metrics = {
            "perf/max_memory_allocated_gb": Max(torch.cuda.max_memory_allocated() / 2**30)
        }
        shape = DecoderShape.from_config(self.model.hf.config)
        peak = peak_flops(torch.cuda.get_device_name())
        if shape is not None and peak is not None:
            metrics[f"perf/mfu/{name}"] = Mean(shape.training_flops(lengths) / peak, seconds)
        return metrics

    def _in_micro_batches(
        self, batch: B, budget: Budget, compute: Callable[[B], R]
    ) -> tuple[list[R], list[Tensor]]:
        """Return the result of `compute` for each micro-batch, and the row indices of each.

        After an out-of-memory error all micro-batches are computed again with half the limit,
        because an interrupted backward pass has already added part of its gradient.
        """
        while True:
            cut = self._cut(batch, budget)
            results: list[R] = []
            try:
                for rows in cut:
                    part = batch if len(batch) == len(rows) == 1 else batch.select(rows)
                    results.append(compute(part.to(self.rank_info.device)))
                return results, cut
            except RuntimeError as error:
                if not is_oom(error):
                    raise
                reason = str(error).splitlines()[0]
            # Outside the handler: the error references all its frames, which hold the memory.
            lengths = [batch.num_tokens[rows] for rows in cut]
            alone = self.rank_info.world_size == 1
            self.oom_retries.append(budget.halve(lengths, len(results), alone, reason))
            reset_gradients(self.model)
            free_memory(self.rank_info.device)

    def _cut(self, batch: Rollouts, budget: Budget) -> list[Tensor]:
        """Split `batch` into the same number of micro-batches on every rank.

        Different numbers would leave some ranks waiting in FSDP's collectives. A rank with too few
        rows, or none, gets empty ones. Returns row indices.
        """
        parts = budget.cut(batch.num_tokens) if len(batch) else []
        if self.rank_info.world_size > 1:
            most = torch.tensor(len(parts))
            dist.all_reduce(most, dist.ReduceOp.MAX)
            if len(parts) < min(int(most), len(batch)):
                parts = budget.cut(batch.num_tokens, at_least=int(most))
            parts += [torch.empty(0, dtype=torch.int64)] * (int(most) - len(parts))
        return parts

    def _sequences(self, part: Rollouts) -> Sequences:
        """Pack the rows of a micro-batch; an empty one takes part in collectives with one token."""
        if len(part):
            return Sequences.from_ragged(part.prompt_ids, part.response_ids, part.candidates)
        token = Ragged.from_rows([[0]], torch.int64).to(self.rank_info.device)
        return Sequences.from_ragged(token, token)

    def _no_loss(self, sequences: Sequences) -> Loss:
        """Return the loss of an empty micro-batch: 0, with a graph of the whole model."""
        outputs = self.model(sequences)
        values = outputs.log_probs if isinstance(outputs, PolicyOutputs) else outputs
        return Loss(0.0 * values.sum(), 0.0, {})

    def _sum_over_ranks(self, *values: float) -> list[float]:
        if self.rank_info.world_size == 1:
            return list(values)
        packed = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(packed)
        return packed.tolist()

    def save(self, folder: Path) -> None:
        """Copy weights, optimizer and random state, and write them to `folder` in the background.

        Collective.
        """
        assert self.optimizer is not None, "this model is not trained"
        average = None if self.average is None else self.average.values
        save_state(self.model, self.optimizer, average, self.rank_info, folder, self.writer)

    def load(self, folder: Path) -> None:
        """Restore what `save` wrote, on any number of ranks. Collective.

        The average starts as a copy of the weights if the checkpoint has none.
        """
        assert self.optimizer is not None, "this model is not trained"
        average = None if self.average is None else self.average.values
        found = load_state(self.model, self.optimizer, average, self.rank_info, folder)
        if self.average is not None and not found:
            self.average.restart()
