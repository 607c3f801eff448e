"""Reward models that see the images of a prompt: scores, conversations, training and use."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from rlctl import api
from rlctl.data_prep.rows import write_rows
from rlctl.data_prep.shapes import ShapesParams, shapes
from rlctl.errors import ConfigError
from rlctl.recipes.compose import compose
from rlctl.runs.thumbnails import read_thumbnail
from rlctl.runtime.batch import Prompts, Ragged
from rlctl.runtime.batch.images import image_token
from rlctl.runtime.data.conversations import Conversations
from rlctl.runtime.model.load import load_config, load_model
from rlctl.runtime.model.reward_model import RewardModel
from rlctl.runtime.model.sequences import Sequences, prompt_numbers
from rlctl.runtime.model.vision import image_processor
from rlctl.runtime.planning.model_files import check_architecture
from rlctl.tracking.jsonl import generations_file, read_generations
from tests.e2e.command import metrics
from tests.settings import given
from tests.vlm import CHATS, ids_of, prompts_of, settings, write_vlm

# Without a classifier of transformers, and renamed when saved; with one; not causal.
FILE = "model.safetensors"
KINDS = ("qwen2_5_vl", "qwen3_5", "gemma3")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {kind: write_vlm(kind, root / kind) for kind in KINDS}


def score_alone(hf: Any, ids: list[int], images: tuple[bytes, ...]) -> float:
    """Return the score of a conversation by transformers' classifier and eager attention."""
    row, processor, given = torch.tensor([ids]), image_processor(hf), dict[str, Any]()
    if images and processor is not None:
        names = ("pixel_values", "image_grid_thw")
        given = {key: value for key, value in processor.inputs(images).items() if key in names}
        kind = "token_type_ids" if hf.config.model_type == "gemma3" else "mm_token_type_ids"
        given[kind] = (row == image_token(hf.config)).int()
    return float(hf(input_ids=row, use_cache=False, **given).logits.squeeze())


