"""Sections `model`, `optim` and `fsdp_config` of the roles."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from rlctl.recipes.schema.fields import (
    Betas,
    Count,
    CountOrAll,
    Fraction,
    NonNegativeFloat,
    NonNegativeInt,
    Not,
    PositiveFloat,
    Section,
    Text,
    Texts,
    UnusedIf,
)

_NO_CHECKPOINTING = UnusedIf({".enable_gradient_checkpointing": False})
_NO_ADAPTERS = UnusedIf({".lora_rank": 0})


class Model(Section):
    """A transformers model with its tokenizer and adapters."""

    path: Text = Field(description="model: folder, address (s3://…), hub name, or `quickstart`")
    tokenizer_path: Text | None = Field(
        description="tokenizer: folder, address or hub name; null = the model's"
    )
    custom_chat_template: Text | None = Field(
        description="chat template: a jinja file, its address, or the template itself, such as one "
        "that keeps the thoughts of earlier turns; null = the tokenizer's"
    )
    init: Literal["auto", "random"] = Field(
        description="auto = load the weights; random = seeded random weights from config.json"
    )
    trust_remote_code: bool = Field(description="run Python code of the model's repository")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        description="compute dtype; auto = bfloat16 on GPUs that support it, else float32"
    )
    override_config: dict[str, Any] = Field(
        description="values that replace those of the model's config.json, such as "
        "{max_position_embeddings: 32768}"
    )
    enable_gradient_checkpointing: bool = Field(
        description="recompute activations in the backward pass: less memory, more time"
    )
    gradient_checkpointing_every_n_layers: Annotated[Count, _NO_CHECKPOINTING] = Field(
        description="decoder layers of which one is recomputed; 1 = all are, 2 = every other one: "
        "more memory, less time"
    )
    enable_activation_offload: bool = Field(
        description="keep what the backward pass needs in host memory until then, or with gradient "
        "checkpointing the inputs of its layers; on CPUs it always is there"
    )
    lora_rank: NonNegativeInt = Field(
        description="rank of the LoRA adapters; 0 = train all weights"
    )
    lora_alpha: Annotated[Count, _NO_ADAPTERS] = Field(
        description="LoRA scale; adapters are scaled by lora_alpha / lora_rank"
    )
    target_modules: Annotated[Texts, _NO_ADAPTERS] = Field(
        description="modules with adapters, by name; all-linear = all linear layers but the head"
    )
    use_rslora: Annotated[bool, _NO_ADAPTERS] = Field(
        description="scale adapters by lora_alpha / √lora_rank (rsLoRA), for high ranks"
    )
    load_in_4bit: Annotated[bool, _NO_ADAPTERS] = Field(
        description="keep the frozen base of adapters in 4 bits (QLoRA); less memory, slower"
    )
    use_dora: Annotated[bool, _NO_ADAPTERS] = Field(
        description="also train the norms of the rows of adapted weights (DoRA); slower"
    )

    @property
    def is_4bit(self) -> bool:
        """True if the linear layers are stored in 4 bits, which needs adapters."""
        return self.load_in_4bit and self.lora_rank > 0

    @property
    def chat_template_file(self) -> str | None:
        """File of `custom_chat_template`; None if it is null or the template itself."""
        template = self.custom_chat_template
        if template is None or "{{" in template or "{%" in template:
            return None
        return template


class FSDP(Section):
    """Fully sharded placement of one model's parameters."""

    param_offload: bool = Field(
        description="keep parameters in host memory while responses are generated and while other "
        "roles compute"
    )
    optimizer_offload: bool = Field(
        description="keep the optimizer's state in host memory between updates; on CPUs it always "
        "is there"
    )
    offload_policy: bool = Field(
        description="keep parameters, gradients and the optimizer's state in host memory, where "
        "updates are computed (FSDP2's policy): least memory, slow"
    )
    reshard_after_forward: bool = Field(
        description="free gathered parameters after the forward pass: less memory, a second gather"
    )
    fsdp_size: CountOrAll = Field(
        description="ranks that share one copy of the parameters; -1 = all"
    )
    ulysses_sequence_parallel_size: Count = Field(
        description="ranks that compute the same rows, each a slice of their tokens: less memory "
        "per rank for long rows; divides the ranks and the attention heads; token budgets are "
        "multiplied by it"
    )
    expert_model_parallel_size: Count = Field(
        description="ranks over which the experts of a mixture are divided: tokens travel to them, "
        "instead of weights to tokens; 1, or the ranks that share one copy of the parameters"
    )
    tensor_model_parallel_size: Count = Field(
        description="ranks that split each layer and the vocabulary: less memory per rank; divides "
        "the ranks, the heads and the vocabulary"
    )
    pipeline_model_parallel_size: Count = Field(
        description="ranks that each have some adjacent layers, through which micro-batches pass "
        "one after the other: less memory per rank, little communication; divides the ranks; at "
        "most the number of layers"
    )
    pipeline_schedule: Literal["1f1b", "gpipe"] = Field(
        description="order of forward and backward passes in a pipeline: 1f1b holds the "
        "activations of as many micro-batches as there are stages, gpipe those of all"
    )
    model_dtype: Literal["fp32", "bf16", "fp16"] = Field(
        description="dtype of the stored weights and gradients; moments are float32, bf16 trains "
        "as fp32 does, and fp16 is for models that are not trained"
    )

    @property
    def ranks_per_row(self) -> int:
        """Number of ranks that compute the same rows."""
        sliced = self.ulysses_sequence_parallel_size * self.tensor_model_parallel_size
        return sliced * self.pipeline_model_parallel_size

    @property
    def has_mesh(self) -> bool:
        """True if ranks divide rows, layers or experts, besides sharding all weights."""
        return self.ranks_per_row > 1 or self.expert_model_parallel_size > 1


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
