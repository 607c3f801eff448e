"""Images in vLLM: log-probs are those of the trainer, for every family that it computes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rlctl.errors import RlctlError
from rlctl.runtime.batch import Ragged
from rlctl.runtime.batch.images import placeholder_ids
from rlctl.runtime.rollout.requests import Decoding, Request
from tests.generation import engine_spec, sampling
from tests.runtime.test_vision import alone, loaded
from tests.runtime.test_vllm_types import measured
from tests.vlm import CHATS, FAMILIES, prompts_of, write_vlm

pytestmark = pytest.mark.extra("vllm")
VLLM = "actor_rollout_ref.rollout.name=vllm"
SAMPLE = ("qwen3_vl", "internvl")  # the others are tested by `make soak`
IMAGES = [images for _, images in CHATS]


@pytest.fixture(scope="module")
def vllm(tmp_path_factory: pytest.TempPathFactory) -> None:
    from rlctl.runtime.rollout.vllm_engine.startup import prepare

    prepare(engine_spec(tmp_path_factory.mktemp("none"), VLLM))


def weights(hf: Any) -> Iterator[tuple[str, Tensor]]:
    return ((name, value.detach()) for name, value in hf.named_parameters())


def largest_difference(kind: str, folder: Path) -> tuple[float, list[int]]:
    """Return the largest difference of a log-prob, and how many images each call encoded."""
    from rlctl.runtime.rollout.vllm_engine.engine import VLLMEngine
    from rlctl.runtime.rollout.vllm_engine.weights import model_runner

    hf, prompts = loaded(write_vlm(kind, folder)), prompts_of(folder)
    with torch.no_grad():  # placeholders would be sampled
        hf.lm_head.weight[placeholder_ids(hf.config)] *= 20
    hf.set_attn_implementation("eager")
    engine = VLLMEngine.from_spec(engine_spec(folder, VLLM, max_length=128), None)
    encoded, model = list[int](), model_runner(engine.llm).get_model()
    encode = model.embed_multimodal

    def count(**inputs: Any) -> Any:
        found = encode(**inputs)
        encoded.append(len(found))
        return found

    model.embed_multimodal = count
    worst = 0.0
    for _ in range(2):  # the tower of the second weights is another one
        engine.load_weights(weights(hf))
        params = sampling(images=IMAGES, n=3, stop_token_ids=(1,), max_tokens=12)
        found = engine.generate(Ragged.from_rows(prompts, torch.int64), params)
        for row, ids in enumerate(found.response_ids.rows()):
            expected = alone(hf, prompts[row // 3], ids.tolist(), IMAGES[row // 3])
            worst = max(worst, float((found.log_probs.rows()[row] - expected).abs().max()))
        assert not torch.isin(
            found.response_ids.values, torch.tensor(placeholder_ids(hf.config))
        ).any()
        with torch.no_grad():
            for parameter in hf.parameters():
                parameter.mul_(0.9)
    context, decoding = torch.tensor(prompts[0]), Decoding(1.0, 1.0, -1, ())
    request = Request(0, context, decoding, (4,), (0,), images=IMAGES[1])
    with pytest.raises(RlctlError, match="tokens of images, and its 2 images give"):
        engine.submit([request])
    return worst, encoded


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(kind, marks=() if kind in SAMPLE else pytest.mark.soak)
        for kind in FAMILIES
        if kind != "gemma3"
    ],
)
@pytest.mark.usefixtures("vllm")
def test_log_probs_are_those_of_the_trainer(kind: str, tmp_path: Path) -> None:
    """An image of a group is encoded once for each weights."""
    found = measured(largest_difference, kind, tmp_path)
    assert not isinstance(found, str), found
    worst, encoded = found
    assert worst <= 1e-5
    assert sum(encoded) == 2 * len({image for images in IMAGES for image in images})
