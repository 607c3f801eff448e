"""Sections `actor_rollout_ref` and `critic`: models, training, rollout, frozen reference."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from rlctl.recipes.schema.agents import Agent, MultiTurn
from rlctl.recipes.schema.fields import (
    NO_ENGINE_POOL,
    NO_VALIDATION,
    Count,
    LossAggregation,
    NonNegativeFloat,
    Not,
    PositiveFloat,
    Section,
    Seed,
    Share,
    Text,
    UnusedIf,
)
from rlctl.recipes.schema.model import FSDP, Model, Optim

MOST_OF_A_GPU = 0.9  # fraction of its memory for an engine; CUDA and NCCL need the rest

_BY_ROWS = UnusedIf({".use_dynamic_bsz": False, ".ppo_micro_batch_size_per_gpu": Not(None)})
_BY_TOKENS = UnusedIf({".log_prob_use_dynamic_bsz": True})
_CLIP_RANGE = UnusedIf({".clip_ratio_low": Not(None), ".clip_ratio_high": Not(None)})
_OTHER_AGGREGATION = UnusedIf({".loss_agg_mode": Not("seq-mean-token-sum-norm")})
_REINFORCE = UnusedIf(
    {
        "algorithm.rollout_correction.bypass_mode": True,
        "algorithm.rollout_correction.loss_type": "reinforce",
    }
)
_GREEDY = UnusedIf({".do_sample": False})
_OBJECT_STORE = UnusedIf({".backend": "object_store"})
_ENGINE_POOL = UnusedIf({"trainer.placement.rollout": Not(None)})
_NO_EPISODES = UnusedIf({".multi_turn.enable": False})
_NO_ADAPTERS = UnusedIf({"actor_rollout_ref.model.lora_rank": 0})
_DORA = UnusedIf({"actor_rollout_ref.model.use_dora": True})
# With adapters, the actor's base model is the reference.
_ADAPTER_BASE = UnusedIf(
    {".model.lora_rank": Not(0)},
    (
        ("trainer.placement.actor", "trainer.placement.reference"),
        ("actor_rollout_ref.model.path", "actor_rollout_ref.ref.model.path"),
    ),
)


class PolicyLoss(Section):
    """The policy loss and its settings."""

    loss_mode: Annotated[Text, _REINFORCE] = Field(
        description="policy loss: vanilla, gspo, cispo, … or `module:name`"
    )
    params: Annotated[dict[str, Any], _REINFORCE] = Field(description="settings of the policy loss")


class Updates(Section):
    """Mini-batches and micro-batches of a role that learns from rollouts."""

    ppo_mini_batch_size: Count = Field(
        description="prompts per update; divides data.train_batch_size"
    )
    ppo_micro_batch_size_per_gpu: Annotated[Count | None, UnusedIf({".use_dynamic_bsz": True})] = (
        Field(
            description="rows per forward pass and rank if use_dynamic_bsz is false; "
            "null = by token budget"
        )
    )
    use_dynamic_bsz: bool = Field(
        description="fill micro-batches up to the token budget, sorted by length"
    )
    ppo_max_token_len_per_gpu: Annotated[Count, _BY_ROWS] = Field(
        description="token budget of a micro-batch, prompts and responses"
    )
    ppo_epochs: Count = Field(description="passes over the rollout batch per step")
    shuffle: bool = Field(description="shuffle rows into new mini-batches in each pass")
    data_loader_seed: Annotated[Seed, UnusedIf({".shuffle": False})] = Field(
        description="seed of the mini-batch shuffle"
    )


class RouterReplay(Section):
    """Choice of experts of a mixture in training."""

    mode: Literal["disabled", "R2", "R3"] = Field(
        description="experts of tokens in updates of a mixture: disabled = chosen again in each "
        "pass, R2 = those of the pass for old log-probs, R3 = those of the rollout engine"
    )


class Actor(Updates):
    """Training of the policy."""

    clip_ratio: Annotated[NonNegativeFloat, _CLIP_RANGE, _REINFORCE] = Field(
        description="PPO's clip range ε, if clip_ratio_low and clip_ratio_high are null"
    )
    clip_ratio_low: Annotated[NonNegativeFloat | None, _REINFORCE] = Field(
        description="lower clip range; null = clip_ratio, 1 or more = no lower bound"
    )
    clip_ratio_high: Annotated[NonNegativeFloat | None, _REINFORCE] = Field(
        description="upper clip range (DAPO's clip-higher); null = clip_ratio"
    )
    clip_ratio_c: Annotated[float, Field(gt=1), _REINFORCE] = Field(
        description="ratio bound of the dual clip for negative advantages"
    )
    loss_agg_mode: LossAggregation = Field(description="aggregation of token losses")
    loss_scale_factor: Annotated[PositiveFloat | None, _OTHER_AGGREGATION] = Field(
        description="divisor of seq-mean-token-sum-norm; null = data.max_response_length"
    )
    policy_loss: PolicyLoss
    entropy_coeff: float = Field(
        description="coefficient of the entropy bonus", allow_inf_nan=False
    )
    use_kl_loss: bool = Field(description="add the KL to the reference to the loss")
    kl_loss_coef: Annotated[NonNegativeFloat, UnusedIf({".use_kl_loss": False})] = Field(
        description="coefficient of the KL in the loss"
    )
    kl_loss_type: Annotated[Text, UnusedIf({".use_kl_loss": False})] = Field(
        description="estimator of the KL in the loss: kl, abs, mse, low_var_kl, …"
    )
    grad_clip: PositiveFloat = Field(description="maximum gradient norm")
    freeze_vision_tower: bool = Field(
        description="train the language model alone, not the part of a vision-language model that "
        "reads images; towers of critics are always frozen"
    )
    use_torch_compile: bool | None = Field(
        description="compile the decoder layers of actor, reference and critic: faster passes "
        "after a longer first step; null = on GPUs, for whole dense layers without adapters, with "
        "a compiler"
    )
    router_replay: RouterReplay
    optim: Optim
    fsdp_config: FSDP


class ValKwargs(Section):
    """Sampling of validation responses."""

    temperature: Annotated[NonNegativeFloat, _GREEDY] = Field(
        description="sampling temperature in validation; 0 = greedy"
    )
    top_p: Annotated[Share, _GREEDY] = Field(description="nucleus sampling in validation; 1 = off")
    top_k: Annotated[int, Field(ge=-1), _GREEDY] = Field(
        description="top-k sampling in validation; -1 or 0 = off"
    )
    n: Count = Field(description="responses per validation prompt")
    do_sample: bool = Field(description="sample in validation; false = greedy at any temperature")


class CheckpointEngine(Section):
    """Weight sync to rollout engines in a separate pool."""

    backend: Literal["auto", "object_store", "nccl", "gloo"] = Field(
        description="transport of the weight sync to a rollout pool; auto = nccl between GPUs, "
        "gloo between CPUs; object_store = Ray's object store"
    )
    update_weights_bucket_megabytes: Count | None = Field(
        description="size of one weight sync transfer, in MiB; null = 1024 on GPUs, 32 on CPUs"
    )
    only_changes: Annotated[bool, _OBJECT_STORE] = Field(
        description="send between machines only the values that have changed, as few do in "
        "bfloat16; each engine and rank keeps what it gets or sends in host memory"
    )


class Rollout(Section):
    """Generation of responses."""

    name: Text = Field(description="engine: auto, hf, vllm, vllm_server, sglang or `module:Name`")
    params: dict[str, Any] = Field(description="settings of the engine plug-in")
    seed: Seed | None = Field(description="sampling seed; null = trainer.seed")
    temperature: PositiveFloat = Field(description="sampling temperature")
    top_p: Share = Field(description="nucleus sampling: probability mass to keep; 1 = off")
    top_k: Annotated[int, Field(ge=-1)] = Field(
        description="top-k sampling: tokens to keep; -1 or 0 = off"
    )
    n: Count = Field(description="responses per prompt")
    tensor_model_parallel_size: Count = Field(description="ranks that share one engine")
    gpu_memory_utilization: Share | None = Field(
        description="fraction of device memory available to the engine; null = 0.9 if it is alone "
        "on a GPU, else 0.5"
    )
    max_num_seqs: Count | None = Field(
        description="maximum rows decoded concurrently; null = the engine's default"
    )
    max_num_batched_tokens: Count | None = Field(
        description="maximum tokens per engine pass; null = the engine's default"
    )
    enforce_eager: bool = Field(description="disable CUDA graphs: faster start, slower decoding")
    free_cache_engine: Annotated[bool, _ENGINE_POOL] = Field(
        description="release engine memory during training"
    )
    log_prob_micro_batch_size_per_gpu: Annotated[Count | None, _BY_TOKENS] = Field(
        description="rows per pass of the old log-probs; null = by token budget"
    )
    log_prob_max_token_len_per_gpu: Count = Field(
        description="token budget per pass of the old log-probs"
    )
    log_prob_use_dynamic_bsz: bool = Field(
        description="fill passes of the old log-probs up to the token budget"
    )
    lora_merge: Annotated[bool | None, _NO_ADAPTERS, _DORA] = Field(
        description="send LoRA adapters merged into the weights; false = send adapters alone to "
        "engines that compute them (vllm); null = merged on a CPU, where generation is then faster"
    )
    checkpoint_engine: Annotated[CheckpointEngine, NO_ENGINE_POOL]
    engine_kwargs: dict[str, Any] = Field(
        description="extra arguments of the engine's constructor, passed unchanged"
    )
    val_kwargs: Annotated[ValKwargs, NO_VALIDATION]
    multi_turn: Annotated[MultiTurn, _NO_EPISODES]
    agent: Annotated[Agent, _NO_EPISODES]

    @property
    def is_client(self) -> bool:
        """True if engines are clients of running servers, which `engine_kwargs.url` names."""
        return self.engine_kwargs.get("url") is not None

    def memory_fraction(self, alone: bool) -> float:
        """Return the fraction of a device for the engine, which may be `alone` on a GPU."""
        if alone:
            return self.gpu_memory_utilization or MOST_OF_A_GPU
        return self.gpu_memory_utilization or 0.5


class RefModel(Section):
    """Model of the reference; further settings are those of the actor's model."""

    path: Text = Field(
        description="model of the reference or teacher: folder, address, hub name, or `quickstart`"
    )
    tokenizer_path: Text | None = Field(
        description="its tokenizer, which must be the actor's; null = the model's"
    )
    trust_remote_code: bool = Field(description="run Python code of the model's repository")
    override_config: dict[str, Any] = Field(
        description="values that replace those of the model's config.json"
    )


