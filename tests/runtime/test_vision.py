"""Images in packed rows, their gradients, and decoding, against transformers' own passes.

Reward models see the images of a prompt: scores, conversations, training and use.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from rlctl import api
from rlctl.data_prep.rows import write_rows
from rlctl.data_prep.shapes import ShapesParams, shapes
from rlctl.data_prep.thumbnails import read_thumbnail
from rlctl.errors import ConfigError, RlctlError
from rlctl.recipes.compose import compose
from rlctl.runtime.base.batch import Prompts, Ragged
from rlctl.runtime.base.image_processor import image_token
from rlctl.runtime.data.conversations import Conversations
from rlctl.runtime.model import image_attention
from rlctl.runtime.model.attention import use_rlctl_attention
from rlctl.runtime.model.causal_lm import PolicyModel, ValueModel
from rlctl.runtime.model.load import load_config, load_model
from rlctl.runtime.model.lora import add_adapters
from rlctl.runtime.model.mapped import RankStorage
from rlctl.runtime.model.probe import check_model
from rlctl.runtime.model.reward_model import RewardModel
from rlctl.runtime.model.sequences import Sequences, prompt_numbers
from rlctl.runtime.model.tower import freeze_tower, image_processor, placeholder_ids
from rlctl.runtime.model.vision import SeenPrompt
from rlctl.runtime.planning.model_files import check_architecture
from rlctl.runtime.rollout.engine import SamplingParams
from rlctl.runtime.rollout.engine_weights import AdapterSync, EngineWeights, Selection
from rlctl.runtime.rollout.hf import HFEngine
from rlctl.runtime.rollout.vllm_engine.engine_images import tower_arguments, undivided_tower
from rlctl.runtime.rollout.vllm_engine.vllm_in_process import VLLMEngine
from rlctl.runtime.workers.micro_batches import count_tokens
from rlctl.tracking.jsonl import generations_file, read_generations
from tests.e2e.command import metrics
from tests.settings import given
from tests.tolerance import assert_all_as_exact, assert_as_exact
from tests.vlm import CHATS, FAMILIES, ids_of, prompts_of, settings, vlm_config, write_vlm
from tests.workers import experience

ROWS = [(0, "abc"), (0, "de"), (1, "fghij"), (3, "k"), (1, "l"), (2, "mn"), (3, "opq")]
STORAGE = RankStorage("cpu", torch.float32, torch.float32)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {kind: write_vlm(kind, root / kind) for kind in FAMILIES}


def loaded(folder: Path, kind: Any = "policy") -> Any:
    return load_model(settings(folder), kind, torch.float32, 0).eval()


def plain_models(folder: Path) -> tuple[Any, Any]:
    """Return models with transformers' eager attention, in float32 and in float64."""
    found = (loaded(folder), loaded(folder).double())
    for hf in found:
        hf.set_attn_implementation("eager")
    return found


@contextmanager
def token_by_token(hf: Any) -> Iterator[None]:
    """Compute gated delta nets without chunks.

    The rule inverts a matrix of each chunk, and packed rows have other chunks, so their rounding
    differs.
    """
    modeling, name = import_module(type(hf).__module__), "torch_chunk_gated_delta_rule"
    if not hasattr(modeling, name):
        yield
        return

    def rule(*qkv: Tensor, chunk_size: int = 0, **options: Any) -> Any:
        return modeling.torch_recurrent_gated_delta_rule(*qkv, **options)

    with patch.object(modeling, name, rule):
        yield


def as_wide(values: Tensor, hf: Any) -> Tensor:
    """Return numbers in the dtype of the model, others as they are."""
    return values.to(hf.dtype) if values.is_floating_point() else values


def packed(hf: Any, prompts: list[list[int]]) -> Sequences:
    ids = Ragged.from_rows([prompts[i] for i, _ in ROWS], torch.int64)
    responses = Ragged.from_rows([ids_of(text) for _, text in ROWS], torch.int64)
    images = [CHATS[i][1] for i, _ in ROWS]
    numbers = prompt_numbers(ids, None, images)
    sequences = Sequences.from_ragged(ids, responses, prompt_of_row=numbers)
    return sequences.with_images(hf, ids, responses, images)


def alone(hf: Any, prompt: list[int], response: str | list[int], images: Any) -> Tensor:
    """Return the log-probs of a response by transformers' own eager attention."""
    ids = torch.tensor([[*prompt, *(ids_of(response) if isinstance(response, str) else response)]])
    processor, given = image_processor(hf), {}
    if images:
        inputs = processor.inputs(images)
        names = ("pixel_values", "image_grid_thw")
        given = {name: as_wide(inputs[name], hf) for name in inputs if name in names}
        types = (ids == image_token(hf.config)).int()
        if "image_grid_thw" in given:
            given["mm_token_type_ids"] = types
        if hf.config.model_type == "gemma3":
            given["token_type_ids"] = types
    with token_by_token(hf):
        logits = hf(input_ids=ids, use_cache=False, **given).logits[0].log_softmax(-1)
    after = torch.arange(len(prompt), ids.shape[1])
    return logits[after - 1, ids[0, after]]


