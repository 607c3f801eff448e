"""Section `model` of the policy and the critic."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from rlctl.recipes.schema.fields import Count, NonNegativeInt, Section, Text, Texts


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
    gradient_checkpointing_every_n_layers: Count = Field(
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
    lora_alpha: Count = Field(
        description="LoRA scale; adapters are scaled by lora_alpha / lora_rank"
    )
    target_modules: Texts = Field(
        description="modules with adapters, by name; all-linear = all linear layers but the head"
    )
    use_rslora: bool = Field(
        description="scale adapters by lora_alpha / √lora_rank (rsLoRA), for high ranks"
    )
    load_in_4bit: bool = Field(
        description="keep the frozen base of adapters in 4 bits (QLoRA); less memory, slower"
    )
    use_dora: bool = Field(
        description="also train the norms of the rows of adapted weights (DoRA); slower"
    )

    @property
    def chat_template_file(self) -> str | None:
        """File of `custom_chat_template`; None if it is null or the template itself."""
        template = self.custom_chat_template
        return None if template is None or "{{" in template or "{%" in template else template