class Ref(Section):
    """The frozen reference policy, or the teacher of a distillation."""

    model: RefModel
    log_prob_micro_batch_size_per_gpu: Annotated[Count | None, _BY_TOKENS] = Field(
        description="rows per pass of the reference; null = by token budget"
    )
    log_prob_max_token_len_per_gpu: Count = Field(
        description="token budget per pass of the reference"
    )
    log_prob_use_dynamic_bsz: bool = Field(
        description="fill passes of the reference up to the token budget"
    )
    fsdp_config: FSDP


class ActorRolloutRef(Section):
    """Settings of `actor_rollout_ref`."""

    model: Model
    actor: Actor
    rollout: Rollout
    ref: Annotated[Ref, _ADAPTER_BASE]

    @property
    def reference_model(self) -> Model:
        """The reference's model, the actor's initial one unless `ref.model` names another."""
        model = self.ref.model
        settings: dict[str, Any] = {
            "path": model.path,
            "tokenizer_path": model.tokenizer_path,
            "trust_remote_code": model.trust_remote_code,
            "override_config": model.override_config,
        }
        if model.path != self.model.path:
            settings |= {"init": "auto", "lora_rank": 0}
        return self.model.model_copy(update=settings)


class Critic(Updates):
    """Settings of `critic`."""

    model: Model
    optim: Optim
    cliprange_value: PositiveFloat = Field(
        description="value change above which the value loss is clipped"
    )
    loss_agg_mode: LossAggregation = Field(description="aggregation of token losses")
    grad_clip: PositiveFloat = Field(description="maximum gradient norm")
    fsdp_config: FSDP
