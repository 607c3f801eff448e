"""Miniature vision-language models of several families, with tokenizer and image processor."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from PIL import Image
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    CONFIG_MAPPING,
    AutoModelForImageTextToText,
    PretrainedConfig,
    PreTrainedTokenizerFast,
)
from transformers.models.auto.image_processing_auto import IMAGE_PROCESSOR_MAPPING_NAMES

from rlctl.runtime.data.image_prompts import ImagePrompts
from rlctl.runtime.data.tokenizer import encode_text, load_tokenizer
from tests.configs import configured
from tests.models import TINY

SPECIAL = [
    *("<pad>", "<end>", "<user>", "<assistant>"),
    *("<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>"),
    *("<img>", "</img>", "<IMG_CONTEXT>", "<|image|>", "<|video|>"),
    *("<start_of_image>", "<end_of_image>", "<image_soft_token>"),
]
VOCABULARY = {token: i for i, token in enumerate([*SPECIAL, *"abcdefghijklmnopqrstuvwxyz ?\n"])}
FAMILIES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_5", "internvl", "glm4v", "gemma3")

_TEXT = TINY | {
    "head_dim": 8,
    "max_position_embeddings": 512,
    "eos_token_id": 1,
    "bos_token_id": None,
    "initializer_range": 0.2,
}
_LAYERS = {  # of towers without merged patches
    **{key: TINY[key] for key in ("hidden_size", "num_hidden_layers", "intermediate_size")},
    "num_attention_heads": 2,
}
_ROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]}
_VISION = {
    "depth": 2,
    "hidden_size": 32,
    "num_heads": 2,
    "intermediate_size": 64,
    "out_hidden_size": 32,
    "patch_size": 8,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "in_channels": 3,
    "initializer_range": 0.2,
}
_VISION_3 = {**_VISION, "num_position_embeddings": 64, "deepstack_visual_indexes": [0]}
_VISION_OF: dict[str, dict[str, Any]] = {
    "qwen2_vl": {**_VISION, "embed_dim": 32, "mlp_ratio": 2},
    "qwen2_5_vl": {**_VISION, "window_size": 32, "fullatt_block_indexes": [1]},
    "qwen3_vl": _VISION_3,
    "qwen3_5": _VISION_3 | {"deepstack_visual_indexes": []},
    "glm4v": {**_VISION, "image_size": 64},
    "internvl": {**_LAYERS, "image_size": [32, 32], "patch_size": [8, 8]},
    "gemma3": {**_LAYERS, "image_size": 32, "patch_size": 8},
}
_OF_TOKENIZER = {
    "internvl": {
        "start_image_token": "<img>",
        "end_image_token": "</img>",
        "context_image_token": "<IMG_CONTEXT>",
        "video_token": "<|video|>",
    },
    "gemma3": {
        "boi_token": "<start_of_image>",
        "eoi_token": "<end_of_image>",
        "image_token": "<image_soft_token>",
    },
    "glm4v": {"image_token": "<|image|>", "video_token": "<|video|>"},
}
_IMAGE = {"internvl": "<IMG_CONTEXT>", "glm4v": "<|image|>", "gemma3": "<start_of_image>"}


def vlm_config(kind: str) -> PretrainedConfig:
    """Return the configuration of a miniature of about 60,000 parameters."""
    image = _IMAGE.get(kind, "<|image_pad|>")
    interleaved = {"mrope_interleaved": True} if kind in ("qwen3_vl", "qwen3_5") else {}
    text = {**_TEXT, "rope_parameters": _ROPE | interleaved}
    ids: dict[str, Any] = {"image_token_id": VOCABULARY[image]}
    if kind.startswith(("qwen", "glm")):
        video = "<|video|>" if kind == "glm4v" else "<|video_pad|>"
        ids |= {
            "video_token_id": VOCABULARY[video],
            "vision_start_token_id": VOCABULARY["<|vision_start|>"],
            "vision_end_token_id": VOCABULARY["<|vision_end|>"],
        }
    if kind == "qwen3_5":
        text |= {
            "layer_types": ["linear_attention", "full_attention"],
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 8,
            "rope_parameters": _ROPE | interleaved | {"partial_rotary_factor": 1.0},
        }
    if kind == "glm4v":
        text |= {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}
        text["attention_bias"] = True  # as checkpoints; transformers always has one
        text["rope_parameters"] = _ROPE | {"partial_rotary_factor": 0.5}
    if kind == "internvl":
        text = {**_TEXT, "model_type": "qwen2"}
        ids |= {"image_seq_length": 4}
    if kind == "gemma3":
        text = {**_TEXT, "layer_types": ["sliding_attention", "full_attention"]}
        text["sliding_window"] = 3  # less than the tokens of an image
        ids = {"image_token_index": VOCABULARY["<image_soft_token>"], "mm_tokens_per_image": 4}
    config = CONFIG_MAPPING[kind](text_config=text, vision_config=_VISION_OF[kind], **ids)
    if kind == "qwen3_5":  # else the class for text is chosen
        config.architectures = ["Qwen3_5ForConditionalGeneration"]
    return config


def write_vlm(kind: str, folder: Path, seed: int = 0) -> Path:
    """Write a miniature with random weights; return its folder."""
    torch.manual_seed(seed)
    model = AutoModelForImageTextToText.from_config(vlm_config(kind)).float()
    for parameter in model.parameters():  # some classes begin with zeros
        if not parameter.any():
            torch.nn.init.normal_(parameter, std=0.2)
    model.save_pretrained(folder)
    tokenizer = Tokenizer(models.WordLevel(VOCABULARY, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.add_special_tokens(SPECIAL)
    image = _IMAGE.get(kind, "<|image_pad|>")
    template = (
        "{% for message in messages %}<{{ message['role'] }}>"
        "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
        "{% for part in message['content'] %}{% if part['type'] == 'image' %}"
        f"<|vision_start|>{image}<|vision_end|>"
        "{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}<end>{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<end>",
        pad_token="<pad>",
        chat_template=template,
        extra_special_tokens=_OF_TOKENIZER.get(kind, {}),
    ).save_pretrained(folder)
    settings: dict[str, Any] = {"patch_size": 8, "merge_size": 2, "temporal_patch_size": 2}
    settings |= {"size": {"shortest_edge": 16 * 16, "longest_edge": 64 * 64}}
    if kind in ("internvl", "gemma3"):
        settings = {"size": {"height": 32, "width": 32}, "min_patches": 1, "max_patches": 4}
    names: Any = IMAGE_PROCESSOR_MAPPING_NAMES[kind]
    getattr(transformers, names["pil"])(**settings).save_pretrained(folder)
    if kind in ("internvl", "gemma3"):
        (folder / "processor_config.json").write_text('{"image_seq_length": 4}')
    return folder


def noise(width: int, height: int, seed: int) -> bytes:
    """Return a PNG of random pixels."""
    generator = torch.Generator().manual_seed(seed)
    pixels = torch.randint(256, (height, width, 3), generator=generator, dtype=torch.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels.numpy()).save(buffer, "PNG")
    return buffer.getvalue()


CHATS = [
    ("<image>what?", (noise(40, 30, 1),)),
    ("a<image>b<image>", (noise(64, 20, 2), noise(17, 50, 3))),
    ("just text", ()),
    ("<image>what?", (noise(40, 30, 4),)),  # the tokens of the first row
]


def settings(folder: Path) -> Any:
    """Return the section of a model."""
    model = configured("ppo", (), ()).actor_rollout_ref.model
    return model.model_copy(update={"path": str(folder)})


def prompts_of(folder: Path) -> list[list[int]]:
    """Return the tokens of `CHATS`."""
    tokenizer = load_tokenizer(str(folder))
    reader = ImagePrompts(settings(folder), tokenizer)
    chats = [([{"role": "user", "content": text}], images) for text, images in CHATS]
    return [encode_text(tokenizer, reader.render(chat, images)) for chat, images in chats]


def ids_of(text: str) -> Sequence[int]:
    """Return the tokens of letters."""
    return [VOCABULARY[letter] for letter in text]
