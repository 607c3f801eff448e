"""Parts of verl that rlctl lacks, each with one sentence for the error."""

from __future__ import annotations

from rlctl.recipes.verl.rules import Feature

_FSDP = "use verl's FSDP configuration (ppo_trainer) of the same experiment"

MEGATRON = Feature(
    "these settings of Megatron are not supported: rlctl shards models by FSDP2", "remove them"
)
OTHER_BACKEND = Feature(
    "training with VeOmni, TorchTitan, AutoModel or MindSpeed is not supported: "
    "rlctl shards models by FSDP2",
    _FSDP,
)
NPU = Feature("Ascend NPUs are not supported", "set trainer.device=auto to use GPUs or the CPU")
IMAGES = Feature(
    "images, videos and audio are not supported: rlctl trains language models on text",
    "use a text model and text prompts",
)
AGENT_LOOPS = Feature(
    "classes of agent loops and of servers are not supported",
    "write the episode as an environment: actor_rollout_ref.rollout.agent.environment=module:Class",
)
REWARD_STRATEGY = Feature(
    "reward models run under FSDP2 only",
    "reward_model.strategy=fsdp2, with a transformers classifier in reward_model.model.path",
)
GENERATIVE_REWARD = Feature(
    "verl's configurations of generative reward models are not supported",
    "score with a judge, or with a classifier: reward.reward_model.enable=true",
)
PRIME = Feature(
    "PRIME's implicit process reward model is not supported: rewards come from functions",
    "remove these keys and score with reward.functions",
)
PROFILER = Feature(
    "verl's profilers nsys, npu, torch_memory and precision_debugger are not supported",
    "use torch's: trainer.profile.steps=[2] (docs/troubleshooting.md)",
)
ASYNC = Feature(
    "fully asynchronous training is not supported",
    "async_training.max_staleness=1 trains one step off; trainer.placement.rollout=POOL gives the "
    "rollout engines devices of their own",
)
DISTILLATION = Feature(
    "these settings of verl's distillation are not supported",
    "rlctl train distill +distillation.teacher_models.NAME.model_path=TEACHER",
)
DISTILLATION_LOSS = Feature(
    "this loss of verl's distillation is not supported",
    "distillation.distillation_loss.loss_mode=k1 with use_policy_gradient=true, or "
    "forward_kl_topk with use_policy_gradient=false",
)
QUANTIZATION = Feature(
    "quantized training and rollouts (QAT, fp8) are not supported",
    "remove these keys; actor_rollout_ref.model.dtype sets the compute dtype",
)
MTP = Feature(
    "multi-token prediction and speculative decoding are not supported", "remove these keys"
)
SPIN = Feature(
    "SPIN's and SPPO's online preference losses are not supported",
    "algorithm.name=module:Name selects an algorithm of your own",
)
TENSORRT = Feature(
    "TensorRT-LLM is not supported as a rollout engine",
    "actor_rollout_ref.rollout.name=vllm, sglang or hf",
)
DATASET_CODE = Feature(
    "dataset classes of your own are not supported",
    "`rlctl prep jsonl` converts other formats; data.sampler=module:Name sets the order",
)
SKIPPED_ROLLOUTS = Feature("rollouts from a cache (skip) are not supported", "remove these keys")
OVER_SAMPLING = Feature(
    "over-sampling of rollouts (over_sample_rate, partial rollouts) is not supported",
    "algorithm.filter_groups.enable=true resamples groups with equal scores",
)
MULTI_TURN_SFT = Feature(
    "fine-tuning on multi-turn conversations is not supported: a row has one prompt and one "
    "response",
    "set data.prompt_key and data.response_key of a single-turn file",
)
REWARD_BATCH = Feature(
    "the reward managers that score whole batches are not supported: a reward function scores one "
    "response",
    "reward.custom_reward_function.path=FILE with "
    "compute_score(data_source, solution_str, ground_truth, extra_info)",
)
REWARD_CODE = Feature(
    "reward managers of your own are not supported",
    "reward.functions=[module:function] or reward.custom_reward_function.path=FILE",
)
