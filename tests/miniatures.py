"""A miniature of every causal language model of transformers."""

from __future__ import annotations

import json
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from transformers import CONFIG_MAPPING, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from rlctl.recipes.compose import compose
from rlctl.runtime.model.load import load_model
from rlctl.runtime.model.stage import saved_buffers

TYPES = tuple(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
NUM_LAYERS, WIDTH, HEADS = 4, 32, 4
# Values of the fields that the default config of a type has.
SIZES: dict[str, Any] = {
    **dict.fromkeys(("num_hidden_layers", "num_layers", "n_layer", "n_layers", "num_blocks"), 4),
    **dict.fromkeys(("decoder_layers", "encoder_layers", "num_decoder_layers"), 4),
    **dict.fromkeys(("num_encoder_layers", "num_layers_per_stack"), 4),
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "embedding_dim", "lru_width"), WIDTH),
    **dict.fromkeys(("embedding_size", "word_embed_proj_dim", "input_embedding_size"), WIDTH),
    **dict.fromkeys(("output_embedding_size", "backbone_hidden_size", "emb_dim"), WIDTH),
    **dict.fromkeys(("intermediate_size", "intermediate_size_mlp", "ffn_dim", "dim_ff"), 64),
    **dict.fromkeys(("decoder_ffn_dim", "encoder_ffn_dim", "dff", "n_inner", "d_inner"), 64),
    **dict.fromkeys(("ffn_hidden_size", "feed_forward_size", "dense_intermediate_size"), 64),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads"), HEADS),
    **dict.fromkeys(("decoder_attention_heads", "encoder_attention_heads"), HEADS),
    **dict.fromkeys(("num_decoder_attention_heads", "attention_heads"), HEADS),
    **dict.fromkeys(("num_encoder_attention_heads", "swa_num_attention_heads"), HEADS),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads", "swa_num_key_value_heads"), 2),
    **dict.fromkeys(("num_global_key_value_heads",), 2),
    **dict.fromkeys(("head_dim", "v_head_dim", "swa_head_dim", "swa_v_head_dim", "d_head"), 8),
    **dict.fromkeys(("head_size", "dim_head", "kv_channels", "index_head_dim"), 8),
    **dict.fromkeys(("global_head_dim", "attention_head_dim", "linear_head_dim"), 8),
    **dict.fromkeys(("qk_nope_head_dim", "attention_head_size", "query_pre_attn_scalar"), 8),
    **dict.fromkeys(("rotary_dim", "qk_rope_head_dim", "rope_head_dim"), 4),
    **dict.fromkeys(("kv_lora_rank", "q_lora_rank", "laurel_rank", "o_lora_rank"), 16),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 16),
    **dict.fromkeys(("moe_shared_expert_intermediate_size", "expert_ffn_hidden_size"), 16),
    **dict.fromkeys(("shared_intermediate_size", "router_hidden_size"), 16),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 4),
    **dict.fromkeys(("moe_num_experts",), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk", "moe_k", "num_experts_per_token"), 2),
    **dict.fromkeys(("n_group", "topk_group", "n_groups", "mamba_n_groups"), 1),
    **dict.fromkeys(("first_k_dense_replace", "zero_expert_num"), 1),
    **dict.fromkeys(("linear_num_key_heads",), 2),
    **dict.fromkeys(("linear_num_value_heads", "linear_num_heads"), 4),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), 8),
    **dict.fromkeys(("mamba_d_state", "ssm_state_size", "state_size"), 8),
    **dict.fromkeys(("mamba_n_heads", "mamba_num_heads", "mamba_d_head", "mamba_head_dim"), 8),
    **dict.fromkeys(("mamba_chunk_size", "chunk_size", "block_size", "index_block_size"), 4),
    **dict.fromkeys(("index_topk", "attention_chunk_size", "sliding_window"), 5),
    **dict.fromkeys(("attention_window_size", "window_size", "sliding_window_size"), 5),
    **dict.fromkeys(("local_attention",), 8),
    **dict.fromkeys(("attention_hidden_size",), WIDTH),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_seq_len", "n_ctx"), 128),
    **dict.fromkeys(("context_length", "max_target_positions", "model_max_length"), 128),
    "vocab_size": 128,
    "vocab_size_per_layer_input": 128,
    "decoder_vocab_size": 128,
    "index_n_heads": 16,  # scores of 0, which are equal, are rare
    "num_kv_shared_layers": 2,
    "per_layer_config": {"1": {"head_dim": 16}, "3": {"head_dim": 16}},
    "hidden_size_per_layer_input": 8,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "is_decoder": True,
    "use_mamba_kernels": False,
}
# Lists with an entry per layer: the kinds that the default has, in turn. Others are cut.
PER_LAYER = ("layer_types", "mlp_layer_types", "layers_block_type", "indexer_types")
_LARGE, _SMALL = 128, 16  # other integers
_UNCHANGED = ("rope_parameters", "id2label", "label2id", "model_type")
_DRAFT = {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0}
ROPE = {"rope_type": "default", "rope_theta": 10000.0}
# What validators ask for, or a default leaves open.
OTHERS: dict[str, dict[str, Any]] = {
    "cohere_compass_text": {
        "rope_parameters": {"full_attention": ROPE | {"mrope_section": [1, 1, 2]}}
    },
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8},
        "ffn_config": {"ffn_hidden_size": 64, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "deepseek_v2": {"num_experts_per_tok": 2},
    "deepseek_v4": {
        "compress_rates": {"compressed_sparse_attention": 2, "heavily_compressed_attention": 4},
        "head_dim": 32,
        "num_key_value_heads": 1,
        "o_groups": 2,
    },
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "falcon_h1": {"mamba_d_ssm": 64, "ssm_multipliers": [1.0] * 5},
    "gemma4_assistant": {
        "text_config": _DRAFT
        | dict.fromkeys(("num_hidden_layers", "num_kv_shared_layers", "num_key_value_heads"), 2)
        | dict.fromkeys(("hidden_size", "intermediate_size", "vocab_size"), WIDTH)
        | {"num_attention_heads": HEADS, "head_dim": 8, "per_layer_config": {}}
        | {"layer_types": ["sliding_attention", "full_attention"]}
    },
    "hunyuan_v1_dense": {"head_dim": 8},
    "hunyuan_v1_moe": {"head_dim": 8},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "mamba2": {"num_heads": 8},
    "ministral": {"head_dim": 8},
    "nemotron": {"head_dim": 8, "num_key_value_heads": 2},
    "qwen4_exp_text": {
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 8,
        "indexer_budget": 8,
        "indexer_compress_ratio": 2,
    },
    "reformer": {"axial_pos_embds_dim": [16, 16], "axial_pos_shape": [8, 16]},
    "whisper": {"is_decoder": True},
    "xlm": {"causal": True},
    "xlstm": {"chunk_size": 16},
    "xmod": {"default_language": "en_XX"},
    "zamba": {"attention_hidden_size": 64, "attention_head_dim": 16},
    "zamba2": {
        "attention_hidden_size": 64,
        "attention_head_dim": 16,
        "mamba_headdim": 8,
        "hybrid_layer_ids": [1, 3],
    },
    "zaya": {"num_experts_per_tok": 1},
}
_PARTS = {"text_encoder": {"model_type": "t5"}, "audio_encoder": {"model_type": "encodec"}}
# Arguments of the configs that have no default.
NO_DEFAULT: dict[str, dict[str, Any]] = {
    "gemma4_assistant": {"text_config": _DRAFT},
    "gemma4_unified_assistant": {"text_config": {}},
    "musicgen": _PARTS | {"decoder": {}},
    "musicgen_melody": _PARTS | {"decoder": {}},
}


