"""Every model of transformers is computed as its rows alone, or refused.

Multimodal checkpoints are on rows of text alone, and their exports keep the type. Layers with
states have kernels that read packed rows.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, PreTrainedModel

from rlctl.errors import ConfigError
from rlctl.recipes.compose import compose
from rlctl.runtime.algorithms.base import Needs
from rlctl.runtime.base.batch import Ragged
from rlctl.runtime.model import probe
from rlctl.runtime.model.adapter_names import merged_parameters
from rlctl.runtime.model.attention import use_rlctl_attention
from rlctl.runtime.model.causal_lm import PolicyModel
from rlctl.runtime.model.lora import add_adapters
from rlctl.runtime.model.mapped import RankStorage
from rlctl.runtime.model.padded_rows import decoder_of, has_padded_rows, use_own_attention
from rlctl.runtime.model.probe import check_model, check_packing
from rlctl.runtime.model.sequences import Sequences
from rlctl.runtime.model.stage import saved_buffers
from rlctl.runtime.model.tower import freeze_tower, towers
from rlctl.runtime.planning import preflight
from rlctl.runtime.planning.mesh import check_meshes
from rlctl.runtime.planning.model_size import ModelSize
from rlctl.runtime.rollout.engine import SamplingParams
from rlctl.runtime.rollout.engine_weights import AdapterSync, EngineWeights, Selection
from rlctl.runtime.rollout.hf import HFEngine
from rlctl.runtime.rollout.weight_sync import WHOLE, to_buckets, whole
from rlctl.runtime.workers.passes import enter_training
from tests.generation import engine_spec
from tests.miniatures import (
    NOT_DECODED,
    PADDED,
    REFUSED,
    TYPES,
    miniature,
    miniature_config,
    with_random_weights,
)
from tests.multimodal import (
    TEXT_EXACT,
    TEXT_NOT_DECODED,
    TEXT_PADDED,
    TEXT_REFUSED,
    multimodal_config,
)
from tests.skips import sampled
from tests.tolerance import assert_all_as_exact, assert_as_exact, in_float64

# One of each mechanism; the others are tested by `make soak`.
SAMPLE = {
    *("bloom", "deepseek_v32", "deepseek_v3", "gemma3n_text", "llama4", "rwkv", "stablelm"),
    *("bamba", "falcon_h1", "gemma2", "jamba", "lfm2", "nemotron_h", "qwen3_next"),
}
FIELDS: dict[str, dict[str, Any]] = {"gemma2": {"attn_logit_softcapping": 0.5}}  # low: caps scores


ACCEPTED = [kind for kind in TYPES if kind not in REFUSED]


def probed(kind: str, folder: Path) -> PreTrainedModel:
    return checked(miniature(kind, folder, **FIELDS.get(kind, {})))


def checked(model: PreTrainedModel) -> PreTrainedModel:
    check_model(PolicyModel(model, 1.0), RankStorage("cpu", torch.float32, torch.float32))
    return model


@pytest.fixture
def texts() -> tuple[Ragged, Ragged]:
    """Three prompts, of which two are equal, and their responses."""
    generator = torch.Generator().manual_seed(1)
    prompts, responses = (
        [torch.randint(3, 128, (length,), generator=generator) for length in lengths]
        for lengths in ((5, 9, 5), (7, 3, 30))
    )
    return Ragged.from_rows([*prompts[:2], prompts[0]]), Ragged.from_rows(responses)


def own_log_probs(model: PreTrainedModel, prompt: Tensor, response: Tensor) -> Tensor:
    """Return the log-probs (T,) that transformers computes for a row alone.

    Some types create tensors of the default dtype, and some return logits in float32.
    """
    before = torch.get_default_dtype()
    torch.set_default_dtype(model.dtype)
    try:
        logits = model(torch.cat([prompt, response])[None], use_cache=False).logits[0]
    finally:
        torch.set_default_dtype(before)
    log_probs = logits.to(model.dtype).log_softmax(-1)
    return log_probs[len(prompt) - 1 : -1].gather(1, response[:, None])[:, 0]


def gradients(model: PreTrainedModel) -> dict[str, Tensor]:
    found = {
        name: parameter.grad
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }
    model.zero_grad()
    return found


@pytest.mark.parametrize("kind", sampled(ACCEPTED, SAMPLE))
def test_log_probs_and_gradients_are_those_of_rows_alone(
    kind: str, texts: tuple[Ragged, Ragged], tmp_path: Path
) -> None:
    model = probed(kind, tmp_path)
    assert has_padded_rows(model) == (kind in PADDED)
    name = model.config._attn_implementation
    use_own_attention(model, "eager")
    prompts, responses = texts
    pairs = [*zip(prompts.rows(), responses.rows(), strict=True)]
    exact_model = in_float64(model)
    alone, exact = (
        torch.cat([own_log_probs(each, *pair) for pair in pairs]) for each in (model, exact_model)
    )
    for each in (alone, exact):
        each.square().sum().backward()
    expected, exact_gradients = gradients(model), gradients(exact_model)
    use_own_attention(model, name)
    if model.supports_gradient_checkpointing:  # with the packing of the last pass
        model.gradient_checkpointing_enable({"use_reentrant": False})
    enter_training(model)
    for of_row in (None, torch.tensor([0, 1, 0])):
        sequences = Sequences.from_ragged(prompts, responses, prompt_of_row=of_row)
        log_probs = PolicyModel(model, 1.0)(sequences).log_probs
        assert_as_exact(log_probs, alone, exact)
        log_probs.square().sum().backward()
        assert_all_as_exact(gradients(model), expected, exact_gradients)


@pytest.mark.parametrize("kind", sampled(ACCEPTED, SAMPLE))
def test_the_engine_samples_from_the_model(
    kind: str, texts: tuple[Ragged, Ragged], tmp_path: Path
) -> None:
    check_engine(probed(kind, tmp_path), texts[0], decodes=kind not in NOT_DECODED)


def check_engine(model: PreTrainedModel, prompts: Ragged, decodes: bool) -> None:
    """Let rows join and leave; those of equal lengths are decoded together."""
    limits = torch.tensor([12, 2, 5, 8, 1, 7])
    sampling = SamplingParams(1.0, 1.0, -1, (), limits, 7, 2)
    if not decodes:
        with pytest.raises(ConfigError, match=r"the engine hf (cannot decode|decodes) models of"):
            HFEngine(model, 4).generate(prompts, sampling)
        return
    found = HFEngine(model, 4).generate(prompts, sampling)
    use_own_attention(model, "eager")
    models = (model, in_float64(model))
    pairs = zip(found.response_ids.rows(), found.log_probs.rows(), strict=True)
    for number, (ids, log_probs) in enumerate(pairs):
        with torch.no_grad():
            own = (own_log_probs(each, prompts.rows()[number // 2], ids) for each in models)
            assert_as_exact(log_probs, *own)


@pytest.mark.parametrize("kind", ["gemma4_text", "mpt", "qwen3_5_text"])
def test_the_memory_plan_and_adapters_follow_the_modules(kind: str, tmp_path: Path) -> None:
    hf = miniature(kind, tmp_path)
    overrides = (f"path={tmp_path}", "init=random", "lora_rank=2")
    names = [f"actor_rollout_ref.model.{each}" for each in overrides]
    settings = compose("grpo", names).config.actor_rollout_ref.model
    size, parameters = ModelSize.from_config(settings, "policy"), dict(hf.named_parameters())
    add_adapters(hf, settings, seed=0)
    assert size.num_parameters == sum(each.numel() for each in hf.parameters())
    exported = dict(merged_parameters(hf))
    weights = {**parameters, **saved_buffers(hf)}
    assert exported.keys() == weights.keys()
    for name, value in exported.items():  # adapters add nothing at first
        torch.testing.assert_close(value, weights[name].detach())


@pytest.mark.parametrize("kind", ["glm4_moe", "gemma4_text"])
def test_buffers_of_files_reach_exports_and_engines(kind: str, tmp_path: Path) -> None:
    """The bias with which routers choose experts, and scales of layers, are no parameters."""
    hf = miniature(kind, tmp_path)
    expected = {name: value.clone() for name, value in saved_buffers(hf).items()}
    assert expected
    weights = EngineWeights(hf, AdapterSync.WHOLE)
    rows = {name: value for name, value, _ in weights.rows(Selection.ALL, 0)}
    engine = HFEngine.from_spec(engine_spec(tmp_path, "actor_rollout_ref.model.init=random"), None)
    engine.load_weights(weights.parameters(Selection.ALL))
    buckets = list(to_buckets(whole(rows.items()), WHOLE, torch.bfloat16, 2**30, kept=expected))
    sent = {name: value for bucket in buckets for name, value in bucket.tensors()}
    for name, value in expected.items():
        for found in (dict(merged_parameters(hf)), rows, sent, saved_buffers(engine.model)):
            assert torch.equal(found[name], value)


@pytest.mark.parametrize("kind", sorted(REFUSED))
def test_others_are_refused(kind: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=REFUSED[kind]):
        probed(kind, tmp_path)


@pytest.mark.parametrize("kind", sampled(TEXT_EXACT, {"llama4", "mistral3"}))
def test_rows_of_text_are_exact(kind: str, tmp_path: Path) -> None:
    """Without files of an image processor, as for every model of which only text is trained."""
    model = checked(with_random_weights(multimodal_config(kind), tmp_path))
    assert has_padded_rows(model) == (kind in TEXT_PADDED)
    prompts = Ragged.from_rows([torch.arange(3, 8), torch.arange(20, 29), torch.arange(3, 8)])
    check_engine(model, prompts, decodes=kind not in TEXT_NOT_DECODED)
    freeze_tower(model)
    assert all(not each.requires_grad for part in towers(model) for each in part.parameters())
    trained = [decoder_of(model), model.get_output_embeddings()]
    assert all(each.requires_grad for part in trained for each in part.parameters())
    model.save_pretrained(tmp_path / "exported")
    exported = AutoConfig.from_pretrained(tmp_path / "exported")
    assert exported.model_type == model.config.model_type
    assert exported.architectures == [type(model).__name__]


@pytest.mark.soak
@pytest.mark.parametrize("kind", TEXT_REFUSED)
def test_other_multimodal_types_are_refused(kind: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=TEXT_REFUSED[kind]):
        checked(with_random_weights(multimodal_config(kind), tmp_path))


def rows(*lengths: int) -> Ragged:
    generator = torch.Generator().manual_seed(0)
    return Ragged.from_rows(
        [torch.randint(3, 128, (length,), generator=generator) for length in lengths]
    )


def gradients_of(hf: PreTrainedModel, *packed: Sequences) -> dict[str, Tensor]:
    hf.zero_grad()
    for sequences in packed:
        PolicyModel(hf, 1.0)(sequences).log_probs.sum().backward()
    return {
        name: parameter.grad.clone()
        for name, parameter in hf.named_parameters()
        if parameter.grad is not None
    }


def delta_kernel(chunk: Any) -> Any:
    """Return `chunk` of transformers as flash-linear-attention has it: with `cu_seqlens`."""

    def kernel(*qkv: Tensor, cu_seqlens: Tensor | None, **arguments: Any) -> tuple[Tensor, None]:
        arguments.pop("seq_idx", None)
        sizes = cu_seqlens.diff().tolist()
        parts = zip(*(each.split(sizes, dim=1) for each in qkv), strict=True)
        gates = zip(
            *(arguments.pop(name).split(sizes, dim=1) for name in ("g", "beta")), strict=True
        )
        mixed = [
            chunk(*part, g=g, beta=beta, **arguments)[0]
            for part, (g, beta) in zip(parts, gates, strict=True)
        ]
        return torch.cat(mixed, dim=1), None

    return kernel


def convolution_kernel(convolve: Any) -> Any:
    """Return `convolve` of transformers as causal-conv1d has it: with `seq_idx`."""

    def kernel(hidden: Tensor, *others: Any, seq_idx: Tensor, **arguments: Any) -> Tensor:
        assert seq_idx.dtype == torch.int32
        sizes = seq_idx[0].bincount().tolist()
        parts = [convolve(part, *others, **arguments) for part in hidden.split(sizes, dim=2)]
        return torch.cat(parts, dim=2)

    return kernel


@pytest.mark.parametrize("works", [True, False])
def test_kernels_read_packed_rows_if_they_keep_sequences_apart(
    works: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    hf = miniature("qwen3_5_text", tmp_path)
    use_rlctl_attention(hf)
    exact_hf = in_float64(hf)
    monkeypatch.setattr(probe, "may_have_kernels", lambda: True)
    module = import_module(type(hf).__module__)
    chunk, convolve = module.torch_chunk_gated_delta_rule, module.causal_conv1d_fn
    calls: list[int] = []

    def counting(*qkv: Tensor, **arguments: Any) -> Any:
        calls.append(len(qkv[0]))
        kernel = delta_kernel(chunk) if works and arguments["cu_seqlens"] is not None else chunk
        return kernel(*qkv, **arguments)

    def convolving(*others: Any, **arguments: Any) -> Any:
        return (convolution_kernel(convolve) if "seq_idx" in arguments else convolve)(
            *others, **arguments
        )

    monkeypatch.setattr(module, "torch_chunk_gated_delta_rule", counting)
    monkeypatch.setattr(module, "causal_conv1d_fn", convolving)
    packed = Sequences.from_ragged(rows(5, 9, 2), rows(7, 3, 30))
    expected = gradients_of(hf, packed)
    num_rectangles = len(calls)
    check_model(PolicyModel(hf, 1.0), None)
    calls.clear()
    found = gradients_of(hf, packed)
    layers = hf.config.layer_types.count("linear_attention")
    assert len(calls) == (layers if works else num_rectangles)
    assert num_rectangles > layers
    assert_all_as_exact(found, expected, gradients_of(exact_hf, packed))


def test_sizes_that_divide_tokens_or_layers_are_refused(tmp_path: Path) -> None:
    miniature_config("qwen3_5_text").save_pretrained(tmp_path)
    overrides = [
        f"actor_rollout_ref.model.path={tmp_path}",
        "actor_rollout_ref.actor.fsdp_config.ulysses_sequence_parallel_size=2",
    ]
    config = compose("grpo", overrides).config
    problems = list(check_meshes(config, {"main": 2}, Needs(0)))
    assert [problem.message for problem in problems] == [
        "layers of qwen3_5_text carry a state from token to token, which "
        "ulysses_sequence_parallel_size cannot divide"
    ]
    miniature_config("bloom").save_pretrained(tmp_path)
    config = compose("grpo", [*overrides, "actor_rollout_ref.model.init=random"]).config
    messages = [problem.message for problem in preflight.check_model(config)]
    assert any("models of type bloom compute padded rows" in message for message in messages)


def test_the_engine_refuses_states_that_it_cannot_keep(tmp_path: Path) -> None:
    model = miniature("minimax", tmp_path)
    use_rlctl_attention(model)
    check_packing(PolicyModel(model, 1.0))
    sampling = SamplingParams(1.0, 1.0, -1, (), torch.tensor([4]), 7, 1)
    with pytest.raises(ConfigError, match="engine hf cannot decode models of type minimax"):
        HFEngine(model, 3).generate(rows(5), sampling)
