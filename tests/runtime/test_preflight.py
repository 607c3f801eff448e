"""Problems found before a start: weights, heads, pools, memory."""

from __future__ import annotations

import json
import shutil
from functools import partial
from pathlib import Path

import pytest
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    OPTConfig,
    PretrainedConfig,
    T5Config,
)

from rlctl.errors import ConfigError, Problem
from rlctl.recipes.compose import compose
from rlctl.recipes.schema import Config
from rlctl.runtime.algorithms.base import Needs
from rlctl.runtime.build import load_algorithm
from rlctl.runtime.model.costs import Costs
from rlctl.runtime.planning.capacity import check_capacity
from rlctl.runtime.planning.devices import Devices
from rlctl.runtime.planning.memory import RoleMemory
from rlctl.runtime.planning.model_files import check_weights
from rlctl.runtime.planning.model_size import ModelSize
from rlctl.runtime.planning.placement import check_sizes
from rlctl.runtime.planning.preflight import check_batches, check_model
from rlctl.runtime.planning.role_memory import plan_memory
from rlctl.runtime.planning.role_models import check_role_models, check_routers
from tests.miniatures import miniature_config
from tests.models import edit, mixture_model, write_tiny_model
from tests.plugin_folders import is_there, of_plugins
from tests.settings import KEYS, given

NEEDS = Needs.GROUPS | Needs.CRITIC
CPU, ONE_RANK = Devices("cpu", 1, 1), {"main": 1}


def capacity_problems(config: Config, needs: Needs) -> list[Problem]:
    return list(check_capacity(plan_memory(config, CPU, ONE_RANK, needs), CPU, ONE_RANK))


@pytest.fixture
def model(tmp_path: Path) -> Path:
    write_tiny_model(tmp_path / "model")
    return tmp_path / "model"


def config(model: Path, *overrides: str) -> Config:
    small = given(train="[t.parquet]", model=model, prompt=8, response=8)
    return compose("ppo_trainer", [*small, *overrides]).config


def actor_memory(
    model: Path, *overrides: str, device: str = "cpu", ranks: int = 1, needs: Needs = Needs.GROUPS
) -> RoleMemory:
    devices = Devices(device, 1, ranks)
    return plan_memory(config(model, *overrides), devices, {"main": ranks}, needs).known()[0]


def test_an_engine_is_divided_by_its_tensor_parallelism(model: Path) -> None:
    def engine(size: int) -> RoleMemory:
        keys = {"tensor_model_parallel_size": size, "max_num_seqs": 4096}
        settings = [f"actor_rollout_ref.rollout.{key}={value}" for key, value in keys.items()]
        return actor_memory(model, *settings, device="cuda", ranks=4, needs=Needs.ENGINE)

    whole, parts = engine(1), engine(4)
    assert whole.engine.weights == 4 * parts.engine.weights > 0
    # One engine of four ranks has the prompts of four, and each rank a part of its heads.
    assert parts.engine.cache == whole.engine.cache > 0


def test_frozen_weights_take_the_bytes_of_passes(model: Path) -> None:
    keys = ["actor_rollout_ref.model.dtype=bfloat16", "actor_rollout_ref.model.lora_rank=2"]
    memory = actor_memory(model, *keys)
    frozen = memory.num_parameters - memory.num_trained
    assert memory.parameters == 2 * frozen + 4 * memory.num_trained


def mesh_faults(folder: Path, *overrides: str, ranks: int = 4, needs: Needs = Needs.GROUPS) -> str:
    """Return the problems of sizes of meshes on a pool of `ranks`."""
    problems = list(check_sizes(config(folder, *overrides), {"main": ranks}, needs))
    return " ".join(str(each) for each in problems)


ONE_ROW = (
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1",
    "actor_rollout_ref.actor.use_dynamic_bsz=false",
)


def faults(model: Path) -> list[str]:
    section = config(model).actor_rollout_ref.model
    return [each.message for each in check_weights(section, KEYS["model"])]


def test_a_file_cut_off(model: Path) -> None:
    weights = model / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-10])
    assert faults(model) == [
        f"{weights} is damaged: {len(whole) - 10} bytes long instead of {len(whole)}"
    ]
    weights.write_bytes(whole[:100])
    assert "header should take" in faults(model)[0]
    weights.write_bytes(b"\x04" + bytes(7) + b"none")
    assert "not that of a safetensors file" in faults(model)[0]


