"""Log-probs that vLLM reports are those of the trainer, for every type of model that it runs.

So they are for every family that reads images. Each engine has a process of its own, a fork of this
one: vLLM keeps much of a model that it failed to start.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import CONFIG_MAPPING, PreTrainedConfig, PreTrainedModel

from rlctl.errors import RlctlError
from rlctl.recipes.compose import compose
from rlctl.runtime.base.batch import Ragged
from rlctl.runtime.model.adapter_names import engine_parameters
from rlctl.runtime.model.padded_rows import use_own_attention
from rlctl.runtime.model.routing import SUPPORTED, routing_shape
from rlctl.runtime.model.tower import placeholder_ids
from rlctl.runtime.planning.preflight import check_model
from rlctl.runtime.rollout.engine import Responses, SamplingParams
from rlctl.runtime.rollout.requests import Decoding, Request
from tests.generation import engine_spec, recomputed, sampling
from tests.miniatures import IN_VLLM, REFUSED, ROUNDED_IN_VLLM, TYPES, miniature, miniature_config
from tests.runtime.test_vision import alone, loaded
from tests.skips import sampled
from tests.vlm import CHATS, FAMILIES, prompts_of, write_vlm

pytestmark = pytest.mark.extra("vllm")
SAMPLE = {"qwen3_5_text", "gemma4_text"}  # the others are tested by `make soak`
KINDS = [kind for kind in TYPES if kind not in REFUSED]
VLLM = "actor_rollout_ref.rollout.name=vllm"
_MLA = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_head_dim": 72, "head_dim": 64}
# Fields that checkpoints have, and the defaults of transformers lack; sizes of vLLM's kernels.
FIELDS: dict[str, dict[str, Any]] = {
    "afmoe": {"score_func": "sigmoid"},
    "deepseek_v2": _MLA | {"topk_method": "greedy", "scoring_func": "softmax"},
    "deepseek_v3": _MLA | {"topk_method": "noaux_tc", "scoring_func": "sigmoid"},
    "glm4_moe": {"head_dim": 8},
    "llama4": {"attention_chunk_size": 128},
    "llama4_text": {"attention_chunk_size": 128},
    "minimax_m2": {"rotary_dim": 4, "scoring_func": "sigmoid"},
}


# Types whose experts vLLM on a CPU does not return: their caches have several groups of layers.
WITHOUT_EXPERTS = {"exaone_moe", "qwen3_5_moe", "qwen3_5_moe_text", "qwen3_next"}
LIMITS = torch.tensor([12, 2, 5, 8, 1, 7])  # tokens: rows join and leave


def arbitrary_prompts() -> Ragged:
    generator = torch.Generator().manual_seed(1)
    rows = [torch.randint(3, 128, (length,), generator=generator) for length in (5, 9, 5)]
    return Ragged.from_rows(rows)


def largest_difference(kind: str, folder: Path, shares: bool) -> float:
    """Return the largest difference of a log-prob; `shares`: the engine may share parameters."""
    model, found = generated(kind, folder, shares)
    use_own_attention(model, "eager")
    expected = recomputed(model, arbitrary_prompts(), found)
    return float((found.log_probs.values - expected).abs().max())


def generated(
    kind: str, folder: Path, shares: bool, routes: bool = False
) -> tuple[PreTrainedModel, Responses]:
    """Return a miniature, and responses of vLLM with its weights."""
    from rlctl.runtime.rollout.vllm_engine.vllm_in_process import VLLMEngine

    model = miniature(kind, folder, **FIELDS.get(kind, {}))
    model.save_pretrained(folder)
    spec = replace(engine_spec(folder, VLLM), routing=routing_shape(model) if routes else None)
    engine = VLLMEngine.from_spec(spec, model if shares else None)
    engine.load_weights(engine_parameters(model, lambda _: True))
    sampling = SamplingParams(1.0, 1.0, -1, (), LIMITS, 7, 2)
    return model, engine.generate(arbitrary_prompts(), sampling)


def num_other_experts(kind: str, folder: Path) -> int:
    """Return how many of the experts that vLLM records are not those of the trainer."""
    from tests.runtime.test_engine_contract import own_experts

    prompt_ids = arbitrary_prompts()
    model, found = generated(kind, folder, shares=False, routes=True)
    assert found.routing is not None
    pairs = zip(found.routing.rows(), found.response_ids.rows(), strict=True)
    others = 0
    for row, (experts, ids) in enumerate(pairs):
        own = own_experts(model, prompt_ids.rows()[row // 2], ids)
        assert experts[:-1].shape == own.shape
        others += int((experts[:-1].sort(-1).values != own.sort(-1).values).sum())
    return others


def outcome(function: Callable[..., Any], args: tuple[Any, ...], answer: Connection) -> None:
    try:
        answer.send(function(*args))
    except Exception as error:  # no class of vLLM for it, or one that fails
        answer.send(str(error) or type(error).__name__)


@pytest.fixture(scope="module")
def vllm(tmp_path_factory: pytest.TempPathFactory) -> None:
    from rlctl.runtime.rollout.vllm_engine.vllm_startup import prepare

    prepare(engine_spec(tmp_path_factory.mktemp("none"), VLLM))


def measured(function: Callable[..., Any], *args: Any) -> Any:
    """Return what a function finds in a fork of this process, or the text of its error."""
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=outcome, args=(function, args, sender))
    process.start()
    sender.close()
    try:
        assert receiver.poll(300), "no answer in 300 s"
        return receiver.recv()
    finally:
        process.kill()
        process.join()


@pytest.mark.parametrize("shares", [True, pytest.param(False, marks=pytest.mark.soak)])
@pytest.mark.parametrize("kind", sampled(KINDS, SAMPLE))
@pytest.mark.usefixtures("vllm")
def test_log_probs_are_those_of_the_trainer(kind: str, shares: bool, tmp_path: Path) -> None:
    """Parameters are shared with vLLM where their layouts agree, and else sent."""
    found = measured(largest_difference, kind, tmp_path, shares)
    if isinstance(found, str):
        assert kind not in IN_VLLM | ROUNDED_IN_VLLM, found
    elif kind in ROUNDED_IN_VLLM:
        assert found <= 1e-2
    else:
        assert kind in IN_VLLM
        assert found <= 1e-4


@pytest.mark.usefixtures("vllm")
def test_configs_of_transformers_are_restored() -> None:
    from vllm.transformers_utils import config

    from rlctl.runtime.rollout.vllm_engine.classes import restore_configs

    kind = "deepseek_v32"
    before, other = CONFIG_MAPPING[kind], type("Config", (PreTrainedConfig,), {"model_type": kind})
    config._register_config_class(kind, other)
    assert CONFIG_MAPPING[kind] is other
    restore_configs()
    assert CONFIG_MAPPING[kind] is before


@pytest.mark.soak
@pytest.mark.parametrize("kind", sorted(IN_VLLM.intersection(SUPPORTED)))
@pytest.mark.usefixtures("vllm")
def test_experts_are_those_of_the_trainer_or_refused(kind: str, tmp_path: Path) -> None:
    found = measured(num_other_experts, kind, tmp_path)
    if kind in WITHOUT_EXPERTS:
        assert "cannot return the experts of models with windows or states" in found
    else:
        assert found == 0


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_models_that_vllm_computes_otherwise_are_refused_by_their_config(
    device: str, tmp_path: Path
) -> None:
    miniature_config("lfm2").save_pretrained(tmp_path)
    model = (f"actor_rollout_ref.model.{word}" for word in (f"path={tmp_path}", "init=random"))
    config = compose("grpo", [VLLM, f"trainer.device={device}", *model]).config
    messages = [problem.message for problem in check_model(config)]
    reason = "vLLM on a CPU computes models of type lfm2 unlike transformers"
    assert any(reason in message for message in messages) == (device == "cpu")


FAMILIES_IN_VLLM = [kind for kind in FAMILIES if kind != "gemma3"]
IMAGES_SAMPLE = ("qwen3_vl", "internvl")  # the others are tested by `make soak`
IMAGES = [images for _, images in CHATS]


def weights(hf: Any) -> Iterator[tuple[str, Tensor]]:
    return ((name, value.detach()) for name, value in hf.named_parameters())


def largest_difference_with_images(kind: str, folder: Path) -> tuple[float, list[int]]:
    """Return the largest difference of a log-prob, and how many images each call encoded."""
    from rlctl.runtime.rollout.vllm_engine.vllm_in_process import VLLMEngine
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


@pytest.mark.parametrize("kind", sampled(FAMILIES_IN_VLLM, IMAGES_SAMPLE))
@pytest.mark.usefixtures("vllm")
def test_log_probs_with_images_are_those_of_the_trainer(kind: str, tmp_path: Path) -> None:
    """An image of a group is encoded once for each weights."""
    found = measured(largest_difference_with_images, kind, tmp_path)
    assert not isinstance(found, str), found
    worst, encoded = found
    assert worst <= 1e-5
    assert sum(encoded) == 2 * len({image for images in IMAGES for image in images})