# Types that need padded rows, the slow path.
PADDED = frozenset(
    (
        "axk2",
        "bart",
        "big_bird",
        "bigbird_pegasus",
        "blenderbot",
        "blenderbot-small",
        "bloom",
        "camembert",
        "codegen",
        "data2vec-text",
        "deepseek_v32",
        "deepseek_v4",
        "doge",
        "falcon",
        "glm_moe_dsa",
        "got_ocr2",
        "gpt_neo",
        "gpt_neox_japanese",
        "gptj",
        "hy_v4",
        "inkling_text",
        "llama4",
        "llama4_text",
        "marian",
        "mbart",
        "megatron-bert",
        "moshi",
        "mpt",
        "mvp",
        "nemotron",
        "openai-gpt",
        "pegasus",
        "plbart",
        "qwen4_exp",
        "qwen4_exp_text",
        "recurrent_gemma",
        "rembert",
        "roberta",
        "roberta-prelayernorm",
        "roformer",
        "rwkv",
        "stablelm",
        "trocr",
        "whisper",
        "xglm",
        "xlm",
        "xlm-roberta",
        "xlm-roberta-xl",
        "xmod",
        "zamba",
        "zaya",
    )
)
# Types that the engine hf cannot decode.
NOT_DECODED = frozenset(
    (
        *("camembert", "data2vec-text", "roberta", "roberta-prelayernorm", "xlm-roberta"),
        *("xlm-roberta-xl", "xmod"),  # positions leave out the padding token
        *("deepseek_v4", "minimax", "qwen4_exp", "qwen4_exp_text", "recurrent_gemma"),
        "rwkv",  # caches of their own
        *("diffllama", "hrm_text", "moshi", "zamba2"),  # layers attend more than once
        *("openai-gpt", "xlm"),  # no cache
    )
)
# Largest difference of a log-prob in vLLM on a CPU, or its error: `python -m tools.survey_vllm`.
VLLM_TYPES = Path(__file__).with_name("vllm_types.json")
# Types that vLLM computes on a CPU, and those of which log-probs differ by up to 1e-2: scales in
# bfloat16, another GELU. The engine refuses the others.
_SURVEY: dict[str, float | str] = json.loads(VLLM_TYPES.read_text())["types"]
_DIFFERENCES = {kind: found for kind, found in _SURVEY.items() if not isinstance(found, str)}
IN_VLLM = frozenset(kind for kind, found in _DIFFERENCES.items() if found <= 1e-4)
ROUNDED_IN_VLLM = frozenset(("apertus", "bloom"))
# Types that are refused, and a part of the reason.
REFUSED = {
    "blt": "blt is no causal language model",
    "cpmant": "computed wrongly on packed rows",
    "gemma3n": "requires the timm library",
    "gemma4_assistant": "cannot run on packed rows|cannot be loaded",  # not loaded by 5.23
    "gemma4_unified_assistant": "inputs_embeds and shared_kv_states cannot be None",
    "git": "git is no causal language model",
    "musicgen": "cannot be loaded",
    "musicgen_melody": "cannot be loaded",
    "prophetnet": "cannot run on packed rows",
    "reformer": "hashes tokens at random",
    "xlnet": "computed wrongly on packed rows",
    "xlstm": "cannot run on packed rows",  # nor can transformers compute rows above 16 tokens
}