def test_no_weights_at_all_unless_they_are_to_be_random(model: Path) -> None:
    (model / "model.safetensors").unlink()
    assert "holds no weights" in faults(model)[0]
    random = config(model, "actor_rollout_ref.model.init=random").actor_rollout_ref.model
    assert check_weights(random, "actor_rollout_ref.model.path") == []


def test_a_shard_that_the_index_names_and_nobody_has(model: Path) -> None:
    first, second = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
    shutil.move(model / "model.safetensors", model / first)
    index = model / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": first, "b": second}}))
    [said] = check_model(config(model))
    assert said.message == f"1 of 2 weight files are missing in {model}: {second}"
    index.write_text("{")
    assert "cannot be read as an index" in faults(model)[0]


@pytest.mark.parametrize(
    ("prompt", "response", "fixes"),
    [
        # A prompt within half of the context keeps its length; else both shrink in proportion.
        (24, 480, ["data.max_response_length=232"]),
        (300, 300, ["data.max_response_length=128", "data.max_prompt_length=128"]),
        (600, 200, ["data.max_response_length=64", "data.max_prompt_length=192"]),
    ],
)
def test_lengths_beyond_the_context_get_useful_ones(
    model: Path, prompt: int, response: int, fixes: list[str]
) -> None:
    edit(model, max_position_embeddings=256)
    lengths = (f"data.max_prompt_length={prompt}", f"data.max_response_length={response}")
    found = [said.fix for said in check_model(config(model, *lengths))]
    assert found == [(fix.partition("=")[0], fix) for fix in fixes]


def test_heads_are_shared_out_evenly(model: Path) -> None:
    [said] = check_model(config(model, "actor_rollout_ref.rollout.tensor_model_parallel_size=3"))
    assert said.message.endswith(
        "tensor_model_parallel_size=3 does not divide the model's 4 attention heads"
    )
    assert said.hint.endswith("=2 or 4")


@pytest.mark.parametrize("engine", of_plugins("engines", ["vllm", "vllm_server"]))
@pytest.mark.parametrize(("kind", "device"), [("gpt_oss", "cuda"), ("lfm2", "cpu")])
def test_models_that_vllm_computes_otherwise_are_refused_for_its_servers_too(
    engine: str, kind: str, device: str, tmp_path: Path
) -> None:
    miniature_config(kind).save_pretrained(tmp_path)
    chosen = config(
        tmp_path,
        f"actor_rollout_ref.rollout.name={engine}",
        f"trainer.device={device}",
        "actor_rollout_ref.model.init=random",
    )
    messages = [problem.message for problem in check_model(chosen)]
    assert any(f"computes models of type {kind} unlike" in message for message in messages)


def test_check_batches_uses_the_pool_of_each_role(model: Path) -> None:
    own = ["trainer.placement.critic=judge", "critic.ppo_mini_batch_size=6"]
    chosen = config(model, *own, *given(mini_batch=4, batch=12))
    assert not [*check_batches(chosen, {"main": 4, "judge": 3}, NEEDS)]
    [said] = check_batches(chosen, {"main": 3, "judge": 3}, NEEDS)
    assert "cannot be split evenly over the 3 ranks of the pool main" in said.message


def test_tensor_parallel_size_divides_the_ranks_of_the_pool(model: Path) -> None:
    chosen = config(model, *given(tensor=2, batch=768))
    assert not [*check_batches(chosen, {"main": 4}, Needs.GROUPS)]
    *_, last = check_batches(chosen, {"main": 1}, Needs.GROUPS)
    message = "tensor_model_parallel_size=2 does not divide the 1 ranks of the pool main"
    assert message in last.message


def test_model_larger_than_the_device_is_a_problem(model: Path) -> None:
    assert capacity_problems(config(model), NEEDS) == []
    edit(model, vocab_size=10**12)  # 4 numbers of 4 bytes each × 32 × 10¹²: 466 TiB
    [said] = capacity_problems(config(model), Needs.GROUPS)
    assert "(actor) needs 476837" in said.message
    assert said.where == "trainer.placement"


