"""Multimodal checkpoints on rows of text alone are exact, or refused; exports keep the type."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, PreTrainedModel

from rlctl.errors import ConfigError
from rlctl.runtime.batch import Ragged
from rlctl.runtime.model.causal_lm import PolicyModel
from rlctl.runtime.model.mapped import RankStorage
from rlctl.runtime.model.padded_rows import decoder_of, has_padded_rows, use_own_attention
from rlctl.runtime.model.probe import check_model
from rlctl.runtime.model.vision import freeze_tower, towers
from rlctl.runtime.rollout.engine import SamplingParams
from rlctl.runtime.rollout.hf import HFEngine
from tests.generation import full_forward
from tests.miniatures import with_random_weights
from tests.multimodal import (
    TEXT_EXACT,
    TEXT_NOT_DECODED,
    TEXT_PADDED,
    TEXT_REFUSED,
    multimodal_config,
)

SAMPLE = {"llama4", "mistral3"}  # the others are tested by `make soak`


@pytest.mark.parametrize(
    "kind",
    [pytest.param(kind, marks=() if kind in SAMPLE else pytest.mark.soak) for kind in TEXT_EXACT],
)
def test_rows_of_text_are_exact(kind: str, tmp_path: Path) -> None:
    """Without files of an image processor, as for every model of which only text is trained."""
    model = probed(kind, tmp_path)
    assert has_padded_rows(model) == (kind in TEXT_PADDED)
    prompts = Ragged.from_rows([torch.arange(3, 8), torch.arange(20, 29), torch.arange(3, 8)])
    sampling = SamplingParams(1.0, 1.0, -1, (), torch.tensor([12, 2, 5, 8, 1, 7]), 7, 2)
    if kind in TEXT_NOT_DECODED:
        with pytest.raises(ConfigError, match=r"the engine hf (cannot decode|decodes) models of"):
            HFEngine(model, 4).generate(prompts, sampling)
    else:
        found = HFEngine(model, 4).generate(prompts, sampling)
        use_own_attention(model, "eager")
        pairs = zip(found.response_ids.rows(), found.log_probs.rows(), strict=True)
        for row, (ids, log_probs) in enumerate(pairs):
            expected = full_forward(model, prompts.rows()[row // 2], ids, 1.0)
            torch.testing.assert_close(log_probs, expected, atol=1e-4, rtol=1e-4)
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
def test_others_are_refused(kind: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=TEXT_REFUSED[kind]):
        probed(kind, tmp_path)


def probed(kind: str, folder: Path) -> PreTrainedModel:
    model = with_random_weights(multimodal_config(kind), folder)
    check_model(PolicyModel(model, 1.0), RankStorage("cpu", torch.float32, torch.float32))
    return model