def shrink(values: dict[str, Any]) -> dict[str, Any]:
    """Return the values of a default config for a miniature, with those of its parts."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        if name in _UNCHANGED or (value is None and not name.endswith("_token_id")):
            continue
        if value == 0 and not isinstance(value, bool):
            found[name] = value
        elif name in SIZES:
            found[name] = SIZES[name]
        elif name in PER_LAYER and value:
            kinds = list(dict.fromkeys(value))
            found[name] = [kinds[number % len(kinds)] for number in range(NUM_LAYERS)]
        elif isinstance(value, dict):
            kind = {"model_type": value["model_type"]} if "model_type" in value else {}
            found[name] = shrink(value) | kind
        elif isinstance(value, list) and len(value) > NUM_LAYERS:
            found[name] = value[:NUM_LAYERS]
        elif name.endswith(("_token_id", "_token_index")) and isinstance(value, int):
            found[name] = 2  # such as the place of an image, which no row of the tests has
        elif isinstance(value, int) and value > _LARGE:
            found[name] = _SMALL
        elif "drop" in name and isinstance(value, float):
            found[name] = 0.0
    if "qk_rope_head_dim" in found:  # the size of the part of a head with rotary positions
        found |= {"head_dim": 4, "qk_head_dim": 12, "num_key_value_heads": HEADS}
    return found | OTHERS.get(values.get("model_type", ""), {})


def miniature_config(kind: str) -> PreTrainedConfig:
    """Return the config of a miniature."""
    cls = CONFIG_MAPPING[kind]
    default = cls() if kind not in NO_DEFAULT else cls(**deepcopy(NO_DEFAULT[kind]))
    return cls(**shrink(default.to_dict()))


def miniature(kind: str, folder: Path, **fields: Any) -> PreTrainedModel:
    """Load a miniature in float32 with random norms and biases; its config goes to `folder`.

    Buffers that files have are random, too: they are part of a checkpoint.
    """
    config = miniature_config(kind)
    for name, value in fields.items():
        setattr(config, name, value)
    return with_random_weights(config, folder)


def with_random_weights(config: PreTrainedConfig, folder: Path) -> PreTrainedModel:
    """Load a model of `config`, which goes to `folder`: see `miniature`."""
    config.save_pretrained(folder)
    overrides = [f"actor_rollout_ref.model.{each}" for each in (f"path={folder}", "init=random")]
    settings = compose("grpo", overrides).config.actor_rollout_ref.model
    model = load_model(settings, "policy", torch.float32, seed=0)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, weight in {**dict(model.named_parameters()), **saved_buffers(model)}.items():
            is_fixed = name.endswith(("_decay", "slope_rate"))  # MiniMax: functions of positions
            if weight.is_floating_point() and not is_fixed:
                weight += 0.1 * torch.randn(weight.shape, generator=generator)
    return model.eval()
