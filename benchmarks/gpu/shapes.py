"""Shapes of published models, with random weights: no download is needed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from transformers import PreTrainedModel

from rlctl.quickstart import NAME, real_path
from rlctl.runtime.workers import actor, critic, reference

_SHARED = {
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1_000_000.0,
    "vocab_size": 151936,
    "tie_word_embeddings": True,
}


def _sizes(layers: int, hidden: int, intermediate: int, heads: int, kv: int) -> dict[str, Any]:
    return _SHARED | {
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
    }


_QWEN2 = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}
_QWEN3 = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "head_dim": 128}
CONFIGS: dict[str, dict[str, Any]] = {
    "Qwen2.5-0.5B": _QWEN2 | _sizes(24, 896, 4864, 14, 2),
    "Qwen2.5-7B": _QWEN2
    | _sizes(28, 3584, 18944, 28, 4)
    | {"vocab_size": 152064, "tie_word_embeddings": False},
    "Qwen3-0.6B": _QWEN3 | _sizes(28, 1024, 3072, 16, 8),
    "Qwen3-1.7B": _QWEN3 | _sizes(28, 2048, 6144, 16, 8),
    "Qwen3-4B": _QWEN3 | _sizes(36, 2560, 9728, 32, 8),
}
TINY: dict[str, Any] = {
    "vocab_size": 2048,
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}


def write_config(folder: Path, name: str, tiny: bool) -> Path:
    """Write the config.json of a shape and the quickstart's tokenizer; return the folder."""
    target = folder / name
    target.mkdir(parents=True, exist_ok=True)
    config = CONFIGS[name] | (TINY if tiny else {}) | {"eos_token_id": 2, "pad_token_id": 0}
    (target / "config.json").write_text(json.dumps(config))
    for file in Path(real_path(NAME)).iterdir():
        if not file.name.startswith(("config", "model", "generation_config")):
            (target / file.name).write_bytes(file.read_bytes())
    return target


@contextmanager
def built_on(device: str) -> Iterator[None]:
    """Draw random weights on `device` in the block: a CPU takes a minute for four billion."""

    def on_device(original: Any) -> Any:
        def load(*args: Any, **options: Any) -> PreTrainedModel:
            with torch.device(device):
                return original(*args, **options)

        return load

    with ExitStack() as stack:
        for module in (actor, critic, reference):
            stack.enter_context(patch.object(module, "load_model", on_device(module.load_model)))
        yield