@pytest.mark.parametrize(
    "other",
    [
        GPT2Config(n_layer=2, n_embd=32, n_head=4),
        OPTConfig(num_hidden_layers=2, hidden_size=32, ffn_dim=64, num_attention_heads=4),
    ],
)
def test_model_size_of_architectures_with_other_config_keys(
    other: PretrainedConfig, model: Path
) -> None:
    other.save_pretrained(model)
    settings = config(model).actor_rollout_ref.model
    size = ModelSize.from_config(settings, "policy")
    built = AutoModelForCausalLM.from_config(other)
    assert size.num_parameters == sum(each.numel() for each in built.parameters())
    assert size.intermediate == (128 if isinstance(other, GPT2Config) else 64)


def test_model_that_generates_no_text_is_a_problem(model: Path) -> None:
    T5Config(num_layers=1, num_decoder_layers=1).save_pretrained(model)
    with pytest.raises(ConfigError, match="cannot be built: Unrecognized configuration class"):
        capacity_problems(config(model), Needs.GROUPS)


def test_model_that_reads_values_while_it_is_built_is_left_out_with_a_warning(model: Path) -> None:
    """Code from the hub may read a parameter's value in its constructor."""
    (model / "modeling_nosy.py").write_text(
        "import torch\nfrom transformers import Qwen2ForCausalLM\n"
        "class Nosy(Qwen2ForCausalLM):\n"
        "    def __init__(self, config):\n        super().__init__(config)\n"
        "        self.first = torch.ones(1).item()\n"
    )
    edit(model, auto_map={"AutoModelForCausalLM": "modeling_nosy.Nosy"})
    trust = [f"{role}.model.trust_remote_code" for role in ("actor_rollout_ref", "critic")]
    chosen = config(model, f"{trust[0]}=true", f"{trust[1]}=false")
    memory = plan_memory(chosen, CPU, ONE_RANK, NEEDS)
    assert not [*check_capacity(memory, CPU, ONE_RANK)]
    [warning] = memory.warnings
    assert "is unknown before it is loaded" in warning
    assert [each.role for each in memory.known()] == ["critic"]


@pytest.mark.parametrize("kind", ["qwen3_5_moe_text", "deepseek_v3"])
def test_engines_have_caches_of_states_and_of_latent_attention(kind: str, tmp_path: Path) -> None:
    built = miniature_config(kind)
    built.save_pretrained(tmp_path)
    costs = Costs.from_config(built)
    sizes = ("data.train_batch_size=2", "actor_rollout_ref.rollout.n=3")
    name, more = (
        "actor_rollout_ref.rollout.name",
        (*sizes, "actor_rollout_ref.model.dtype=bfloat16"),
    )
    needs = Needs.GROUPS | Needs.ENGINE
    plain = actor_memory(tmp_path, f"{name}=hf", *more, device="cuda", needs=needs).engine
    tokens = 2 * (8 + 3 * 8)  # two prompts with three responses each
    assert plain.cache == 2 * tokens * costs.cached + 4 * 6 * costs.states
    assert plain.row_cache == 2 * 16 * costs.cached + 4 * costs.states
    vllm = actor_memory(tmp_path, f"{name}=vllm", *more, device="cuda", needs=needs).engine
    latent = 2 * 4 * (16 + 4)  # bytes of a token: four layers, rank 16 and 4 rotary channels
    expected = 16 * latent if kind == "deepseek_v3" else plain.row_cache
    assert vllm.row_cache == expected


@pytest.mark.plugin("objectives")
def test_a_teacher_with_another_tokenizer_is_refused(tmp_path: Path) -> None:
    actor, same, other = (write_tiny_model(tmp_path / name) for name in ("actor", "same", "other"))
    file = other / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary["A"], vocabulary["B"] = vocabulary["B"], vocabulary["A"]
    file.write_text(json.dumps(tokenizer))

    def problems(teacher: Path) -> list[str]:
        paths = [*given(model=actor), f"actor_rollout_ref.ref.model.path={teacher}"]
        composed = compose("distill", paths).config
        found = check_role_models(composed, load_algorithm(composed, 1))
        return [f"{each.where}: {each.message}" for each in found]

    assert problems(same) == []
    [problem] = problems(other)
    key = "actor_rollout_ref.ref.model.path"
    assert problem.startswith(f"{key}: the tokenizer of {other} is not the actor's: the token")


