"""Passes of micro-batches through the stages of a pipeline.

In a pipeline of P stages and M micro-batches, a stage is idle for (P − 1) / (M + P − 1) of the time
(GPipe, arXiv 1811.06965, section 2.3). With 1F1B (PipeDream-Flush, arXiv 2006.09503) it holds the
activations of at most P micro-batches, with GPipe those of all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

from rlctl.runtime.base.ops import ceil_div
from rlctl.runtime.model.causal_lm import PackedModel
from rlctl.runtime.model.pipeline_parallel import Stage
from rlctl.runtime.model.sequences import Sequences
from rlctl.runtime.workers.passes import PARTS_PER_STAGE, Compute

B = TypeVar("B")
R = TypeVar("R")


def in_stages(
    model: PackedModel,
    stage: Stage,
    parts: Sequence[tuple[B, Sequences]],
    compute: Compute[B, R],
) -> list[R]:
    """Return the results of the last stage: see `passes`."""
    results: list[R] = []

    def forward(received: Tensor | None, number: int) -> Tensor:
        part, sequences = parts[number]
        stage.received = received
        if not stage.is_last:
            return model(sequences)
        result, loss = compute(part, sequences)
        results.append(result)
        return torch.zeros(()) if loss is None else loss

    ranks = 1 if model.sequence_group is None else model.sequence_group.size
    stage.length = max(ceil_div(len(sequences.ids), ranks) for _, sequences in parts)
    learns = torch.is_grad_enabled()
    numbers = torch.arange(len(parts))
    for some in numbers.tensor_split(ceil_div(len(parts), PARTS_PER_STAGE * stage.size)):
        _run(model, stage, some, forward, learns)
    stage.received = None
    if learns:
        stage.sum_tied_gradients(model.hf)
    return stage.from_last(results)


class _Stage(nn.Module):
    """A stage as torch sees it. It has no parameters: FSDP reduces gradients as without stages."""

    def __init__(self, compute: Callable[[Tensor | None, int], Tensor]) -> None:
        super().__init__()
        self.compute = compute

    def forward(self, received: Tensor | None = None, *, number: Tensor) -> Tensor:
        """Map the previous stage's output (1, L, H) for a micro-batch, (1,), to this stage's."""
        return self.compute(received, int(number))


def _run(
    model: PackedModel,
    stage: Stage,
    numbers: Tensor,
    forward: Callable[[Tensor | None, int], Tensor],
    learns: bool,
) -> None:
    """Run the schedule for the micro-batches `numbers` (M,)."""
    width = model.hf.config.get_text_config().hidden_size
    shape = 1, stage.length, width
    hidden = torch.empty(shape, dtype=stage.dtype, device="meta", requires_grad=learns)
    scalar = torch.empty((), device="meta", requires_grad=learns)
    torch_stage = PipelineStage(
        _Stage(forward),
        stage.index,
        stage.size,
        next(model.parameters()).device,
        input_args=() if stage.is_first else (hidden,),
        output_args=(scalar,) if stage.is_last else (hidden,),
        group=stage.group,
    )
    schedule: Any = ScheduleGPipe
    if learns and stage.schedule == "1f1b":
        schedule = Schedule1F1B
    loss = target = None
    if learns:
        loss = _output_as_loss
        target = numbers
    run = schedule(torch_stage, len(numbers), loss_fn=loss, scale_grads=False)
    try:
        run.step(number=numbers, target=target, return_outputs=False)
    except RuntimeError as error:
        # torch puts the text of any error of a stage into another one.
        raise error.__cause__ or error from None


def _output_as_loss(output: Tensor, _: Tensor) -> Tensor:
    return output
