"""verl's published commands compose unchanged; every key of verl is known."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from rlctl.errors import ConfigError, NotFoundError, Problem, RlctlError
from rlctl.plugins.bridges.verl.config_names import recipe_of
from rlctl.recipes.compose import compose

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
REF = "actor_rollout_ref.ref"

COMMANDS = json.loads((Path(__file__).parents[2] / "data" / "verl_commands.json").read_text())


def overrides_of(args: list[str]) -> list[str]:
    """Return the overrides of a published command, with files in place of its variables."""
    files = {"TRAIN": "t.parquet", "TEST": "v.parquet", "MODEL": "m", "REWARD": "r.py"}
    return [
        re.sub(r"\b(TRAIN|TEST|MODEL|REWARD)\b", lambda match: files[match[1]], arg)
        for arg in args
        if not arg.startswith("--config")
    ]


@pytest.mark.parametrize(
    ("script", "estimator", "n"),
    [
        ("gmpo_trainer/run_qwen2_5-7b_math", "grpo", 5),
        ("reinforce_plus_plus_trainer/run_qwen2-7b_math_rf", "reinforce_plus_plus", 8),
    ],
)
def test_command_composes(script: str, estimator: str, n: int) -> None:
    (args,) = (each["args"] for each in COMMANDS if each["script"] == f"examples/{script}.sh")
    words = overrides_of(args)
    recipe = compose("ppo_trainer", words)
    config = recipe.config
    assert {each.kind for each in recipe.foreign} <= {"dropped", "renamed"}
    assert recipe.unused == []
    assert (config.algorithm.adv_estimator, config.actor_rollout_ref.rollout.n) == (estimator, n)
    assert config.trainer.logger == ("console", "wandb")
    assert config.actor_rollout_ref.ref.fsdp_config.param_offload is True
    implied = {notice.partition("=")[0] for notice in recipe.notices if "as in verl" in notice}
    assert f"{ACTOR}.ppo_micro_batch_size_per_gpu" in implied
    assert config.actor_rollout_ref.actor.use_dynamic_bsz is False
    places = {chain[-1].where for chain in recipe.origins.values() if chain[-1].level == 3}
    dropped = {each.key for each in recipe.foreign if each.kind == "dropped"}
    kept = [word for word in words if word.partition("=")[0] not in dropped]
    assert places == {f"override {word}" for word in kept}


def test_megatron_command_composes_under_fsdp() -> None:
    mesh = [f"{role}.megatron.{key}=2" for role in (ACTOR, "actor_rollout_ref.ref", "critic")
            for key in ("tensor_model_parallel_size", "context_parallel_size",
                        "pipeline_model_parallel_size")]  # fmt: skip
    recipe = compose(
        "ppo_trainer",
        [
            "data.train_files=quickstart",
            "actor_rollout_ref.model.path=quickstart",
            *mesh,
            f"{ACTOR}.strategy=megatron",
            f"{ACTOR}.megatron.param_offload=true",
            f"{ACTOR}.megatron.use_mbridge=true",
            f"+{ACTOR}.megatron.override_transformer_config.recompute_granularity=full",
            f"+{ACTOR}.optim.override_optimizer_config.optimizer_cpu_offload=true",
            f"{ACTOR}.optim.lr_decay_style=cosine",
            "actor_rollout_ref.model.lora.rank=8",
            "+actor_rollout_ref.model.override_config.model_config.rope_theta=10000",
        ],
    )
    policy = recipe.config.actor_rollout_ref
    assert policy.actor.fsdp_config.param_offload
    assert policy.actor.optim.lr_scheduler_type == "cosine"
    assert policy.model.lora_rank == 8
    assert policy.model.override_config == {"rope_theta": 10000}
    for fsdp in (
        policy.actor.fsdp_config,
        policy.ref.fsdp_config,
        recipe.config.critic.fsdp_config,
    ):
        assert (fsdp.tensor_model_parallel_size, fsdp.ulysses_sequence_parallel_size) == (2, 2)
        assert fsdp.pipeline_model_parallel_size == 2


def only(*overrides: str, recipe: str = "ppo") -> Problem:
    """The only problem of a configuration."""
    with pytest.raises(ConfigError) as caught:
        compose(recipe, overrides)
    [problem] = caught.value.problems
    return problem


@pytest.mark.parametrize(
    ("override", "works"),
    [
        (f"{ROLLOUT}.dtype=float16", "model.dtype=float16"),
        (f"{ACTOR}.optim.total_training_steps=9", "trainer.total_training_steps"),
        ("trainer.remove_previous_ckpt_in_save=true", "trainer.max_ckpt_to_keep=1"),
        ("reward_model.reward_kwargs.x=1", "reward.custom_reward_function.reward_kwargs"),
        ("actor_rollout_ref.model.lora_adapter_path=/a", "merge the adapter"),
        (f"{ROLLOUT}.ignore_eos=true", "remove it"),
        (f"{ROLLOUT}.engine_kwargs.sglang.x=1", "server_args"),
    ],
)
def test_setting_that_changes_the_result_is_refused(override: str, works: str) -> None:
    problem = only(override)
    assert problem.message == f"{override} is not supported"
    assert problem.where == f"override {override}"
    assert works in (problem.hint or "")


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        ([f"{ACTOR}.megatron.x=8", f"{ACTOR}.megatron.y.z=1"], "Megatron"),
        ([f"{ACTOR}.megatron.override_transformer_config.fp8=e4m3"], "quantized"),
        (["trainer.device=npu"], "NPU"),
        ([f"{ROLLOUT}.agent.agent_loop_config_path=x"], "agent loops"),
        (["reward_model.strategy=megatron", "reward_model.enable=true"], "under FSDP2 only"),
        (["reward_model.reward_manager=batch"], "score whole batches"),
        (["reward_model.model.update=before", "data.filter_accuracy=true"], "PRIME"),
        (["global_profiler.tool=nsys"], "profilers"),
        (["trainer.v1.trainer_mode=colocate_async"], "asynchronous training"),
        (["data.datagen.path=a.py"], "dataset classes"),
    ],
)
def test_missing_feature_is_one_sentence(overrides: list[str], sentence: str) -> None:
    problem = only(*overrides)
    assert sentence in problem.message
    assert overrides[0] in problem.message
    assert ("and 1 more" in problem.message) == (
        len(overrides) > 1 and sentence in ("Megatron", "PRIME")
    )


# The settings of examples/on_policy_distillation_trainer/run_qwen3_8b_mopd_fsdp.sh at 7804ce3.
DISTILLATION = """
distillation.enabled=True distillation.n_gpus_per_node=4 distillation.nnodes=1
distillation.teacher_key=data_source
+distillation.teacher_models.gsm8k.key="openai/gsm8k"
+distillation.teacher_models.gsm8k.model_path=Qwen/Qwen3-32B
+distillation.teacher_models.gsm8k.num_replicas=1
+distillation.teacher_models.gsm8k.inference.name=vllm
+distillation.teacher_models.gsm8k.inference.tensor_model_parallel_size=2
+distillation.teacher_models.geo3k.key="hiyouga/geometry3k"
+distillation.teacher_models.geo3k.model_path=Qwen/Qwen3-VL-32B-Instruct
distillation.distillation_loss.loss_mode=k1 distillation.distillation_loss.topk=64
distillation.distillation_loss.use_task_rewards=False
distillation.distillation_loss.use_policy_gradient=True
distillation.distillation_loss.loss_max_clamp=10.0
distillation.distillation_loss.log_prob_min_clamp=-10.0
"""
LOSS = "distillation.distillation_loss"


def test_distillation_is_translated() -> None:
    recipe = compose("distill", DISTILLATION.split())
    assert recipe.config.algorithm.params == {
        "teacher_key": "data_source",
        "teacher_models": {
            "gsm8k": {"key": "openai/gsm8k", "model_path": "Qwen/Qwen3-32B"},
            "geo3k": {"key": "hiyouga/geometry3k", "model_path": "Qwen/Qwen3-VL-32B-Instruct"},
        },
        "loss_mode": "reverse_kl",
        "topk": 64,
        "loss_max_clamp": 10.0,
        "log_prob_min_clamp": -10.0,
    }
    assert any("num_replicas=1" in each and "is" in each for each in recipe.notices)


def test_distillation_that_is_off_has_no_effect() -> None:
    off = [f"{LOSS}.loss_mode=k3", f"{LOSS}.use_task_rewards=true", f"{LOSS}.topk=8"]
    recipe = compose("grpo", ["distillation.enabled=false", *off])
    unused = {each.key for each in recipe.foreign if each.kind == "unused"}
    assert unused == {f"{LOSS}.{key}" for key in ("loss_mode", "use_task_rewards", "topk")}


@pytest.mark.parametrize(
    ("settings", "messages"),
    [
        (
            [],
            [
                f"{LOSS}.use_task_rewards is not set; verl's default is true",
                f"{LOSS}.loss_mode is not set; verl's default is k3",
            ],
        ),
        (
            [f"{LOSS}.loss_mode=k1", f"{LOSS}.use_task_rewards=true"],
            [f"{LOSS}.use_task_rewards=true is not supported"],
        ),
        (
            [
                *(f"{LOSS}.loss_mode=forward_kl_topk", f"{LOSS}.use_task_rewards=false"),
                f"{LOSS}.use_policy_gradient=true",
            ],
            [f"{LOSS}.use_policy_gradient=true with loss_mode=forward_kl_topk"],
        ),
        (
            [f"{LOSS}.loss_mode=k1", f"{LOSS}.use_task_rewards=false", "distillation.other=1"],
            ["these settings of verl's distillation are not supported"],
        ),
    ],
)
def test_distillation_that_differs_is_refused(settings: list[str], messages: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        compose("distill", ["distillation.enabled=true", *settings])
    found = [each.message for each in caught.value.problems]
    assert len(found) == len(messages)
    assert all(one.startswith(other) for one, other in zip(found, messages, strict=True)), found


def test_distillation_needs_its_algorithm() -> None:
    with pytest.raises(ConfigError, match=r"algorithm\.name is ppo") as caught:
        compose("grpo", DISTILLATION.split())
    assert "rlctl train distill" in (caught.value.problems[0].hint or "")


# The settings of fully_async_policy/shell/dapo_7b_math_fsdp2_4_4.sh at 3231c35, without staleness.
FULLY_ASYNC = """
data.train_batch_size=0 data.gen_batch_size=1 actor_rollout_ref.hybrid_engine=False
actor_rollout_ref.actor.ppo_mini_batch_size=32 trainer.nnodes=1 trainer.n_gpus_per_node=4
rollout.nnodes=1 rollout.n_gpus_per_node=4 rollout.total_rollout_steps=51200 rollout.test_freq=10
async_training.staleness_threshold=0 async_training.trigger_parameter_sync_step=4
async_training.require_batches=4 async_training.partial_rollout=True
async_training.use_rollout_log_probs=True async_training.use_trainer_do_validate=False
"""
ASYNC = "async_training"


@pytest.mark.parametrize(
    ("changes", "staleness", "schedule"),
    [
        ([], 0, "fixed"),
        ([f"{ASYNC}.staleness_threshold=1", f"{ASYNC}.partial_rollout=False"], 1, "fixed"),
        ([f"{ASYNC}.staleness_threshold=1"], 1, "eager"),
        ([f"{ASYNC}.staleness_threshold=0.5", f"{ASYNC}.partial_rollout=False"], 1, "eager"),
        ([f"{ASYNC}.staleness_threshold=1.5"], 2, "eager"),
    ],
)
def test_asynchronous_training_is_translated(
    changes: list[str], staleness: int, schedule: str
) -> None:
    config = compose("ppo_trainer", [*_ASYNC_DATA, *FULLY_ASYNC.split(), *changes]).config
    trainer, placement = config.trainer, config.trainer.placement
    assert config.async_training.max_staleness == staleness
    assert config.async_training.schedule == schedule
    assert config.data.train_batch_size == 4 * 4 * 32
    assert config.data.gen_batch_size is None
    assert (trainer.total_training_steps, trainer.test_freq) == (51200 // 512, 10)
    assert (trainer.n_gpus_per_node, placement.rollout) == (8, "rollout")
    assert placement.pools == {"main": 4, "rollout": 4}
    assert config.algorithm.rollout_correction.bypass_mode is True


_ASYNC_DATA = ["data.train_files=[t.parquet]", "actor_rollout_ref.model.path=m"]


@pytest.mark.parametrize(
    ("settings", "message", "works"),
    [
        ([f"{ASYNC}.staleness_threshold=-1"], "should be 0 or more", "=0 trains"),
        (
            [f"{ASYNC}.staleness_threshold=0", "data.train_batch_size=256"],
            "data.train_batch_size=256 differs",
            "data.train_batch_size=1024",
        ),
        ([f"{ASYNC}.compute_prox_log_prob=true"], "is not supported", "rollout_is=token"),
        ([f"{ROLLOUT}.nnodes=1"], f"{ROLLOUT}.n_gpus_per_node is not set", "NUMBER"),
        (["trainer.v1.trainer_mode=separate_async"], "separate_async", "max_staleness=1"),
        (["trainer.v1.sampler.custom_sampler.path=a.py"], "dataset classes", "data.sampler"),
        (["rollout.n=4"], "rollout.n=4 differs", "remove it"),
    ],
)
def test_asynchronous_training_that_differs_is_refused(
    settings: list[str], message: str, works: str
) -> None:
    problem = only(*_ASYNC_DATA, *settings, recipe="ppo_trainer")
    assert message in problem.message
    assert works in (problem.hint or "")


def test_pool_of_engines_that_verl_does_not_create_has_no_effect() -> None:
    recipe = compose("ppo", [f"{ROLLOUT}.n_gpus_per_node=2", "trainer.v1.trainer_mode=sync"])
    assert [each.key for each in recipe.unused] == [f"{ROLLOUT}.n_gpus_per_node"]
    assert recipe.config.trainer.placement.rollout is None


def test_repeated_key_must_agree() -> None:
    same = "reward_model.reward_kwargs.max_resp_len"
    length = compose("ppo").config.data.max_response_length
    assert compose("ppo", [f"{same}={length}", f"{ROLLOUT}.max_model_len=99999"])
    assert only(f"{same}=7").message == (f"{same}=7 differs from data.max_response_length={length}")
    assert f"{ROLLOUT}.max_model_len=7 differs" in only(f"{ROLLOUT}.max_model_len=7").message


def test_words_of_verl_are_translated() -> None:
    recipe = compose(
        "ppo",
        [
            f"{ACTOR}.fsdp_config.model_dtype=bfloat16",
            "algorithm.rollout_correction.rollout_rs=geometric",
            "+actor_rollout_ref.rollout.engine_kwargs.vllm.swap=1",
            "trainer.log_val_generations=-1",
        ],
    )
    rollout, actor = recipe.config.actor_rollout_ref.rollout, recipe.config.actor_rollout_ref.actor
    assert actor.fsdp_config.model_dtype == "bf16"
    assert recipe.config.algorithm.rollout_correction.rollout_rs == "seq_mean_k1"
    assert rollout.engine_kwargs == {"swap": 1}
    assert recipe.config.trainer.log_val_generations == 0
    assert f"{ACTOR}.fsdp_config.model_dtype=bfloat16 is now" in recipe.notices[0]


@pytest.mark.parametrize(
    ("overrides", "switched"),
    [
        ([f"{ACTOR}.ppo_micro_batch_size_per_gpu=4"], {"actor", "critic", "rollout", "ref"}),
        ([f"{ACTOR}.ppo_micro_batch_size_per_gpu=4", f"{ACTOR}.use_dynamic_bsz=true"], set()),
        (["critic.ppo_micro_batch_size_per_gpu=4"], {"critic"}),
        ([f"{REF}.log_prob_micro_batch_size_per_gpu=4"], {"ref"}),
        ([f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu=4"], {"rollout"}),
        ([f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu=null"], set()),
        (["data.truncation=left"], {"filter"}),
        (["data.truncation=left", "data.filter_overlong_prompts=true"], set()),
        (["data.truncation=error"], set()),
    ],
)
def test_micro_batches_and_truncation_mean_what_verl_means(
    overrides: list[str], switched: set[str]
) -> None:
    recipe = compose("ppo", overrides)
    policy = recipe.config.actor_rollout_ref
    switches = {
        "actor": policy.actor.use_dynamic_bsz,
        "critic": recipe.config.critic.use_dynamic_bsz,
        "rollout": policy.rollout.log_prob_use_dynamic_bsz,
        "ref": policy.ref.log_prob_use_dynamic_bsz,
        "filter": recipe.config.data.filter_overlong_prompts,
    }
    assert {name for name, on in switches.items() if not on} == switched
    assert bool(recipe.notices) == bool(switched)


def test_sft_keys_have_sections_of_their_own() -> None:
    recipe = compose(
        "sft_trainer",
        [
            "data.train_files=[t.parquet]",
            "data.prompt_key=extra_info",
            "data.prompt_dict_keys=[question]",
            "data.response_key=extra_info",
            "+data.response_dict_keys=['answer']",
            "data.train_batch_size=32",
            "data.micro_batch_size_per_gpu=4",
            "model.partial_pretrain=m",
            "model.lora_rank=8",
            "optim.lr=1e-4",
            "use_remove_padding=true",
            "engine=fsdp",
        ],
    )
    data, policy = recipe.config.data, recipe.config.actor_rollout_ref
    assert (data.prompt_key, data.response_key) == ("extra_info.question", "extra_info.answer")
    assert (policy.model.path, policy.model.lora_rank, policy.actor.optim.lr) == ("m", 8, 1e-4)
    assert policy.actor.ppo_micro_batch_size_per_gpu == 4
    assert policy.actor.ppo_mini_batch_size == 32
    assert policy.actor.use_dynamic_bsz is False
    message = "unknown key optim.lr"
    with pytest.raises(ConfigError, match=message):
        compose("ppo", ["optim.lr=1"])


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("trainer.total_step", "trainer.total_training_steps"),
        ("trainer.epochs", "trainer.total_epochs"),
        ("trainer.max_steps", "trainer.total_training_steps"),
        ("trainer.ngpus", "trainer.n_gpus_per_node"),
        ("batch_size", "data.train_batch_size"),
        ("TRAINER.SEED", "trainer.seed"),
        ("critic.optim.learning_rate", "critic.optim.lr"),
        ("model.partial_pretrain", "actor_rollout_ref.model.path"),
    ],
)
def test_wrong_key_gets_the_right_suggestion(key: str, meant: str) -> None:
    assert only(f"{key}=3").hint == f"did you mean {meant}?"


def composes(args: list[str], recipe: str) -> tuple[bool, list[str]]:
    """True if the arguments compose, else the messages of the problems."""
    config_name = next((a.partition("=")[2] for a in args if a.startswith("--config-name")), None)
    try:
        if config_name is not None:
            recipe = recipe_of("ppo", None, config_name)
        compose(recipe, overrides_of(args))
    except RlctlError as error:
        return False, [problem.message for problem in error.problems]
    return True, []


@pytest.mark.parametrize(
    ("kind", "bar"),
    [("text main_ppo", 15), ("dapo", 4), ("entropy", 3), ("sft", 3)],
)
def test_published_commands_compose(kind: str, bar: int) -> None:
    base = "sft_trainer" if kind == "sft" else "ppo_trainer"
    found = [
        composes(each["args"], base if "data.train_files" in str(each["args"]) else "ppo")
        for each in COMMANDS
        if each["kind"] == kind
    ]
    assert sum(fine for fine, _ in found) >= bar, [text for fine, text in found if not fine]


MULTITURN = """
defaults: [ppo_trainer, override model_engine: megatron, _self_]
data: {max_prompt_length: 2048, return_raw_chat: True, return_multi_modal_inputs: False}
actor_rollout_ref:
  hybrid_engine: True
  rollout: {name: sglang, multi_turn: {enable: True, max_assistant_turns: 5}}