def test_ranks_that_share_rows_divide_the_pool_and_the_heads(model: Path) -> None:
    """4 heads; the mini-batch of 4 rows goes to the 4 groups of 8 ranks."""
    key = "actor_rollout_ref.actor.fsdp_config.ulysses_sequence_parallel_size"
    sizes = ("actor_rollout_ref.actor.ppo_mini_batch_size=4", "actor_rollout_ref.rollout.n=1")
    assert not [*check_sizes(config(model, *sizes, f"{key}=2"), {"main": 8}, Needs.GROUPS)]
    [said] = check_sizes(config(model, *sizes, f"{key}=3"), {"main": 8}, Needs.NOTHING)
    assert f"the mesh of the actor does not fit: {key}=3" in said.message
    assert said.hint == "sizes that do: 1, 2, 4"
    assert said.fix == (key, f"{key}=2")


def test_stages_divide_the_pool_and_have_layers(model: Path, tmp_path: Path) -> None:
    """2 layers; the mini-batch of 4 rows goes to the 2 pipelines of 4 ranks."""
    key = "actor_rollout_ref.actor.fsdp_config.pipeline_model_parallel_size"
    sizes = ("actor_rollout_ref.actor.ppo_mini_batch_size=4", "actor_rollout_ref.rollout.n=1")

    def said(size: int, folder: Path = model, *more: str) -> str:
        return mesh_faults(folder, *sizes, f"{key}={size}", *more)

    assert said(2) == ""
    assert f"the mesh of the actor does not fit: {key}=3" in said(3)
    assert "is more than the model's 2 layers" in said(4)
    compiled = "actor_rollout_ref.actor.use_torch_compile=true"
    assert "layers of 2 stages cannot be compiled" in said(2, model, compiled)
    GPT2LMHeadModel(GPT2Config(n_layer=2, n_embd=8, n_head=2)).save_pretrained(tmp_path)
    assert "its decoder is no chain of embed_tokens, layers, norm" in said(2, tmp_path)


def test_a_stage_has_its_part_of_the_weights_and_all_micro_batches_in_flight(model: Path) -> None:
    actor = partial(actor_memory, model, *ONE_ROW, ranks=4)
    section = "actor_rollout_ref.actor.fsdp_config"
    stages = f"{section}.pipeline_model_parallel_size=2"
    alone, first = actor(), actor(stages)
    assert alone.parameters < first.parameters < 2 * alone.parameters  # on 4 ranks, and on 2
    assert first.num_parameters == alone.num_parameters
    assert first.activations > alone.activations
    assert actor(stages, f"{section}.pipeline_schedule=gpipe").activations > first.activations


def test_experts_are_divided_over_the_ranks_of_one_copy(model: Path, tmp_path: Path) -> None:
    """4 experts; 4 ranks."""
    mixture = tmp_path / "mixture"
    mixture_model("mixtral").save_pretrained(mixture)
    key = "actor_rollout_ref.actor.fsdp_config.expert_model_parallel_size"

    def said(folder: Path, size: int, *more: str) -> str:
        return mesh_faults(folder, f"{key}={size}", *more, needs=Needs.NOTHING)

    section = key.rpartition(".")[0]
    assert said(mixture, 4) == said(mixture, 2, f"{section}.fsdp_size=2") == ""
    assert "share one copy of the parameters (4)" in said(mixture, 2)
    assert "does not divide the 0 experts" in said(model, 4)
    assert "host memory" in said(mixture, 4, f"{section}.offload_policy=true")

    tensor = f"{section}.tensor_model_parallel_size=2"
    assert said(mixture, 1, tensor) == said(mixture, 2, tensor) == ""
    assert "=4 is not the number of ranks" in said(mixture, 4, tensor)
    lora = "actor_rollout_ref.model.lora_rank=4"
    assert said(mixture, 1, tensor, lora) == ""
    dora = "actor_rollout_ref.model.use_dora=true"
    assert "DoRA adapters of layers" in said(mixture, 1, tensor, lora, dora)
    head = "actor_rollout_ref.model.target_modules=[q_proj,lm_head]"
    assert "LoRA adapters of lm_head are not" in said(mixture, 1, tensor, lora, head)


