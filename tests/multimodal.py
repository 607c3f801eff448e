"""A miniature of the types of transformers that read images, of which only text is trained."""

from __future__ import annotations

from transformers import PreTrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

from tests.miniatures import miniature_config

# Types that are exact on rows of text.
TEXT_EXACT = (
    *("aya_vision", "cohere2_vision", "cohere_compass", "cosmos3_omni", "deepseek_vl"),
    *("deepseek_vl_hybrid", "emu3", "exaone4_5", "fuyu", "gemma3", "gemma4", "gemma4_unified"),
    *("glm46v", "glm4v", "glm_ocr", "glmga", "got_ocr2", "hyperclovax_vision_v2", "idefics2"),
    *("idefics3", "inkling_mm_model", "internvl", "janus", "kimi_k25", "kosmos-2.5", "lfm2_vl"),
    *("lighton_ocr", "llama4", "llava", "llava_next", "llava_next_video", "llava_onevision"),
    *("minicpmv4_6", "minicpmv4_7", "minimax_m3_vl", "mistral3", "mllama", "muse_glimmer"),
    *("ovis2", "paddleocr_vl", "pp_chart2table", "qianfan_ocr", "qwen2_5_omni_thinker"),
    *("qwen2_5_vl", "qwen2_vl", "qwen3_5", "qwen3_5_moe", "qwen3_omni_moe_thinker", "qwen3_vl"),
    *("qwen3_vl_moe", "qwen4_exp", "shieldgemma2", "smolvlm", "video_llama_3", "video_llava"),
    "vipllava",
)
# Those of them that need padded rows, and those that the engine hf cannot decode.
TEXT_PADDED = (
    "got_ocr2",
    "inkling_mm_model",
    "kosmos-2.5",
    "llama4",
    "pp_chart2table",
    "qwen4_exp",
)
TEXT_NOT_DECODED = (
    *("kosmos-2.5", "minicpmv4_6", "qwen2_5_omni_thinker", "qwen3_omni_moe_thinker", "qwen4_exp"),
    "video_llama_3",
)
# Types that are refused, and a part of the reason; no miniature of the others was built.
TEXT_REFUSED = {
    **dict.fromkeys(
        ("blip", "blip-2", "instructblip", "instructblipvideo", "kosmos-2"), "cannot run"
    ),
    **dict.fromkeys(("git", "idefics", "paligemma", "pix2struct"), "is no causal language model"),
    **dict.fromkeys(("chameleon", "evolla", "mistral4", "udop"), "cannot be loaded"),
}


def multimodal_config(kind: str) -> PreTrainedConfig:
    """Return the config of a miniature, which names its class as a checkpoint does."""
    config = miniature_config(kind)
    if kind.startswith(("glm", "paddleocr", "qwen2")):  # half of a head
        config.get_text_config(decoder=True).rope_parameters["mrope_section"] = [1, 1, 2]
    config.architectures = [MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES[kind]]
    return config