@pytest.mark.parametrize("kind", FAMILIES)
def test_packed_rows_are_exact_with_their_gradients(folders: dict[str, Path], kind: str) -> None:
    hf, prompts = loaded(folders[kind]), prompts_of(folders[kind])
    found = PolicyModel(hf, 1.0)(packed(hf, prompts)).log_probs
    assert found.requires_grad
    weights = torch.linspace(-1, 1, len(found))
    (found * weights).sum().backward()
    gradients = gradients_of(hf)
    second, exact = plain_models(folders[kind])
    scores = []
    for other in (second, exact):
        log_probs = torch.cat([alone(other, prompts[i], text, CHATS[i][1]) for i, text in ROWS])
        (log_probs * weights).sum().backward()
        scores.append(log_probs)
    assert_as_exact(found, *scores)
    assert_all_as_exact(gradients, gradients_of(second), gradients_of(exact))
    assert any(gradients[name].any() for name in gradients if "vis" in name)


def gradients_of(hf: Any) -> dict[str, Tensor]:
    """Return the gradient of each parameter, zeros without one."""
    return {
        name: torch.zeros_like(each) if each.grad is None else each.grad
        for name, each in hf.named_parameters()
    }


@pytest.mark.parametrize("kind", [kind for kind in FAMILIES if kind != "gemma3"])
def test_images_of_replies_are_exact(folders: dict[str, Path], kind: str) -> None:
    """An environment's reply in a response may have an image; rows share their prompt or not."""
    hf, prompts = loaded(folders[kind]), prompts_of(folders[kind])
    number, reply = image_token(hf.config), [*ids_of("ab"), *prompts[3], *ids_of("cd")]
    rows = [(0, reply, (CHATS[3][1])), (0, [*ids_of("e")], ()), (1, reply, (CHATS[3][1]))]
    rows += [(2, reply, (CHATS[3][1])), (0, reply, (CHATS[3][1]))]
    images = [(*CHATS[i][1], *more) for i, _, more in rows]
    ids = Ragged.from_rows([prompts[i] for i, _, _ in rows], torch.int64)
    responses = Ragged.from_rows([response for _, response, _ in rows], torch.int64)
    second, exact = (
        torch.cat([alone(hf, prompts[i], list(r), images[j]) for j, (i, r, _) in enumerate(rows)])
        for hf in plain_models(folders[kind])
    )
    written = responses.values != number
    for numbers in (None, prompt_numbers(ids, None, images)):
        sequences = Sequences.from_ragged(ids, responses, prompt_of_row=numbers)
        sequences = sequences.with_images(hf, ids, responses, images)
        found = PolicyModel(hf, 1.0)(sequences).log_probs
        assert found.isfinite().all()
        assert_as_exact(found[written], second[written], exact[written])


def test_images_of_replies_are_refused_for_gemma(folders: dict[str, Path]) -> None:
    hf, prompts = loaded(folders["gemma3"]), prompts_of(folders["gemma3"])
    ids = Ragged.from_rows([prompts[2]], torch.int64)
    responses = Ragged.from_rows([prompts[0]], torch.int64)
    with pytest.raises(ConfigError, match="replies may have no images with models of type gemma3"):
        Sequences.from_ragged(ids, responses).with_images(hf, ids, responses, [CHATS[0][1]])


@pytest.mark.parametrize("kind", FAMILIES)
def test_the_probe_accepts_families_that_are_exact(folders: dict[str, Path], kind: str) -> None:
    hf = loaded(folders[kind])
    check_model(PolicyModel(hf, 1.0), STORAGE)
    assert SeenPrompt.of(hf, torch.tensor(prompts_of(folders[kind])[0]), CHATS[0][1]).inputs