def test_a_cache_that_the_engine_keeps_is_held_during_training(model: Path) -> None:
    rollout, needs = "actor_rollout_ref.rollout", Needs.GROUPS | Needs.ENGINE

    def actor(name: str) -> list[RoleMemory]:
        keys = (f"{rollout}.name={name}", f"{rollout}.free_cache_engine=")
        given = [(keys[0], f"{keys[1]}{each}") for each in ("true", "false")]
        return [actor_memory(model, *each, device="cuda", needs=needs) for each in given]

    freed, kept = actor("hf")
    assert kept.held == freed.held + freed.engine.cache > freed.held
    assert kept.engine.awake == freed.engine.awake
    freed, kept = actor("auto")  # vLLM, which has weights of its own, and sleeps without them
    assert kept.held == freed.held + freed.engine.cache + freed.engine.weights
    assert freed.held - freed.resident == freed.engine.graphs > 0


GPU_BYTES = 16 * 2**30
UTILIZATION = "actor_rollout_ref.rollout.gpu_memory_utilization"


def engine_problems(model: Path, *overrides: str) -> list[Problem]:
    """Return the problems of an actor with vLLM on GPUs of 16 GiB; weights take 6.0 in float32."""
    edit(model, vocab_size=50_000_000)
    half = "actor_rollout_ref.model.dtype=bfloat16"
    tokens = "actor_rollout_ref.rollout.max_num_seqs=1"
    chosen = config(model, half, tokens, "actor_rollout_ref.rollout.name=auto", *overrides)
    devices, needs = Devices("cuda", 1, 8, GPU_BYTES), Needs.GROUPS | Needs.ENGINE
    planned = plan_memory(chosen, devices, {"main": 8}, needs)
    [actor] = planned.known()
    fraction = chosen.actor_rollout_ref.rollout.gpu_memory_utilization or 0.5
    assert actor.engine.share == int(fraction * GPU_BYTES)
    assert actor.engine.awake == max(actor.engine.share, actor.engine.awake - actor.engine.cache)
    return list(check_capacity(planned, devices, {"main": 8}))


def test_vllm_must_fit_beside_the_state_of_the_trainer_when_it_wakes_up(model: Path) -> None:
    """1.6 billion weights on 8 ranks: 2.2 GiB each with moments; vLLM takes its share."""
    assert engine_problems(model) == []
    assert engine_problems(model, f"{UTILIZATION}=0.75") == []
    [problem] = engine_problems(model, f"{UTILIZATION}=0.85")
    assert "GiB on each GPU when vLLM wakes up, and 16.0 GiB are available" in problem.message
    assert problem.fix == (UTILIZATION, f"{UTILIZATION}=0.8")
    assert "optimizer_offload=true" in problem.hint
    offload = "actor_rollout_ref.actor.fsdp_config.optimizer_offload=true"
    assert engine_problems(model, f"{UTILIZATION}=0.85", offload) == []


