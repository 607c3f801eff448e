"""Section `reward`: scoring of responses by functions, a judge or a model."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from rlctl.recipes.schema.fields import (
    NO_REWARD_MODEL,
    Count,
    Floats,
    Fraction,
    NonNegativeInt,
    Not,
    PositiveFloat,
    ProcessLimits,
    Section,
    Share,
    Text,
    Texts,
    UnusedIf,
)
from rlctl.recipes.schema.model import FSDP, Model, Optim


class RewardModel(Section):
    """Settings of `reward.reward_model`."""

    enable: bool = Field(description="score responses with a model")
    model: Model
    weight: float = Field(
        description="weight of the model's score in the score of a response", allow_inf_nan=False
    )
    rule_weight: float = Field(
        description="weight of the reward functions' score; 0 = only report it, as the component "
        "`rule`",
        allow_inf_nan=False,
    )
    normalize: Literal["running", "model"] | None = Field(
        description="subtract a mean from the model's score and divide by a deviation: running = "
        "those of all responses so far, model = those that `train rm` wrote into its config.json; "
        "null = off"
    )
    max_length: Count | None = Field(
        description="longest conversation in tokens of the reward model, cut at its start; null = "
        "the model's context"
    )
    use_dynamic_bsz: bool = Field(
        description="fill micro-batches up to the token budget, sorted by length"
    )
    micro_batch_size_per_gpu: Annotated[Count | None, UnusedIf({".use_dynamic_bsz": True})] = Field(
        description="rows per forward pass and rank if use_dynamic_bsz is false; "
        "null = by token budget"
    )
    forward_max_token_len_per_gpu: Count = Field(description="token budget of a micro-batch")
    fsdp_config: FSDP
    optim: Optim
    ppo_mini_batch_size: Count = Field(
        description="pairs per update of `train rm`; divides data.train_batch_size"
    )
    grad_clip: PositiveFloat = Field(description="maximum gradient norm of `train rm`")


_CUSTOM = UnusedIf({"reward.custom_reward_function.path": Not(None)})


class CustomRewardFunction(Section):
    """A reward function in a Python file."""

    path: Text | None = Field(
        description="Python file with a reward function; null = use reward.functions"
    )
    name: Annotated[Text, UnusedIf({".path": None})] = Field(
        description="name of the function in that file"
    )
    reward_kwargs: Annotated[dict[str, Any], UnusedIf({".path": None})] = Field(
        description="extra keyword arguments of the function"
    )


class JudgeModel(Section):
    """The model of a judge that the run serves itself."""

    path: Text | None = Field(
        description="model: folder, address, hub name, or `quickstart`; null = no engine"
    )


class JudgeRollout(Section):
    """The engines of that judge."""

    name: Text = Field(description="engine: auto, vllm, hf, …")
    num_engines: Count = Field(
        description="engines in a separate pool, with a GPU each beside those of the trainer"
    )
    max_num_seqs: Count = Field(description="replies that an engine writes at a time")
    gpu_memory_utilization: Share = Field(description="share of the GPU's memory of an engine")
    prompt_length: Count = Field(description="limit of a message to the judge, in tokens")
    response_length: Count = Field(description="limit of a reply, in tokens")


class Judge(Section):
    """A judge that the run serves itself."""

    model: JudgeModel
    rollout: JudgeRollout


class Reward(Section):
    """Settings of `reward`."""

    functions: Annotated[Texts | None, _CUSTOM] = Field(
        description="reward functions for all rows: names, `module:function` or "
        "`file.py:function`; null = the scorer of each row's data source"
    )
    weights: Annotated[Floats | None, _CUSTOM, UnusedIf({".functions": None})] = Field(
        description="one weight per function; null = 1 each"
    )
    params: Annotated[dict[str, dict[str, Any]], _CUSTOM] = Field(
        description="settings per reward function, such as {gsm8k: {method: flexible}}"
    )
    timeout_s: PositiveFloat = Field(
        description="timeout of one call, of one request of a judge, and of the first import of "
        "reward code, in seconds; a response that exceeds it has failed"
    )
    failed: Literal["zero", "drop"] = Field(
        description="use of a response whose call failed: zero = train on it with the score 0, "
        "drop = do not train on it"
    )
    max_failed_share: Fraction = Field(
        description="share of the responses of a batch whose calls may fail; the run ends above it"
    )
    max_failed_steps: Count | None = Field(
        description="steps in a row in which the reward of every response fails, after which the "
        "run ends; null = never"
    )
    overlap: bool = Field(
        description="score finished responses while others are generated; without effect for "
        "scorers that run in the controller"
    )
    num_processes: Count | None = Field(description="scoring processes; null = one per core")
    env: Texts = Field(
        description="environment variables for reward code besides the usual ones, such as "
        "OPENAI_API_KEY"
    )
    limits: ProcessLimits
    custom_reward_function: CustomRewardFunction
    max_concurrent: Count = Field(
        description="calls of async functions at a time, or requests of a judge"
    )
    max_rpm: Count | None = Field(description="such calls or requests per minute; null = no limit")
    max_tpm: Count | None = Field(description="tokens of those per minute; null = no limit")
    estimated_tokens_per_request: Count = Field(
        description="tokens of a call of an async function for max_tpm; a judge counts its tokens"
    )
    max_retries: NonNegativeInt = Field(
        description="further attempts of a judge's request after 429, a server error or a timeout"
    )
    cache: bool = Field(description="keep the replies to a judge's requests, and use them again")
    cache_path: Text | None = Field(
        description="file of that cache, which runs may share; null = in the run's folder"
    )
    judge: Judge
    reward_model: Annotated[RewardModel, NO_REWARD_MODEL]
