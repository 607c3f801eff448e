"""Section `optim`: the optimizer of a role that learns, and its learning rate."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from rlctl.recipes.schema.fields import (
    Betas,
    Fraction,
    NonNegativeFloat,
    Not,
    PositiveFloat,
    Section,
    Text,
    UnusedIf,
)


class Optim(Section):
    """The optimizer and its learning rate schedule."""

    lr: NonNegativeFloat = Field(description="peak learning rate")
    weight_decay: NonNegativeFloat = Field(description="decoupled weight decay")
    betas: Betas = Field(description="decay rates of Adam's first and second moment")
    lr_warmup_steps: Annotated[int, Field(ge=-1)] = Field(
        description="steps of linear warm-up, the first with lr 0, counted from the role's first "
        "update; -1 or 0 = by lr_warmup_steps_ratio"
    )
    lr_warmup_steps_ratio: Annotated[Fraction, UnusedIf({".lr_warmup_steps": Not(-1, 0)})] = Field(
        description="warm-up as a fraction of the steps that update the role, if lr_warmup_steps "
        "is not set"
    )
    lr_scheduler_type: Literal["constant", "cosine", "linear"] = Field(
        description="learning rate schedule after the warm-up"
    )
    min_lr_ratio: Annotated[Fraction, UnusedIf({".lr_scheduler_type": "constant"})] = Field(
        description="final learning rate as a fraction of lr, for cosine and linear"
    )
    num_cycles: Annotated[PositiveFloat, UnusedIf({".lr_scheduler_type": Not("cosine")})] = Field(
        description="waves of the cosine; 0.5 = one fall from the peak to the minimum"
    )
    optimizer: Text = Field(
        description="class of the optimizer, a name in the module optimizer_impl: AdamW, or "
        "AdamW8bit of torchao.optim"
    )
    optimizer_impl: Text = Field(
        description="module with the optimizer: torch.optim, torchao.optim, or any on PYTHONPATH"
    )
    override_optimizer_config: dict[str, Any] = Field(
        description="further arguments of the optimizer's constructor, such as {eps: 1.0e-6}"
    )
