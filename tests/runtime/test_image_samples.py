"""Samples of prompts with images: their text and the digests of their images."""

from __future__ import annotations

from dataclasses import replace
from hashlib import sha256

import torch

from rlctl.data_prep.rows import PromptRow
from rlctl.quickstart import VISION, real_path
from rlctl.runtime.batch import Ragged
from rlctl.runtime.data.tokenizer import encode_text, load_tokenizer
from rlctl.runtime.training.validation import to_samples
from tests.numerics.batches import scored_batch

IMAGE = "<|vision_start|><|image_pad|><|image_pad|><|image_pad|><|vision_end|>"


def test_an_image_is_one_word_of_the_prompt() -> None:
    tokenizer = load_tokenizer(real_path(VISION))
    texts = [f"<|user|>{IMAGE}red or {IMAGE}blue?", "<|user|><|image_pad|><|image_pad|>"]
    ids = [torch.tensor(encode_text(tokenizer, text)) for text in texts]
    scored = replace(scored_batch(), rows=[PromptRow("x", [], "t")] * 4)
    own = (b"one", b"two")
    batch = replace(
        scored,
        prompt_ids=Ragged.from_rows([ids[0], ids[0], ids[1], ids[1]], dtype=torch.int64),
        images=[own, own, (), ()],
        scores=torch.zeros(4),
        failed=torch.tensor([True, False, False, False]),
    )
    first, second, third, fourth = to_samples(batch, tokenizer)
    shown = "<|vision_start|><image><|vision_end|>"
    assert first.prompt == second.prompt == f"<|user|>{shown}red or {shown}blue?"
    digests = tuple(sha256(image).hexdigest() for image in own)
    assert first.images == second.images == digests
    assert third.prompt == fourth.prompt == texts[1]
    assert third.images == ()
    assert [first.verdict, second.verdict] == ["reward failed", "wrong"]
    assert [sample.images for sample in to_samples(scored, tokenizer)] == [()] * 4