def test_the_share_of_vllm_holds_its_weights_and_a_row(
    model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """3.0 GiB of weights in bfloat16, about 1.6 of graphs and a pass."""
    assert engine_problems(model, f"{UTILIZATION}=0.25") == []
    assert "vLLM gets 4.0 GiB of each GPU of the pool main, and needs 3.0" in caplog.text
    [problem] = engine_problems(model, f"{UTILIZATION}=0.15")
    assert "vLLM gets 2.4 GiB of each GPU of the pool main, and needs 3.0" in problem.message
    assert f"{UTILIZATION}=0.8" in problem.hint
    tensor = "actor_rollout_ref.rollout.tensor_model_parallel_size=4"
    assert engine_problems(model, f"{UTILIZATION}=0.15", tensor) == []
    assert len(caplog.records) == 1


def test_cuda_and_nccl_are_in_the_peak_of_a_pool(model: Path) -> None:
    def overhead(ranks: int, *overrides: str) -> int:
        needs, devices = Needs.GROUPS | Needs.ENGINE, Devices("cuda", 1, ranks)
        plan = plan_memory(config(model, *overrides), devices, {"main": ranks}, needs)
        assert plan.peaks()["main"] == plan.known()[0].peak + plan.overhead("main")
        return plan.overhead("main")

    alone, several = overhead(1), overhead(4)
    assert 0 < alone < several
    assert several < overhead(4, "actor_rollout_ref.rollout.tensor_model_parallel_size=2")
    assert several < overhead(4, "actor_rollout_ref.actor.fsdp_config.fsdp_size=2")


def test_offloaded_state_and_checkpoints_are_in_the_memory_of_the_host(model: Path) -> None:
    actor = partial(actor_memory, model, device="cuda", ranks=2)
    section, number = "actor_rollout_ref.actor.fsdp_config", actor().num_parameters
    assert actor().host == 0
    assert actor(f"{section}.optimizer_offload=true").host == 8 * number // 2
    assert actor(f"{section}.offload_policy=true").host == 16 * number // 2
    moving = actor(f"{section}.param_offload=true")
    assert (moving.host, moving.visiting, moving.parameters) == (2 * number, 2 * number, 0)
    assert actor("trainer.save_freq=1").host == 12 * number // 2
    assert actor("actor_rollout_ref.model.enable_activation_offload=true").host > 0


def test_bfloat16_weights_have_float32_moments_and_their_other_bits(model: Path) -> None:
    dtype = "actor_rollout_ref.model.dtype=bfloat16"
    actor = partial(actor_memory, model, dtype, device="cuda")
    whole = actor()
    half = actor("actor_rollout_ref.actor.fsdp_config.model_dtype=bf16")
    number = whole.num_parameters
    assert (whole.parameters, whole.moments) == (4 * number, 8 * number)
    assert (half.parameters, half.moments, half.gradients) == (2 * number, 10 * number, 2 * number)
    assert half.gathered == 0 < whole.gathered
    assert 0 < half.update <= 8 * number


def test_router_replay_needs_a_record(model: Path, tmp_path: Path) -> None:
    mixture = tmp_path / "mixture"
    mixture_model("olmoe").save_pretrained(mixture)
    key = "actor_rollout_ref.actor.router_replay.mode"
    server = "+actor_rollout_ref.rollout.engine_kwargs.url=http://localhost:1"

    def said(folder: Path, mode: str, *more: str) -> str:
        composed = config(folder, f"{key}={mode}", *more)
        try:
            check_routers(composed, "cpu", load_algorithm(composed, 1))
        except ConfigError as error:
            return " ".join(str(each) for each in error.problems)
        return ""

    assert said(model, "disabled") == said(mixture, "R2") == said(mixture, "R3") == ""
    assert "type qwen2 has no routers" in said(model, "R3")
    if is_there("bridges"):
        vllm_server = said(mixture, "R3", "actor_rollout_ref.rollout.name=vllm_server", server)
        assert "vllm_server does not return the experts" in vllm_server
    assert "bypass_mode" in said(mixture, "R2", "algorithm.rollout_correction.bypass_mode=true")
    if is_there("objectives"):
        assert "raft has none" in said(mixture, "R2", "algorithm.name=raft")
    assert "sft samples no responses" in said(mixture, "R3", "algorithm.name=sft")
    stages = "actor_rollout_ref.actor.fsdp_config.pipeline_model_parallel_size=2"
    assert "no record of the experts in other stages" in said(mixture, "R2", stages)
    assert said(mixture, "R3", stages) == ""
    override = "+actor_rollout_ref.model.override_config.router_aux_loss_coef"
    assert "terms of the routers" in said(mixture, "disabled", f"{override}=0.01")
    assert said(mixture, "disabled", f"{override}=0") == ""


def test_ranks_that_share_rows_have_fewer_activations(model: Path) -> None:
    key = "actor_rollout_ref.actor.fsdp_config.ulysses_sequence_parallel_size=2"
    alone = actor_memory(model, *ONE_ROW, ranks=2)
    shared = actor_memory(model, *ONE_ROW, key, ranks=2)
    assert shared.activations == alone.activations // 2
    assert shared.logits == alone.logits // 2
    assert shared.held == alone.held
