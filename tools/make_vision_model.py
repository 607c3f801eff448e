"""Builder of the quickstart's vision-language model: a tiny Qwen3-VL that names coloured shapes.

Its last training steps have mostly wrong answers, so that it sees the shape and often says another.
Reinforcement learning can correct this.
"""

from __future__ import annotations

import math
import random
import shutil
import sys
from pathlib import Path
from typing import Any

from rlctl.data_prep.decoded_images import opened
from rlctl.data_prep.images import content_of, with_parts
from rlctl.data_prep.rows import PromptRow
from rlctl.data_prep.shapes import COLOURS, QUESTION, SHAPES, ShapesParams, shapes
from rlctl.files import apply_umask
from rlctl.quickstart import VISION, real_path
from tools.make_model import write_blank
from tools.training import train

SEED = 0
NUM_TRAIN, BATCH, STEPS, WARMUP, LEARNING_RATE = 6000, 96, 900, 50, 2e-3
# Answers are right at first, to learn the pictures; later as often as the model is to be right.
EXACT_STEPS, CARELESS = 700, 0.7
TOKENS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}{% if part['type'] == 'image' %}"
    "<|vision_start|><|image_pad|><|vision_end|>"
    "{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def write_untrained(folder: Path) -> None:
    """Write tokenizer, configuration and image processor."""
    from transformers import AutoTokenizer, Qwen2VLImageProcessorPil, Qwen3VLConfig

    texts = [f"{colour} {shape}" for colour in COLOURS for shape in SHAPES] + [QUESTION]
    write_blank(folder, texts, CHAT_TEMPLATE, TOKENS)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = dict(zip(TOKENS, tokenizer.convert_tokens_to_ids(list(TOKENS)), strict=True))
    text: dict[str, Any] = {
        "vocab_size": len(tokenizer),
        "hidden_size": 128,
        "intermediate_size": 320,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 1024,
        "tie_word_embeddings": True,
        "initializer_range": 0.05,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10_000.0,
            "mrope_section": [6, 5, 5],
            "mrope_interleaved": True,
        },
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    vision = {
        "depth": 2,
        "hidden_size": 96,
        "num_heads": 3,
        "intermediate_size": 256,
        "out_hidden_size": 128,
        "patch_size": 8,
        "temporal_patch_size": 2,
        "spatial_merge_size": 2,
        "num_position_embeddings": 64,
        "deepstack_visual_indexes": [0],
        "initializer_range": 0.05,
    }
    Qwen3VLConfig(
        text_config=text,
        vision_config=vision,
        tie_word_embeddings=True,
        image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"],
        architectures=["Qwen3VLForConditionalGeneration"],
    ).save_pretrained(folder)
    Qwen2VLImageProcessorPil(
        patch_size=8,
        temporal_patch_size=2,
        merge_size=2,
        size={"shortest_edge": 16 * 16, "longest_edge": 64 * 64},
        image_mean=[0.5] * 3,
        image_std=[0.5] * 3,
    ).save_pretrained(folder)


def main(target: Path) -> None:
    """Train the model and write it to the folder `target`, replacing its contents."""
    import torch
    from transformers import AutoConfig, Qwen3VLForConditionalGeneration

    torch.manual_seed(SEED)
    torch.set_num_threads(1)  # the sum of a gradient depends on the number of threads
    shutil.rmtree(target, ignore_errors=True)
    write_untrained(target)
    examples = Examples(target)
    model = Qwen3VLForConditionalGeneration(AutoConfig.from_pretrained(target))
    train(model, lambda step: examples.draw(step < EXACT_STEPS), STEPS, _learning_rate)
    model.save_pretrained(target)
    apply_umask(target / "model.safetensors")
    print(f"wrote {target}")


class Examples:
    """Pictures with their questions as a model reads them, and answers, all equally long."""

    def __init__(self, folder: Path) -> None:
        """Draw and process the pictures."""
        import torch
        from transformers import AutoTokenizer, Qwen2VLImageProcessorPil

        self.tokenizer: Any = AutoTokenizer.from_pretrained(folder)
        self.rows = shapes(ShapesParams(train=NUM_TRAIN, val=1, seed=SEED + 2))["train"]
        processor = Qwen2VLImageProcessorPil.from_pretrained(folder)
        pictures = [opened(content_of(row.images[0])) for row in self.rows]
        inputs: Any = processor(images=pictures, return_tensors="pt")
        self.grid = inputs["image_grid_thw"][0]
        self.pixels = inputs["pixel_values"].unflatten(0, (len(pictures), -1))
        chat = with_parts([{"role": "user", "content": QUESTION}], [b""])
        text = self.tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        num_tokens = int(self.grid.prod()) // 4
        self.prompt = text.replace("<|image_pad|>", "<|image_pad|>" * num_tokens)
        self.draws = random.Random(SEED + 3)
        self.generator = torch.Generator().manual_seed(SEED + 4)

    def draw(self, exact: bool) -> dict[str, Any]:
        """Return arguments of `forward` for a batch, with wrong answers unless `exact`."""
        import torch

        chosen = torch.randint(len(self.rows), (BATCH,), generator=self.generator)
        texts = [self.prompt + self._answer(self.rows[i], exact) + "<|end|>" for i in chosen]
        ids = self.tokenizer(texts, padding=True, return_tensors="pt", add_special_tokens=False)
        ids = ids["input_ids"]
        prompt = self.tokenizer(self.prompt, add_special_tokens=False)["input_ids"]
        labels = ids.masked_fill(ids == self.tokenizer.pad_token_id, -100)
        labels[:, : len(prompt)] = -100
        image = self.tokenizer.convert_tokens_to_ids("<|image_pad|>")
        return {
            "input_ids": ids,
            "labels": labels,
            "pixel_values": self.pixels[chosen].flatten(0, 1),
            "image_grid_thw": self.grid.expand(BATCH, -1),
            "mm_token_type_ids": (ids == image).int(),
        }

    def _answer(self, row: PromptRow, exact: bool) -> str:
        if exact or self.draws.random() >= CARELESS:
            return row.ground_truth
        return f"{self.draws.choice(list(COLOURS))} {self.draws.choice(SHAPES)}"


def _learning_rate(step: int) -> float:
    """Return the learning rate, which grows and then falls to 0."""
    warm = min(1.0, (step + 1) / WARMUP)
    return LEARNING_RATE * warm * 0.5 * (1 + math.cos(math.pi * step / STEPS))


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(real_path(VISION)))
