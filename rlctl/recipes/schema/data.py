"""`data`: files, batch sizes, lengths."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from rlctl.recipes.schema.fields import Count, CountOrAll, NonNegativeInt, Section, Text, Texts


class Data(Section):
    train_files: Texts = Field(
        description="parquet, json or jsonl files of training prompts (paths or addresses: s3://…), or `quickstart`"
    )
    val_files: Texts | None = Field(
        description="files of validation prompts, or `quickstart`; null = no validation"
    )
    train_batch_size: Count = Field(description="prompts a step; each gets rollout.n answers")
    val_batch_size: Count | None = Field(description="prompts validated at a time; null = all")
    max_prompt_length: Count = Field(
        description="longest prompt, in tokens, chat template included"
    )
    max_response_length: Count = Field(description="longest answer, in tokens")
    prompt_key: Text = Field(description="column that holds the chat (a list of {role, content})")
    response_key: Text = Field(description="dotted path to the worked solution; read by sft")
    reward_fn_key: Text = Field(
        description="column that names the data source; chooses the scorer and the validation group"
    )
    shuffle: bool = Field(description="shuffle the training prompts in each epoch")
    seed: NonNegativeInt = Field(description="seed of the data order")
    filter_overlong_prompts: bool = Field(
        description="drop prompts longer than max_prompt_length before training; they are counted"
    )
    truncation: Literal["error", "left", "right", "middle"] = Field(
        description="what happens to a prompt that is too long and was not dropped"
    )
    train_max_samples: CountOrAll = Field(description="use only so many training prompts; -1 = all")
    val_max_samples: CountOrAll = Field(description="use only so many validation prompts; -1 = all")
    apply_chat_template_kwargs: dict[str, Any] = Field(
        description="extra variables for the chat template, such as {enable_thinking: false}"
    )
    sampler: Text = Field(
        description="order of the prompts: random, sequential, curriculum or a plug-in `module:Name`"
    )
    sampler_params: dict[str, Any] = Field(description="settings of the sampler")
