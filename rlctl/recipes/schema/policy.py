"""`actor_rollout_ref`: the model, its training, rollout and frozen reference. The critic reuses model, optimizer and FSDP."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from rlctl.recipes.schema.fields import (
    Count,
    CountOrAll,
    Fraction,
    KLKind,
    LossAggregation,
    NonNegativeFloat,
    NonNegativeInt,
    Pair,
    PositiveFloat,
    Section,
    Share,
    Text,
    Texts,
)


class Model(Section):
    path: Text = Field(
        description="folder, address (s3://…) or hub name of the model, or `quickstart`"
    )
    tokenizer_path: Text | None = Field(
        description="folder, address or hub name of the tokenizer; null = the model's"
    )
    init: Literal["auto", "random"] = Field(
        description="auto = load the weights; random = build from config.json with seeded random weights"
    )
    trust_remote_code: bool = Field(
        description="let the model's repository run its own Python code"
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        description="type of computation; auto = bfloat16 on a GPU that has it, float32 on a CPU"
    )
    enable_gradient_checkpointing: bool = Field(
        description="recompute activations in the backward pass: less memory, more time"
    )
    use_remove_padding: bool = Field(
        description="pack rows without padding where the attention allows it"
    )
    lora_rank: NonNegativeInt = Field(
        description="rank of the LoRA adapters; 0 = train all weights"
    )
    lora_alpha: Count = Field(description="LoRA scale: the adapters count lora_alpha / lora_rank")
    target_modules: Texts = Field(
        description="modules that get adapters, by name; all-linear = every linear layer but the head"
    )


class Optim(Section):
    lr: NonNegativeFloat = Field(description="peak learning rate of AdamW")
    weight_decay: NonNegativeFloat = Field(description="decoupled weight decay")
    betas: Pair = Field(description="AdamW's decay rates of the first and second moment")
    lr_warmup_steps: Annotated[int, Field(ge=-1)] = Field(
        description="steps of linear warm-up; -1 or 0 = by lr_warmup_steps_ratio"
    )
    lr_warmup_steps_ratio: Fraction = Field(
        description="warm-up as a share of all steps, where lr_warmup_steps is not set"
    )
    lr_scheduler_type: Literal["constant", "cosine", "linear"] = Field(
        description="course of the learning rate after the warm-up"
    )
    min_lr_ratio: Fraction = Field(
        description="learning rate at the end, as a share of lr; for cosine and linear"
    )


class FSDP(Section):
    param_offload: bool = Field(
        description="keep the parameters in host memory while they are not in use"
    )
    optimizer_offload: bool = Field(
        description="keep the optimizer's state in host memory while it is not in use"
    )
    reshard_after_forward: bool = Field(
        description="free gathered parameters after the forward pass: less memory, one gather more"
    )
    fsdp_size: CountOrAll = Field(
        description="ranks that share one copy of the parameters; -1 = all"
    )
    model_dtype: Literal["fp32", "bf16", "fp16"] = Field(
        description="type in which the trained parameters are kept"
    )


class FrozenFSDP(Section):
    param_offload: bool = Field(
        description="keep the parameters in host memory while they are not in use"
    )
    reshard_after_forward: bool = Field(
        description="free gathered parameters after the forward pass: less memory, one gather more"
    )
    fsdp_size: CountOrAll = Field(
        description="ranks that share one copy of the parameters; -1 = all"
    )
    model_dtype: Literal["fp32", "bf16", "fp16"] = Field(
        description="type in which the frozen parameters are kept"
    )


class PolicyLoss(Section):
    loss_mode: Text = Field(
        description="policy loss by name: vanilla, gspo, cispo, … or a plug-in `module:name`"
    )
    params: dict[str, Any] = Field(description="settings of the policy loss")
    clip_cov_ratio: Share = Field(description="clip_cov: share of tokens that get no gradient")
    clip_cov_lb: float = Field(
        description="clip_cov: only tokens with a larger covariance are drawn", allow_inf_nan=False
    )
    clip_cov_ub: float = Field(
        description="clip_cov: only tokens with a smaller covariance are drawn", allow_inf_nan=False
    )
    kl_cov_ratio: Share = Field(
        description="kl_cov: share of tokens, those of the largest covariance, that pay a KL penalty"
    )
    ppo_kl_coef: NonNegativeFloat = Field(description="kl_cov: weight of that penalty")
    dro_beta: NonNegativeFloat = Field(
        description="dro: weight β of the quadratic penalty on the log-ratio"
    )


class Actor(Section):
    strategy: Literal["fsdp2"] = Field(description="how the trained model is spread over ranks")
    ppo_mini_batch_size: Count = Field(
        description="prompts an update; divides data.train_batch_size"
    )
    ppo_micro_batch_size_per_gpu: Count | None = Field(
        description="rows in one forward pass of a rank, where use_dynamic_bsz is false; null = by token budget"
    )
    use_dynamic_bsz: bool = Field(
        description="fill micro-batches by the token budget, sorted by length"
    )
    ppo_max_token_len_per_gpu: Count = Field(
        description="token budget of a micro-batch, prompt and answer"
    )
    ppo_epochs: Count = Field(description="passes over the rollouts of a step")
    shuffle: bool = Field(description="shuffle rows into mini-batches anew in each pass")
    data_loader_seed: NonNegativeInt = Field(description="seed of that shuffle")
    clip_ratio: NonNegativeFloat = Field(
        description="PPO's clip range ε where low and high are not set"
    )
    clip_ratio_low: Fraction | None = Field(description="lower clip range; null = clip_ratio")
    clip_ratio_high: NonNegativeFloat | None = Field(
        description="upper clip range (DAPO's clip-higher); null = clip_ratio"
    )
    clip_ratio_c: Annotated[float, Field(gt=1)] = Field(
        description="bound of the dual clip for negative advantages"
    )
    tau_pos: PositiveFloat = Field(
        description="sapo: temperature of the soft gate for positive advantages"
    )
    tau_neg: PositiveFloat = Field(description="sapo: temperature of the soft gate for the others")
    loss_agg_mode: LossAggregation = Field(description="how token losses become one number")
    loss_scale_factor: PositiveFloat | None = Field(
        description="divisor of seq-mean-token-sum-norm; null = data.max_response_length"
    )
    policy_loss: PolicyLoss
    entropy_coeff: float = Field(description="weight of the entropy bonus", allow_inf_nan=False)
    use_kl_loss: bool = Field(description="add the KL to the reference to the loss")
    kl_loss_coef: NonNegativeFloat = Field(description="weight of that KL")
    kl_loss_type: KLKind = Field(description="estimator of that KL")
    grad_clip: PositiveFloat = Field(description="largest norm of the gradient")
    optim: Optim
    fsdp_config: FSDP
    tensor_parallel_size: Count = Field(description="ranks that share each layer's matrices")
    context_parallel_size: Count = Field(description="ranks that share each row's tokens")


class ValKwargs(Section):
    temperature: NonNegativeFloat = Field(
        description="sampling temperature in validation; 0 = greedy"
    )
    top_p: Share = Field(description="nucleus sampling in validation; 1 = off")
    top_k: Annotated[int, Field(ge=-1)] = Field(
        description="sample from the k likeliest tokens in validation; -1 or 0 = off"
    )
    n: Count = Field(description="answers a validation prompt")
    do_sample: bool = Field(
        description="sample in validation; false = greedy, whatever the temperature"
    )


class MultiTurn(Section):
    enable: bool = Field(description="let the model call tools and go on")
    max_assistant_turns: Count | None = Field(
        description="most turns of the model; null = as many as fit"
    )
    max_user_turns: Count | None = Field(description="most answers of tools; null = as many as fit")
    max_parallel_calls: Count = Field(description="most tool calls in one turn")
    max_tool_response_length: Count = Field(description="longest answer of a tool, in characters")
    tool_response_truncate_side: Literal["left", "middle", "right"] = Field(
        description="which part of a longer answer is cut"
    )
    tool_config_path: Text | None = Field(description="YAML or Python file that lists the tools")
    format: Text = Field(description="syntax of tool calls")


class CheckpointEngine(Section):
    backend: Literal["auto", "object_store", "nccl", "gloo"] = Field(
        description="how weights go to engines of a pool of their own; auto = nccl between GPUs, Ray's object store on CPUs"
    )
    update_weights_bucket_megabytes: Count = Field(
        description="so much of the weights is on its way at a time, in MiB"
    )


class Rollout(Section):
    name: Text = Field(description="engine: auto, hf, vllm, sglang or a plug-in")
    params: dict[str, Any] = Field(description="settings of the engine plug-in")
    mode: Literal["sync", "async"] = Field(
        description="engines of a pool of their own answer sync = parts of a batch, async = prompt by prompt"
    )
    seed: NonNegativeInt | None = Field(description="seed of the sampling; null = trainer.seed")
    temperature: PositiveFloat = Field(description="sampling temperature")
    top_p: Share = Field(
        description="sample from the likeliest tokens that hold this share; 1 = off"
    )
    top_k: Annotated[int, Field(ge=-1)] = Field(
        description="sample from the k likeliest tokens; -1 or 0 = off"
    )
    n: Count = Field(description="answers a prompt")
    tensor_model_parallel_size: Count = Field(description="ranks that share one engine")
    gpu_memory_utilization: Share = Field(
        description="share of device memory that the engine may take"
    )
    max_num_seqs: Count = Field(description="most rows that are decoded at the same time")
    max_num_batched_tokens: Count = Field(description="most tokens in one pass of the engine")
    enforce_eager: bool = Field(description="no CUDA graphs: quicker start, slower decoding")
    free_cache_engine: bool = Field(description="give the engine's memory back while training runs")
    log_prob_micro_batch_size_per_gpu: Count | None = Field(
        description="rows in one pass of the old log-probs; null = by token budget"
    )
    log_prob_max_token_len_per_gpu: Count = Field(description="token budget of the old log-probs")
    checkpoint_engine: CheckpointEngine
    engine_kwargs: dict[str, Any] = Field(
        description="further arguments of the engine's constructor, passed on as they are"
    )
    val_kwargs: ValKwargs
    multi_turn: MultiTurn


class Ref(Section):
    log_prob_micro_batch_size_per_gpu: Count | None = Field(
        description="rows in one pass of the reference; null = by token budget"
    )
    log_prob_max_token_len_per_gpu: Count = Field(description="token budget of the reference")
    fsdp_config: FrozenFSDP


class ActorRolloutRef(Section):
    model: Model
    actor: Actor
    rollout: Rollout
    ref: Ref
