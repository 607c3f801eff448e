"""Tiny random models for the tests, generated from a seed without downloads.

`tiny_model` returns a model, `write_tiny_model` writes a folder with model, tokenizer and chat
template.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

Arch = Literal["llama", "qwen2", "qwen3"]

ARCHS: tuple[Arch, ...] = ("llama", "qwen2", "qwen3")

# Fields that the configs of most architectures have.
TINY: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

WINDOW = 8  # tokens
# Models whose layers have windows or sinks, by type.
LIMITED: dict[str, dict[str, Any]] = {
    "mistral": {"sliding_window": WINDOW},
    "qwen2": {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1},
    "gemma3_text": {"layer_types": ["sliding_attention", "full_attention"]},
    "gpt_oss": {"num_local_experts": 2, "num_experts_per_tok": 1},
}
# Mixtures of 4 experts, of which each token uses 2.
MIXTURES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"num_experts": 4, "moe_intermediate_size": 32, "norm_topk_prob": True},
    "mixtral": {"num_local_experts": 4},
    "olmoe": {"num_experts": 4},
}

SPECIAL_TOKENS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
)  # ids 0 (padding), 1, 2 (end); bytes follow
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}"
    "<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def tiny_model(arch: Arch = "qwen2", seed: int = 0, **overrides: Any) -> PreTrainedModel:
    """Build a model of about 25 k parameters: 2 layers, 4 heads, 2 KV heads, float32, trainable.

    Biases and norms are random (the defaults of zeros and ones hide mistakes), and the head is
    sharp enough to avoid ties in greedy decoding. `overrides` are fields of the config.
    """
    fields = {"head_dim": 8, "tie_word_embeddings": True} | overrides
    return model_of(arch, fields, seed, attention=None).train()


def limited_model(kind: str) -> PreTrainedModel:
    """Build a model with windows of 8 tokens in one or both layers, and sinks in gpt_oss."""
    return model_of(kind, {"head_dim": 8, "sliding_window": WINDOW} | LIMITED[kind])


def mixture_model(kind: str, seed: int = 0, **overrides: Any) -> PreTrainedModel:
    """Build a mixture of experts: a model of `MIXTURES`, float32."""
    return model_of(kind, {"num_experts_per_tok": 2} | MIXTURES[kind] | overrides, seed)


def write_mixture_model(folder: Path, kind: str = "qwen3_moe") -> Path:
    """Write a mixture of experts, tokenizer and chat template; return the folder."""
    tokenizer = tiny_tokenizer()
    tokenizer.save_pretrained(folder)
    mixture_model(kind, vocab_size=len(tokenizer)).save_pretrained(folder)
    return folder


def model_of(
    kind: str,
    fields: dict[str, Any],
    seed: int = 0,
    auto: Any = AutoModelForCausalLM,
    attention: str | None = "eager",
) -> PreTrainedModel:
    """Build a model of this type with random norms and biases."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        config = AutoConfig.for_model(kind, **(TINY | fields))
        model = auto.from_config(config, attn_implementation=attention).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.2)
    return model


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """Build a tokenizer with one token per byte, three special tokens and a ChatML template."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: number for number, token in enumerate((*SPECIAL_TOKENS, *alphabet))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<|endoftext|>",
        eos_token="<|im_end|>",
        additional_special_tokens=["<|im_start|>"],
        chat_template=CHAT_TEMPLATE,
        model_max_length=256,
    )


def write_tiny_model(folder: Path, arch: Arch = "qwen2", seed: int = 0, **overrides: Any) -> Path:
    """Write model, tokenizer and chat template for `from_pretrained`; return the folder."""
    tokenizer = tiny_tokenizer()
    tokenizer.save_pretrained(folder)
    tiny_model(arch, seed, **({"vocab_size": len(tokenizer)} | overrides)).save_pretrained(folder)
    return folder


def edit(folder: Path, **settings: Any) -> None:
    """Change settings in the `config.json` of a model's folder."""
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | settings))
