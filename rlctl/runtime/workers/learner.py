"""A model that learns, and the only place where a loss is divided and an optimizer steps.

The gradient of a mini-batch must not depend on how it is cut into ranks and micro-batches. So every micro-batch adds the gradient of its
*sum*, the counts are added up over micro-batches and ranks, and the total is divided once, before the clip.
"""

from __future__ import annotations

import json
import time
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor

from rlctl.recipes import schema
from rlctl.runtime.algorithms.base import Loss
from rlctl.runtime.batch import Ragged, Rollouts
from rlctl.runtime.budget import Budget, OomRetry, free_memory, is_oom
from rlctl.runtime.model.causal_lm import PolicyModel, ValueModel
from rlctl.runtime.model.sequences import Sequences
from rlctl.runtime.model.sharding import (
    local_gradients,
    reset_gradients,
    total_norm,
    trained_state,
)
from rlctl.runtime.rank_info import RankInfo
from rlctl.runtime.workers.background import BackgroundWriter
from rlctl.runtime.workers.dispatch import Dispatch, Worker, dispatch
from rlctl.runtime.workers.flops import DecoderShape, peak_flops
from rlctl.runtime.workers.rng import rng_state, set_rng_state
from rlctl.tracking.metrics import Max, Mean, Metrics, Sum, merge

B = TypeVar("B", bound=Rollouts)
R = TypeVar("R")


class ModelWorker(Worker):
    """A worker with a model, whose passes may lack memory."""

    learner: Learner

    @dispatch(Dispatch.RANK_ZERO)
    def pop_oom_retries(self) -> list[OomRetry]:
        """The budgets that were halved since this was asked last. Micro-batches' are only where a rank is alone."""
        halvings, self.learner.halvings = self.learner.halvings, []
        return halvings


class LearningWorker(ModelWorker):
    """A worker whose model learns: what it must be able to save and load."""

    @dispatch(Dispatch.BROADCAST)
    def save(self, folder: Path) -> None:
        """Copy weights, optimizer and random state to memory; a thread writes them into `folder` (see `await_written`). Collective."""
        self.learner.save(folder)

    @dispatch(Dispatch.BROADCAST)
    def load(self, folder: Path) -> None:
        """Take up what `save` wrote. Collective."""
        self.learner.load(folder)

    @dispatch(Dispatch.RANK_ZERO)
    def state_bytes(self) -> int:
        """Bytes of what `save` writes, over all ranks: weights and the optimizer's two moments."""
        trained = (
            parameter for parameter in self.learner.model.parameters() if parameter.requires_grad
        )
        return 3 * sum(parameter.numel() * parameter.element_size() for parameter in trained)