"""


def test_geo3k_of_several_turns_is_read_from_a_clone(tmp_path: Path) -> None:
    """The keys of examples/sglang_multiturn/config/geo3k_multiturn_megatron_grpo.yaml."""
    name = "geo3k_multiturn_megatron_grpo"
    with pytest.raises(NotFoundError, match="no configuration") as caught:
        recipe_of("ppo", str(tmp_path), name)
    assert "from a clone of verl" in (caught.value.problems[0].hint or "")
    (tmp_path / f"{name}.yaml").write_text(MULTITURN)
    recipe = compose(recipe_of("ppo", str(tmp_path), name), _ASYNC_DATA)
    rollout = recipe.config.actor_rollout_ref.rollout
    assert (rollout.name, rollout.multi_turn.max_assistant_turns) == ("sglang", 5)
    assert recipe.config.data.max_prompt_length == 2048


def test_arguments_of_image_processors_are_refused_in_engines_too() -> None:
    for key in ("mm_processor_kwargs.max_pixels", "vllm.mm_processor_kwargs.max_pixels"):
        problem = only(f"+{ROLLOUT}.engine_kwargs.{key}=9")
        assert "arguments of processors of images are not supported" in problem.message
        assert "preprocessor_config.json" in (problem.hint or "")


# Scripts that the collection lists as those of missing features.
SUPPORTED_SINCE = (  # their rows may be refused later
    "examples/ppo_trainer/run_qwen2-7b_rm_reward_loop_colocate.sh",
    "examples/grpo_trainer/run_deepseek671b_math_megatron_96gb.sh",
    "examples/grpo_trainer/run_qwen3_vl-235b-megatron.sh",
    "examples/ppo_trainer/run_deepseek_full_hh_rlhf.sh",
)


def test_published_commands_for_missing_features_get_one_sentence() -> None:
    for each in COMMANDS:
        if each["kind"] == "missing":
            fine, messages = composes(each["args"], "ppo_trainer")
            assert fine is (each["script"] in SUPPORTED_SINCE), each["script"]
            assert all("unknown key" not in text for text in messages), (each["script"], messages)
            assert len(messages) <= 3, (each["script"], messages)
