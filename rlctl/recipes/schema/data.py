"""Section `data`: files, batch sizes, lengths."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from rlctl.errors import ConfigError
from rlctl.recipes.schema.fields import (
    NO_VALIDATION,
    Count,
    CountOrAll,
    OneOrMany,
    PositiveFloat,
    Section,
    Seed,
    Text,
    Texts,
    UnusedIf,
)

_FILTERED = UnusedIf({".filter_overlong_prompts": True})
_NO_FILTER = UnusedIf({"algorithm.filter_groups.enable": False})


class WeightedFile(Section):
    """Data file with its weight in a mixture."""

    path: Text
    weight: PositiveFloat


class Data(Section):
    """Settings of `data`."""

    train_files: Annotated[tuple[Text | WeightedFile, ...], OneOrMany] = Field(
        description="training prompts: parquet, json or jsonl files (paths or addresses such as "
        "s3://…), data sets (folder or owner/name on the hub, with :SPLIT), or `quickstart`; each "
        "may be {path: FILE, weight: NUMBER}"
    )
    val_files: Texts | None = Field(
        description="validation prompts, likewise without weights; null = no validation"
    )
    train_batch_size: Count = Field(description="prompts per step, each with rollout.n responses")
    gen_batch_size: Annotated[Count | None, _NO_FILTER] = Field(
        description="prompts generated at a time by dynamic sampling (algorithm.filter_groups); "
        "null = train_batch_size"
    )
    val_batch_size: Annotated[Count | None, NO_VALIDATION] = Field(
        description="prompts per validation batch; null = all"
    )
    max_prompt_length: Count = Field(description="longest prompt in tokens, chat template included")
    max_response_length: Count = Field(description="longest response in tokens")
    prompt_key: Text = Field(description="column with the chat (a list of {role, content})")
    reader: Text | None = Field(
        description="reader of files in another format: chats (conversations, for sft), "
        "dataset_class (your class) or module:Name; null = rows of prompts"
    )
    reader_params: dict[str, Any] = Field(description="settings of the reader")
    response_key: Text = Field(description="dotted path to the worked solution, for sft")
    chosen_key: Text = Field(description="dotted path to the preferred response of a pair")
    rejected_key: Text = Field(description="dotted path to the other response of a pair")
    reward_fn_key: Text = Field(
        description="column with the data source, which selects the scorer and validation group"
    )
    image_key: Text = Field(
        description="column with the images of a row, to which <image> in its prompt refers"
    )
    shuffle: bool = Field(description="shuffle the training prompts in each epoch")
    seed: Annotated[Seed, UnusedIf({".shuffle": False})] = Field(
        description="seed of the data order"
    )
    filter_overlong_prompts: bool = Field(
        description="drop and count prompts longer than max_prompt_length"
    )
    truncation: Annotated[Literal["error", "left", "right", "middle"], _FILTERED] = Field(
        description="treatment of overlong prompts that were not dropped"
    )
    skip_invalid: bool = Field(
        description="leave out training rows that cannot be used, and count them by reason: null, "
        "empty, of a wrong type, rejected by the chat template, or too long"
    )
    train_max_samples: CountOrAll = Field(description="limit of training prompts; -1 = all")
    val_max_samples: Annotated[CountOrAll, NO_VALIDATION] = Field(
        description="limit of validation prompts; -1 = all"
    )
    apply_chat_template_kwargs: dict[str, Any] = Field(
        description="extra variables for the chat template, such as {enable_thinking: false}"
    )
    sampler: Text = Field(
        description="order of the prompts: random, sequential, by scores (curriculum, thompson), "
        "or `module:Name`"
    )
    sampler_params: dict[str, Any] = Field(description="settings of the sampler")

    @property
    def train_paths(self) -> tuple[str, ...]:
        """Training files without their weights."""
        return tuple(
            file.path if isinstance(file, WeightedFile) else file for file in self.train_files
        )

    @property
    def train_weights(self) -> tuple[float, ...] | None:
        """Weights of the training files; None if none has one. ConfigError if some have none."""
        weights = [file.weight for file in self.train_files if isinstance(file, WeightedFile)]
        if not weights:
            return None
        if len(weights) < len(self.train_files):
            raise ConfigError(
                "some training files have a weight, others have none",
                where="data.train_files",
                hint="give each file a weight: {path: FILE, weight: NUMBER}",
            )
        if self.train_max_samples >= 0:
            raise ConfigError(
                "data.train_max_samples does not combine with the weights of files",
                where="data.train_files",
                hint="leave it out: weights are shares of the prompts that are drawn",
            )
        return tuple(weights)
