"""Prompts with images: lengths, batches, cached lengths, refusals, and their samples."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import torch

from rlctl import api
from rlctl.data_prep import decoded_images
from rlctl.data_prep.rows import PromptRow, write_rows
from rlctl.errors import ConfigError, MissingExtraError
from rlctl.quickstart import NAME, VISION, real_path
from rlctl.recipes import schema
from rlctl.runtime.algorithms.base import Needs
from rlctl.runtime.base import image_processor as batch_images
from rlctl.runtime.base.batch import Batch, Ragged
from rlctl.runtime.base.image_processor import ImageProcessor, num_image_tokens
from rlctl.runtime.data import row_table
from rlctl.runtime.data.image_prompts import ImagePrompts
from rlctl.runtime.data.loader import PromptSet
from rlctl.runtime.data.tokenizer import encode_text, load_tokenizer
from rlctl.runtime.planning.image_check import check_images
from rlctl.runtime.training.validation import to_samples
from tests.configs import configured
from tests.numerics.batches import scored_batch
from tests.plugin_folders import of_settings
from tests.vlm import CHATS, noise, prompts_of, settings, vlm_config, write_vlm

LONG = PromptRow("s", [{"role": "user", "content": "<image>long"}], "4", images=(noise(64, 64, 5),))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_vlm("qwen2_5_vl", tmp_path_factory.mktemp("vlm"))


@pytest.fixture
def rows(tmp_path: Path) -> list[PromptRow]:
    chats = [([{"role": "user", "content": text}], own) for text, own in CHATS]
    made = [PromptRow("s", chat, str(i), images=own) for i, (chat, own) in enumerate(chats)]
    write_rows(tmp_path / "x.parquet", [*made, LONG])
    return [*made, LONG]


def loaded(tmp_path: Path, folder: Path, values: Iterable[str] = ()) -> PromptSet:
    given = [f"data.train_files=[{tmp_path}/x.parquet]", "data.max_prompt_length=20", *values]
    data = configured("ppo", (), given).data
    return PromptSet.load_train(data, load_tokenizer(str(folder)), settings(folder))


@pytest.mark.parametrize("cached", [False, True])
def test_batches_have_expanded_prompts_and_images(
    cached: bool, rows: list[PromptRow], tmp_path: Path, folder: Path, monkeypatch: Any
) -> None:
    if cached:
        monkeypatch.setattr(row_table, "LARGE_BYTES", 0)
        monkeypatch.setenv("RLCTL_CACHE", str(tmp_path / "cache"))
    for _ in range(2):
        found = loaded(tmp_path, folder)
        assert found.num_dropped == 1
        batch = found.batch([3, 0, 2])
        prompts = prompts_of(folder)
        assert [ids.tolist() for ids in batch.prompt_ids.rows()] == [prompts[i] for i in (3, 0, 2)]
        assert batch.images == [rows[i].images for i in (3, 0, 2)]
        repeated = batch.repeat(2).select(torch.tensor([5, 0]))
        joined = Batch.concat([repeated, batch])
        assert joined.images == [(), rows[3].images, *batch.images]


def test_lengths_of_images_in_other_files_are_counted_at_each_start(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(row_table, "LARGE_BYTES", 0)
    monkeypatch.setenv("RLCTL_CACHE", str(tmp_path / "cache"))
    file = tmp_path / "a.png"
    file.write_bytes(noise(32, 32, 1))
    row = PromptRow("s", [{"role": "user", "content": "<image>"}], "4", images=(str(file),))
    write_rows(tmp_path / "x.parquet", [row])
    assert loaded(tmp_path, folder).mean_length == 9
    file.write_bytes(noise(48, 48, 1))
    assert loaded(tmp_path, folder).mean_length == 14


@pytest.mark.parametrize("truncation", ["left", "right", "middle", "error"])
def test_an_image_is_never_cut(
    truncation: str, rows: list[PromptRow], tmp_path: Path, folder: Path
) -> None:
    values = ["data.filter_overlong_prompts=false", f"data.truncation={truncation}"]
    if truncation == "error":
        with pytest.raises(ConfigError, match=r"longer than data.max_prompt_length=20"):
            loaded(tmp_path, folder, values)
        return
    found = loaded(tmp_path, folder, values)
    assert found.num_dropped == 1
    assert [row.ground_truth for row in found.rows] == [row.ground_truth for row in rows[:4]]
    values += ["data.max_prompt_length=11"]  # text is cut
    found = loaded(tmp_path, folder, values)
    assert [row.ground_truth for row in found.rows] == ["2"]
    assert found.batch([0]).prompt_ids.lengths.tolist() == [11]


def test_a_model_for_text_and_a_missing_package_are_named(
    rows: list[PromptRow], tmp_path: Path, folder: Path, monkeypatch: Any
) -> None:
    del rows
    with pytest.raises(ConfigError, match="the model reads text alone"):
        loaded(tmp_path, Path(real_path(NAME)))
    monkeypatch.setattr(decoded_images, "find_spec", lambda _: None)
    with pytest.raises(MissingExtraError) as caught:
        loaded(tmp_path, folder)
    assert "rlctl[images]" in str(caught.value.problems[0].hint)


def test_a_size_that_the_model_refuses_is_named(folder: Path) -> None:
    reader = ImagePrompts(settings(folder), load_tokenizer(str(folder)))
    with pytest.raises(ConfigError, match="an image of 4099 × 3 pixels is refused by the model's"):
        reader._tokens_of_size((4099, 3))


@pytest.mark.parametrize(
    ("setting", "message"),
    of_settings(
        [
            ("actor_rollout_ref.rollout.name=sglang", "the engine sglang"),
            (
                f"critic.model.path={real_path(NAME)}",
                f"{real_path(NAME)}, the model of the critic, reads text alone and",
            ),
            (
                "actor_rollout_ref.actor.fsdp_config.ulysses_sequence_parallel_size=2",
                "the actor, whose ranks divide rows or layers,",
            ),
        ]
    ),
)
def test_what_takes_no_images_is_refused(
    setting: str, message: str, rows: list[PromptRow], tmp_path: Path, folder: Path
) -> None:
    del rows
    needs = Needs.GROUPS | Needs.ENGINE | Needs.CRITIC

    def check(*values: str) -> None:
        model = f"actor_rollout_ref.model.path={folder}"
        critic = f"critic.model.path={folder}"
        config: schema.Config = configured(
            "ppo", (), ["actor_rollout_ref.rollout.name=hf", model, critic, *values]
        )
        check_images(config, None, needs)

    check()
    with pytest.raises(ConfigError, match=f"{message} takes no rows with images"):
        check(setting)


def test_lengths_are_counted_without_pixels(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reader = ImagePrompts(settings(folder), load_tokenizer(str(folder)))
    process, sizes = ImageProcessor.process, list[Any]()
    monkeypatch.setattr(
        ImageProcessor, "process", lambda *args: sizes.append(args[1].size) or process(*args)
    )
    chat = [{"role": "user", "content": "<image>"}]
    for size in [(64, 20), (17, 50), (300, 40)]:
        image = noise(*size, 1)
        text = reader.render(chat, [image])
        assert sizes == [(112, 56)]  # an example
        (inputs,) = reader.images.parts([image])
        assert text.count("<|image_pad|>") == num_image_tokens(inputs, vlm_config("qwen2_5_vl"))
        sizes.pop()


def test_processed_images_are_kept_up_to_a_limit(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    processor = ImageProcessor(vlm_config("qwen2_5_vl"), str(folder))
    first, *others = [noise(32, 32, seed) for seed in range(4)]
    (one,) = processor.parts([first])
    size = sum(value.nbytes for value in one.values())
    monkeypatch.setattr(batch_images, "_CACHE_BYTES", 3 * size)
    (again,) = processor.parts([first])
    assert again is one
    processor.parts([*others[:2], first, others[2]])  # drops the second image
    assert processor.parts([first])[0] is one
    processor.parts([others[0], others[1]])
    assert processor.parts([first])[0] is one


def test_prompts_are_answered_about_images(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(noise(40, 30, 1))

    def answers(*prompts: str, images: Sequence[str | bytes] = ()) -> list[Any]:
        return api.generate(folder, prompts, max_tokens=4, images=images)

    first, second = answers("<image>what?", "what?", images=[str(tmp_path / "a.png")])
    assert first.prompt == second.prompt == "<image>what?"
    assert first == second
    (other,) = answers("what?", images=[noise(40, 30, 4)])
    assert other.log_prob != first.log_prob
    with pytest.raises(ConfigError, match="refer to 1 images, and the row has 2"):
        answers("<image>what?", images=[noise(40, 30, 1)] * 2)
    with pytest.raises(ConfigError, match="an image cannot be read"):
        answers("what?", images=[str(tmp_path / "b.png")])


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
