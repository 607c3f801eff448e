"""Rollouts in a checkpoint: what is read is what was written."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from rlctl.errors import ConfigError
from rlctl.runtime.batch import Ragged, Scored
from rlctl.runtime.checkpoint.stored_rollouts import read_rollouts, write_rollouts
from rlctl.tracking.episodes import Episode, Message
from tests.numerics.batches import scored_batch


@pytest.mark.parametrize("numbers", [[], [0, 0, 1, 0]])
def test_stored_rollouts_are_read_back(tmp_path: Path, numbers: list[int]) -> None:
    episodes = [Episode("done", [Message("tool", str(i), trained=False)]) for i in range(2)]
    same = {"data_source": "x", "ground_truth": 1}
    images = {"a": (b"picture",), "b": ()}
    prompts = cast(Any, [SimpleNamespace(prompt=p, images=images[p], **same) for p in "ab"])
    fields = {
        "rows": [prompts[i] for i in (1, 1, 0, 0)],
        "episodes": [episodes[i] for i in numbers],
        "images": [(), (), (b"picture", b"of a reply"), (b"picture",)],
    }
    scored = dataclasses.replace(scored_batch(), **fields)
    write_rollouts(tmp_path / "rollouts", scored, [1, 1, 0, 0])
    found = read_rollouts(tmp_path / "rollouts", prompts, Scored)
    assert found.rows == scored.rows
    assert found.images == scored.images
    other = SimpleNamespace(prompt="a", images=images["a"], data_source="x", ground_truth=2)
    repainted = SimpleNamespace(prompt="a", images=(b"photo",), **same)
    for changed in ([other, prompts[1]], [repainted, prompts[1]], prompts[:1]):
        with pytest.raises(ConfigError, match="the data has changed"):
            read_rollouts(tmp_path / "rollouts", changed, Scored)
    assert [each.messages[0].text for each in found.episodes] == [str(i) for i in numbers]
    assert found.episode_of_row.tolist() == scored.episode_of_row.tolist()
    for each in dataclasses.fields(scored):
        value, other = getattr(scored, each.name), getattr(found, each.name)
        if isinstance(value, Ragged):
            assert torch.equal(value.values, other.values)
            assert torch.equal(value.lengths, other.lengths)
