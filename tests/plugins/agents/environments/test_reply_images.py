"""Images in the replies of tools and environments: messages, and their tokens."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from rlctl.data_prep.decoded_images import opened, pattern
from rlctl.data_prep.images import data_url, images_in, with_parts
from rlctl.data_prep.message_parts import text_of
from rlctl.errors import ConfigError
from rlctl.plugins.agents.chat_bridge import ChatBridge
from rlctl.plugins.agents.environments.protocol import Step, step_from_json, step_to_json
from rlctl.plugins.agents.environments.tool import result_of_value
from rlctl.plugins.agents.environments.verl.base_classes import ToolResponse
from rlctl.plugins.agents.environments.verl.tools import result_of
from rlctl.runtime.base.image_processor import image_token, num_image_tokens, processor_of
from rlctl.runtime.data.image_prompts import ImagePrompts
from rlctl.runtime.data.tokenizer import load_tokenizer
from rlctl.runtime.serving.chat import Turn
from tests.vlm import settings, vlm_config, write_vlm

PICTURE = Image.new("RGB", (24, 16), (200, 30, 30))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_vlm("qwen2_5_vl", tmp_path_factory.mktemp("vlm"))


def bridge_of(folder: Path, reads: bool = True) -> ChatBridge:
    tokenizer = load_tokenizer(str(folder))
    images = ImagePrompts(settings(folder), tokenizer) if reads else None
    return ChatBridge(tokenizer, [1], images=images)


def message(*images: Any, text: str = "ab") -> dict[str, Any]:
    parts = [{"type": "image", "image": image} for image in images]
    return {"role": "user", "content": [*parts, {"type": "text", "text": text}]}


@pytest.mark.parametrize("image", [pattern(8, 8), "file", PICTURE, "url", data_url(pattern(8, 8))])
def test_a_step_carries_images_as_files(image: Any, tmp_path: Path) -> None:
    part: dict[str, Any] = {"type": "image", "image": image}
    if image == "file":
        (tmp_path / "a.png").write_bytes(pattern(8, 8))
        part["image"] = str(tmp_path / "a.png")
    elif image == "url":
        part = {"type": "image_url", "image_url": {"url": data_url(pattern(8, 8))}}
    sent = step_to_json(Step([{"role": "user", "content": [part, {"type": "text", "text": "b"}]}]))
    (received,) = step_from_json(sent).messages
    (found,) = images_in([received])
    if image is PICTURE:
        assert opened(found).tobytes() == PICTURE.tobytes()
    else:
        assert found == pattern(8, 8)
    assert text_of(received["content"]) == "<image>b"


def test_wrong_content_is_named() -> None:
    text = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    (found,) = step_from_json(step_to_json(Step([{"role": "user", "content": text}]))).messages
    assert found["content"] == "ab"
    for content, error in (
        ([{"type": "video", "video": "x"}], "a content part is .*, neither a text nor an image"),
        ([{"type": "image", "image": None}], "an image is bytes, a path"),
        (3, "the content of a message is 3, not a text"),
    ):
        with pytest.raises((TypeError, ValueError), match=error):
            step_to_json(Step([{"role": "user", "content": content}]))


def test_tools_return_images() -> None:
    alone = result_of_value(PICTURE)
    assert (alone.text, alone.images) == ("", [PICTURE])
    parts = result_of_value(message(PICTURE, text="red")["content"])
    assert (parts.text, parts.images) == ("red", [PICTURE])
    assert result_of_value([{"a": 1}]).text == '[{"a": 1}]'
    verl = result_of((ToolResponse(text="red", image=[PICTURE]), 0.5, {}))
    assert (verl.text, verl.reward, verl.images) == ("red", 0.5, (PICTURE,))
    with pytest.raises(TypeError, match="videos, which are not supported"):
        result_of(ToolResponse(text="", video=["x"]))


def test_replies_have_the_tokens_of_their_images(folder: Path) -> None:
    bridge, config = bridge_of(folder), vlm_config("qwen2_5_vl")
    processor = processor_of(str(folder), False)
    images = (pattern(40, 30), pattern(64, 64))
    expected = [num_image_tokens(processor.inputs([image]), config) for image in images]
    assert expected[0] != expected[1]
    ids = bridge.bridge_ids([20, 1], Turn("a"), [message(*images)], [])
    places = torch.tensor(ids) == image_token(config)
    runs = torch.unique_consecutive(places, return_counts=True)
    assert [int(n) for is_image, n in zip(*runs, strict=True) if is_image] == expected
    assert sum(bridge.shares([message(*images), message(text="c")], len(ids))) == len(ids)
    # Text is no image.
    ids = bridge.bridge_ids([20, 1], Turn("a"), [message(text="<|image_pad|> <image>")], [])
    assert image_token(config) not in ids
    with pytest.raises(ConfigError, match="a message has images, and the model or the engine"):
        bridge_of(folder, reads=False).bridge_ids([20, 1], Turn("a"), [message(*images)], [])


def test_the_images_of_a_row_are_in_its_messages() -> None:
    prompt = [{"role": "user", "content": "<image>a<image>"}, {"role": "user", "content": "b"}]
    images = (pattern(8, 8), pattern(9, 9))
    assert images_in(with_parts(prompt, images)) == images
    assert with_parts(prompt[1:], images) == prompt[1:]  # the environment has dropped them
    assert with_parts(prompt, ()) == prompt  # text
    with pytest.raises(ConfigError, match="refer to 2 images, and the row has 1"):
        with_parts(prompt, images[:1])
    buffer = io.BytesIO()
    PICTURE.save(buffer, "JPEG")
    assert data_url(buffer.getvalue()).startswith("data:image/jpeg;base64,")
