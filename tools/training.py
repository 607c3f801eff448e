"""Training loop of the quickstart's models that `rlctl train sft` does not make."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def train(
    model: Any,
    batch_of: Callable[[int], dict[str, Any]],
    num_steps: int,
    learning_rate: Callable[[int], float],
) -> None:
    """Train `model` on `batch_of(step)`, arguments of its `forward`, and print the loss."""
    import torch

    optimizer = torch.optim.AdamW(model.parameters(), lr=1.0, betas=(0.9, 0.98), weight_decay=0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, learning_rate)
    for step in range(num_steps):
        loss = model(**batch_of(step)).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 50 == 0 or step == num_steps - 1:
            print(f"step {step}/{num_steps}  loss {loss.item():.4f}", flush=True)