class Learner:
    """A model on one rank, and its optimizer if it has one."""

    def __init__(
        self, model: PolicyModel | ValueModel, rank_info: RankInfo, optim: schema.Optim | None
    ) -> None:
        self.model = model
        self.rank_info = rank_info
        self.halvings: list[OomRetry] = []
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

    def infer(
        self, batch: Rollouts, budget: Budget, forward: Callable[[Sequences], tuple[Tensor, ...]]
    ) -> tuple[Ragged, ...]:
        """Run `forward`, which gives (T,) tensors for the response tokens, without gradients; rows come back in the order of `batch`."""

        def outputs(part: Rollouts) -> tuple[Tensor, ...]:
            return tuple(
                x.cpu() for x in forward(Sequences.from_ragged(part.prompt_ids, part.response_ids))
            )

        self.model.eval()
        with torch.no_grad():
            results, order = self._in_micro_batches(batch, budget, outputs)
        back = torch.cat(order)
        lengths = batch.response_ids.lengths[back]
        return tuple(
            Ragged(torch.cat(parts), lengths).select(back.argsort())
            for parts in zip(*results, strict=True)
        )

    def learn(
        self,
        batch: B,
        budget: Budget,
        loss: Callable[[Sequences, B], Loss],
        lr: float,
        grad_clip: float,
        name: str,
    ) -> Metrics:
        """One optimizer step. Metrics are of this rank's rows; the controller joins those of all ranks."""

        def add_gradient(part: B) -> Loss:
            result = loss(Sequences.from_ragged(part.prompt_ids, part.response_ids), part)
            result.total.backward()
            return replace(result, total=result.total.detach())

        begin = time.perf_counter()
        self.model.train()
        losses, _ = self._in_micro_batches(batch, budget, add_gradient)
        total, count = (
            sum(float(each.total) for each in losses),
            sum(each.count or 0.0 for each in losses),
        )
        divided = losses[-1].count is not None
        metrics = [each.metrics for each in losses]
        total, count = self._sum_over_ranks(total, count)
        divisor = (
            (count or 1.0) if divided else 1.0
        )  # 0 where rollout correction left nothing: the gradient is 0 as well
        metrics.append({f"{name}/loss": Mean(total / divisor)})
        metrics.append(self._step(divisor, lr, grad_clip, name))
        return merge(
            [
                *metrics,
                self._use_of_device(batch.num_tokens.tolist(), time.perf_counter() - begin, name),
            ]
        )

    def _step(self, divisor: float, lr: float, grad_clip: float, name: str) -> Metrics:
        """Divide, clip and step in one pass over the gradients. A gradient that is not finite is dropped and counted."""
        assert self.optimizer is not None, "this model does not learn"
        norm = float(total_norm(self.model)) / divisor
        finite = norm == norm and norm != float("inf")
        if finite:
            scale = min(1.0, grad_clip / (norm + 1e-6)) / divisor
            torch._foreach_mul_(local_gradients(self.model), scale)  # pyright: ignore[reportPrivateImportUsage]
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

    def _use_of_device(self, lengths: list[int], seconds: float, name: str) -> Metrics:
        """Model FLOPs utilisation and memory of a GPU. Joined over ranks and updates, it is all useful work over all device time."""
        if self.rank_info.device != "cuda":
            return {}
        metrics: Metrics = {
            "perf/max_memory_allocated_gb": Max(torch.cuda.max_memory_allocated() / 2**30)
        }
        shape, peak = (
            DecoderShape.of(self.model.hf.config),
            peak_flops(torch.cuda.get_device_name()),
        )
        if shape is not None and peak is not None:
            metrics[f"perf/mfu/{name}"] = Mean(shape.training_flops(lengths) / peak, seconds)
        return metrics

    def _in_micro_batches(
        self, batch: B, budget: Budget, compute: Callable[[B], R]
    ) -> tuple[list[R], list[Tensor]]:
        """What `compute` gives for each micro-batch, and the rows of each.

        Where memory does not suffice, everything begins anew with half the budget: a backward pass that broke off has already added some of
        its gradient.
        """
        while True:
            cut = self._cut(batch, budget)
            results: list[R] = []
            try:
                for rows in cut:
                    part = batch if len(batch) == 1 else batch.select(rows)
                    results.append(compute(part.to(self.rank_info.device)))
                return results, cut
            except RuntimeError as error:
                if not is_oom(error):
                    raise
                reason = str(error).splitlines()[0]
            # Not in the handler: the error holds every frame it came through, and these hold the memory.
            lengths = [batch.num_tokens[rows] for rows in cut]
            self.halvings.append(
                budget.halve(lengths, len(results), self.rank_info.world_size == 1, reason)
            )
            reset_gradients(self.model)
            free_memory(self.rank_info.device)

    def _cut(self, batch: Rollouts, budget: Budget) -> list[Tensor]:
        """Every rank must go through the same number of forward passes, or the collectives of FSDP would wait for ever."""
        parts = budget.cut(batch.num_tokens)
        if self.rank_info.world_size > 1:
            most = torch.tensor(len(parts))
            dist.all_reduce(most, dist.ReduceOp.MAX)
            if int(most) > len(parts):
                parts = budget.cut(batch.num_tokens, at_least=int(most))
        return parts

    def _sum_over_ranks(self, *values: float) -> list[float]:
        if self.rank_info.world_size == 1:
            return list(values)
        packed = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(packed)
        return packed.tolist()

    def save(self, folder: Path) -> None:
        """Copy weights, optimizer and random state to memory, and write them into `folder` in the background, independent of the number
        of ranks. Collective: all ranks write into `folder`."""
        from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
        from torch.distributed.checkpoint.state_dict_saver import save

        stager = DefaultStager(StagingOptions(False, False, False, False))
        state = cast(
            dict[str, Any], stager.stage(self._state(with_optimizer=self._has_stepped()))
        )  # at once: no option is on
        random_state = json.dumps(rng_state())
        writer = self.writer

        def write() -> None:
            warnings.filterwarnings(
                "ignore", message="torch.distributed is disabled"
            )  # one process needs none
            folder.mkdir(parents=True, exist_ok=True)
            self._rng_file(folder).write_text(random_state)
            save(
                state,
                checkpoint_id=folder,
                process_group=writer.group,
                no_dist=self.rank_info.world_size == 1,
            )
            stager.close()

        writer.submit(folder, write)

    def load(self, folder: Path) -> None:
        """What `save` wrote, on any number of ranks. Collective. Random state is taken up by the ranks that there were."""
        from torch.distributed.checkpoint.filesystem import FileSystemReader
        from torch.distributed.checkpoint.state_dict import (
            StateDictOptions,
            set_model_state_dict,
            set_optimizer_state_dict,
        )
        from torch.distributed.checkpoint.state_dict_loader import load

        assert self.optimizer is not None, "this model does not learn"
        saved = FileSystemReader(folder).read_metadata().state_dict_metadata
        with_optimizer = any(name.startswith("optimizer.") for name in saved)
        state = self._state(with_optimizer)
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        load(state, checkpoint_id=folder, no_dist=self.rank_info.world_size == 1)
        set_model_state_dict(
            self.model, state["model"], options=StateDictOptions(strict=False)
        )  # what is frozen is not in it
        if with_optimizer:
            set_optimizer_state_dict(self.model, self.optimizer, state["optimizer"])
        if self._rng_file(folder).exists():
            set_rng_state(json.loads(self._rng_file(folder).read_text()))

    def _state(self, with_optimizer: bool) -> dict[str, Any]:
        """Of a fresh optimizer torch would make state by stepping once, which is not what it had: it is left out until it has stepped."""
        from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

        assert self.optimizer is not None, "this model does not learn"
        state: dict[str, Any] = {"model": trained_state(self.model)}
        return state | (
            {"optimizer": get_optimizer_state_dict(self.model, self.optimizer)}
            if with_optimizer
            else {}
        )

    def _has_stepped(self) -> bool:
        return self.optimizer is not None and bool(self.optimizer.state)

    def _rng_file(self, folder: Path) -> Path:
        return folder / f"rng_{self.rank_info.rank}.json"