def test_the_probe_refuses_a_family_that_is_not_exact(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(image_attention, "LOOKS_AHEAD", ())
    hf = loaded(folders["gemma3"])
    check_model(PolicyModel(hf, 1.0), STORAGE)
    ids = torch.tensor(prompts_of(folders["gemma3"])[0])
    with pytest.raises(ConfigError, match=r"type gemma3 .* computed wrongly .* with images"):
        SeenPrompt.of(hf, ids, CHATS[0][1])
    assert SeenPrompt.of(hf, torch.tensor([1, 2]), ()).next_position == 2


@pytest.mark.parametrize("kind", FAMILIES)
def test_the_engine_decodes_as_the_trainer_scores(folders: dict[str, Path], kind: str) -> None:
    hf, prompts = loaded(folders[kind]), prompts_of(folders[kind])
    images = [images for _, images in CHATS]
    params = SamplingParams(
        temperature=1.0,
        top_p=1.0,
        top_k=-1,
        stop_token_ids=(1,),
        max_tokens=12,
        seed=7,
        n=2,
        images=images,
    )
    engine = HFEngine(hf, max_num_seqs=5)
    responses = engine.generate(Ragged.from_rows(prompts, torch.int64), params)
    ids, log_probs = responses.response_ids.rows(), responses.log_probs.rows()
    assert len({tuple(row.tolist()) for row in ids}) > 4
    banned = torch.tensor(placeholder_ids(hf.config))
    assert not torch.isin(responses.response_ids.values, banned).any()
    plain = plain_models(folders[kind])
    for number, (row, found) in enumerate(zip(ids, log_probs, strict=True)):
        chat = prompts[number // 2], row.tolist(), images[number // 2]
        assert_as_exact(found, *(alone(other, *chat) for other in plain))


def test_placeholders_have_no_probability(folders: dict[str, Path]) -> None:
    hf = loaded(folders["qwen2_5_vl"])
    with torch.no_grad():
        hf.lm_head.weight[placeholder_ids(hf.config)] = 100.0
        hf.set_attn_implementation("eager")
        logits = hf(input_ids=torch.tensor([[2, 20, 21]]), use_cache=False).logits
    probs = logits.softmax(-1)
    assert not probs[..., placeholder_ids(hf.config)].any()
    assert torch.allclose(probs.sum(-1), torch.ones(1))
    use_rlctl_attention(hf)
    outputs = PolicyModel(hf, 1.0)(packed(hf, prompts_of(folders["qwen2_5_vl"])), True, True)
    for values in (outputs.log_probs, outputs.entropy, outputs.sum_pi_squared):
        assert values.isfinite().all()


def test_the_number_of_tokens_is_checked(folders: dict[str, Path]) -> None:
    hf, (prompt, *_) = loaded(folders["qwen3_vl"]), prompts_of(folders["qwen3_vl"])
    image = placeholder_ids(hf.config)[0]
    prompt.remove(image)
    with pytest.raises(RlctlError, match="3 tokens of images, and its 1 images give 4") as caught:
        SeenPrompt.of(hf, torch.tensor(prompt), CHATS[0][1])
    assert "the row with images of SHA-256 " in str(caught.value)
    prompts = Ragged.from_rows([prompts_of(folders["qwen3_vl"])[0]], torch.int64)
    response = Ragged.from_rows([[20, image]], torch.int64)
    sequences = Sequences.from_ragged(prompts, response)
    with pytest.raises(RlctlError, match=r"the response in row 0 .* has tokens of images"):
        sequences.with_images(hf, prompts, response, [CHATS[0][1]])


def test_the_vision_tower_is_frozen_by_choice(folders: dict[str, Path]) -> None:
    hf = loaded(folders["qwen2_5_vl"])
    freeze_tower(hf, freezes=False)
    assert all(parameter.requires_grad for parameter in hf.parameters())
    freeze_tower(hf)
    trained = {name for name, each in hf.named_parameters() if each.requires_grad}
    frozen = {name for name, each in hf.named_parameters() if not each.requires_grad}
    assert {name.split(".")[1] for name in frozen} == {"visual"}
    assert {name.split(".")[1] for name in trained} == {"language_model", "weight"}


def test_adapters_are_of_the_language_model(folders: dict[str, Path]) -> None:
    model = settings(folders["qwen3_vl"]).model_copy(
        update={"lora_rank": 2, "target_modules": ["all-linear"]}
    )
    hf, prompts = loaded(folders["qwen3_vl"]), prompts_of(folders["qwen3_vl"])
    before = PolicyModel(hf, 1.0)(packed(hf, prompts)).log_probs.detach()
    add_adapters(hf, model, 0)
    assert torch.equal(PolicyModel(hf, 1.0)(packed(hf, prompts)).log_probs.detach(), before)
    trained = {name for name, each in hf.named_parameters() if each.requires_grad}
    assert trained
    assert all(name.startswith("model.language_model.") for name in trained)
    PolicyModel(hf, 1.0)(packed(hf, prompts)).log_probs.sum().backward()
    assert any(each.grad is not None and each.grad.any() for each in hf.parameters())


def test_a_critic_reads_images(folders: dict[str, Path]) -> None:
    hf, prompts = loaded(folders["qwen3_5"], "backbone"), prompts_of(folders["qwen3_5"])
    model = ValueModel(hf)
    torch.nn.init.normal_(model.head.weight)
    values = model(packed(hf, prompts)).detach()
    # Rows 0 and 3 have the same tokens and other images.
    first, fourth = values[0], values[10]
    assert abs(float(first - fourth)) > 1e-3


@pytest.mark.parametrize("freezes", [True, False])
def test_a_frozen_tower_is_sent_once(folders: dict[str, Path], freezes: bool) -> None:
    hf = loaded(folders["qwen2_5_vl"])
    freeze_tower(hf, freezes)
    weights = EngineWeights(hf, AdapterSync.MERGED)
    frozen, changing, all_of_them = (
        [name for name, _ in weights.parameters(selection)]
        for selection in (Selection.FROZEN, Selection.CHANGING, Selection.ALL)
    )
    assert sorted([*frozen, *changing]) == sorted(all_of_them)
    assert all(name.startswith("model.visual.") is (name in frozen) for name in all_of_them) is (
        freezes
    )
    assert bool(frozen) is freezes
    assert [name for name, *_ in weights.rows(Selection.FROZEN, 0)] == frozen


@pytest.mark.parametrize("kind", FAMILIES)
def test_ranks_of_vllm_divide_a_tower_or_its_images(kind: str) -> None:
    config = vlm_config(kind)  # 2 heads
    assert not tower_arguments(config, 2)
    assert not undivided_tower(config, 2)
    if kind == "gemma3":
        (problem,) = undivided_tower(config, 4)
        key = "actor_rollout_ref.rollout.tensor_model_parallel_size"
        assert f"{key}=4 does not divide the 2 attention heads of the vision" in problem.message
        assert f"{key}=2" in str(problem.hint)
    else:
        assert tower_arguments(config, 4) == {"mm_encoder_tp_mode": "data"}
        assert not undivided_tower(config, 4)


def test_vllm_refuses_images_whose_tokens_look_ahead() -> None:
    assert VLLMEngine.no_images_of == image_attention.LOOKS_AHEAD


@pytest.mark.parametrize("kind", FAMILIES)
def test_a_patch_counts_as_a_token_of_the_budget(folders: dict[str, Path], kind: str) -> None:
    hf, prompts = loaded(folders[kind]), prompts_of(folders[kind])
    batch = experience()
    ids = batch.response_ids.values
    batch = replace(
        batch,
        response_ids=batch.response_ids.like(torch.where(ids < 20, ids + 20, ids)),
        prompt_ids=Ragged.from_rows([prompts[i % 4] for i in range(8)], torch.int64),
        images=[CHATS[i % 4][1] for i in range(8)],
    )
    counts, processor = count_tokens(PolicyModel(hf, 1.0), batch), image_processor(hf)
    for i, (_, own) in enumerate(CHATS):
        patches = sum(_num_patches(part["pixel_values"], hf) for part in processor.parts(own))
        assert int(counts.prompt_lengths[i]) == len(prompts[i]) + patches
        assert int(counts.lengths[i]) == int(batch.num_tokens[i]) + patches
    assert counts.prompt[0] == counts.prompt[4]


def _num_patches(pixels: Tensor, hf: Any) -> int:
    """Return the patches of an image: rows (P, C), or tiles (N, 3, H, W) of patches of 8 pixels."""
    size = hf.config.vision_config.patch_size
    size = size if isinstance(size, int) else size[0]
    return len(pixels) if pixels.dim() == 2 else len(pixels) * (pixels.shape[-1] // size) ** 2


# Without a classifier of transformers, and renamed when saved; with one; not causal.
FILE = "model.safetensors"
KINDS = ("qwen2_5_vl", "qwen3_5", "gemma3")


def score_alone(hf: Any, ids: list[int], images: tuple[bytes, ...]) -> float:
    """Return the score of a conversation by transformers' classifier and eager attention."""
    row, processor, given = torch.tensor([ids]), image_processor(hf), dict[str, Any]()
    if images and processor is not None:
        names = ("pixel_values", "image_grid_thw")
        inputs = processor.inputs(images)
        given = {key: as_wide(value, hf) for key, value in inputs.items() if key in names}
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
        chats = [([*prompts[i], *ids_of(text)], CHATS[i][1]) for i, text in rows]
        second = [score_alone(again, *chat) for chat in chats]
        exact = [score_alone(again.double(), *chat) for chat in chats]
    assert len({round(score, 4) for score in exact}) == len(rows)
    assert_as_exact(found, torch.tensor(second), torch.tensor(exact, dtype=torch.float64))


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


@pytest.mark.plugin("objectives")
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