@pytest.mark.parametrize("kind", KINDS)
def test_scores_of_packed_rows_are_those_of_transformers(
    folders: dict[str, Path], kind: str, tmp_path: Path
) -> None:
    hf: Any = load_model(settings(folders[kind]), "new_classifier", torch.float32, 0).eval()
    hf.save_pretrained(tmp_path)
    for file in folders[kind].glob("*processor_config.json"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    again = load_model(settings(tmp_path), "classifier", torch.float32, 1).eval()
    assert again.config.architectures == [type(hf).__name__]
    assert "ForSequenceClassification" in type(hf).__name__
    prompts, rows = prompts_of(folders[kind]), [(0, "abc"), (0, "de"), (1, "fg"), (2, "h")]
    ids = Ragged.from_rows([prompts[i] for i, _ in rows], torch.int64)
    responses = Ragged.from_rows([ids_of(text) for _, text in rows], torch.int64)
    images = [CHATS[i][1] for i, _ in rows]
    sequences = Sequences.from_ragged(
        ids, responses, prompt_of_row=prompt_numbers(ids, None, images)
    )
    with torch.no_grad():
        found = RewardModel(hf)(sequences.with_images(hf, ids, responses, images))
        again.set_attn_implementation("eager")
        expected = [
            score_alone(again, [*prompts[i], *ids_of(text)], CHATS[i][1]) for i, text in rows
        ]
    assert len({round(score, 4) for score in expected}) == len(rows)
    assert found.tolist() == pytest.approx(expected, abs=1e-6)


def test_a_model_that_writes_text_gives_no_score(folders: dict[str, Path]) -> None:
    model = settings(folders["qwen2_5_vl"])
    (problem,) = check_architecture(model, load_config(model, "classifier"), "classifier", "key")
    assert "is a Qwen2_5_VLForConditionalGeneration, which writes text" in problem.message


def conversations(folder: Path, max_length: int | None = None) -> Conversations:
    section = compose("ppo_reward_model", []).config.reward.reward_model
    update = {"model": settings(folder), "max_length": max_length}
    return Conversations.from_config(section.model_copy(update=update))


def test_a_long_conversation_loses_text_and_no_image(folders: dict[str, Path]) -> None:
    words, (_, images) = conversations(folders["qwen2_5_vl"]), CHATS[0]
    chat = [
        {"role": "user", "content": "<image>what?"},
        {"role": "assistant", "content": "no"},
    ]
    whole = words.encode(chat, images)
    token = image_token(words.config)
    (prompt, *_) = prompts_of(folders["qwen2_5_vl"])
    owner = Prompts(
        prompt_ids=Ragged.from_rows([prompt], torch.int64),
        group=torch.tensor([0]),
        rows=[],
        images=[images],
    )
    end = max(i for i, number in enumerate(whole) if number == token) + 1
    for limit, kept in [(None, whole), (end + 3, whole[:end] + whole[-3:])]:
        cut = conversations(folders["qwen2_5_vl"], limit)
        row = cut.to_rollouts(owner, [cut.encode(chat, images)])
        assert [*row.prompt_ids.values, *row.response_ids.values] == kept
        assert token not in row.response_ids.values
        assert row.images == [images]
    assert len(row.prompt_ids.values) == end
    with pytest.raises(ConfigError, match=f"images of a conversation take {end} of at most {end}"):
        conversations(folders["qwen2_5_vl"], end).encode(chat, images)


def test_the_text_of_a_response_refers_to_no_image(folders: dict[str, Path]) -> None:
    words, (_, images) = conversations(folders["qwen2_5_vl"]), CHATS[0]
    prompt, token = {"role": "user", "content": "<image>what?"}, image_token(words.config)
    plain, other = (
        words.encode([prompt, {"role": "assistant", "content": text}], images)
        for text in ("no", "<image>")
    )
    assert plain.count(token) == other.count(token)


def test_a_policy_learns_from_a_model_that_saw_pictures(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    for split, rows in shapes(ShapesParams(train=8, val=2)).items():
        for row, other in zip(rows, [*rows[1:], rows[0]], strict=True):
            row.extra_info["chosen"] = row.ground_truth
            row.extra_info["rejected"] = f"{other.ground_truth} <image>"
        write_rows(tmp_path / f"{split}.parquet", rows)
    train, val = (f"{tmp_path}/{split}.parquet" for split in ("train", "val"))
    both = given(train=train, val=val, batch=8, steps=1, validate=1, save=1)
    both += given(runs=f"{tmp_path}/runs", project="p", logger=[])
    scorer, model = "reward.reward_model", folders["qwen2_5_vl"]
    sizes = (f"{scorer}.optim.lr=1e-3", f"{scorer}.ppo_mini_batch_size=8")
    trained = (*given(name="rm"), f"{scorer}.model.path={model}", *sizes)
    run = api.train(compose("rm_trainer", [*both, *trained]), inline=True).path
    *_, last = metrics(run)
    assert 0 <= last["val-core/rlctl/shapes/acc/mean@1"] <= 1
    assert last["reward_model/grad_norm"] > 0
    (sample, *_) = read_generations(generations_file(run, 1))
    assert "<image>" in sample.prompt
    assert read_thumbnail(run, sample.images[0])
    export = run / "checkpoints" / "step_000001" / "huggingface"
    weights, before = load_file(export / FILE), load_file(model / FILE)
    assert not torch.equal(weights["score.weight"], torch.zeros_like(weights["score.weight"]))
    changed = {name for name in before.keys() & weights if weights[name].ne(before[name]).any()}
    assert changed
    assert {name for name in before if "visual" in name} <= weights.keys() - changed
    policy = given(name="policy", model=model, n=2, mini_batch=8, prompt=64, response=6, val=None)
    uses = (f"{scorer}.enable=true", f"{scorer}.model.path=rm", f"{scorer}.normalize=model")
    recipe = compose("grpo_trainer", [*both, *policy, *uses])
    *_, last = metrics(api.train(recipe, inline=True).path)
    assert last["reward/reward_model/mean"] != last["critic/score/mean"]  # normalized
