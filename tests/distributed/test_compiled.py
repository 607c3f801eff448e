"""Compiled layers compute what plain ones do, with one graph for any number of tokens.

The tests trace the layers as a run does, without building kernels, which takes a minute.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from rlctl.errors import ConfigError
from rlctl.recipes.compose import compose
from rlctl.runtime.base.batch import Experience
from rlctl.runtime.base.metrics import to_floats
from rlctl.runtime.base.rank_info import RankInfo
from rlctl.runtime.model import compiled
from rlctl.runtime.planning.devices import Devices
from rlctl.runtime.planning.preflight import check_software
from rlctl.runtime.rollout.engine import SamplingParams
from rlctl.runtime.workers.actor import ActorWorker
from tests.distributed.ranks import on_ranks, rank_info
from tests.tolerance import PASSES, assert_as_exact, float64
from tests.workers import LOSS, actor_of, experience

COMPILE = f"{compiled.KEY}=true"
PLAIN = f"{compiled.KEY}=false"
CHECKPOINTING = "actor_rollout_ref.model.enable_gradient_checkpointing=true"


@pytest.fixture(autouse=True)
def traced(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Replace the kernels of compiled graphs by torch's own, in a worker as Ray starts it."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")
    with torch._dynamo.config.patch(disable=True):
        yield


def actor(where: RankInfo, model: Path | str, *overrides: str) -> ActorWorker:
    path = f"actor_rollout_ref.model.path={model}"
    return actor_of(where, compose("ppo", [path, *LOSS, *overrides]).config)


def steps(worker: ActorWorker, batches: list[Experience]) -> list[Any]:
    """Return log-probs and gradient norms of updates, and log-probs of the base model."""
    found: list[Any] = []
    for batch in batches:
        found.append(worker.compute_log_probs(batch).log_probs.values)
        found.append(worker.compute_log_probs(batch, "base").log_probs.values)
        found.append(torch.tensor(to_floats(worker.update(batch, lr=1e-2))["actor/grad_norm"]))
    return found


@pytest.mark.soak
def test_compiled_layers_learn_as_plain_ones_do(model: Path) -> None:
    """Adapters, checkpointing, shared prompts: one graph per kind of pass, whatever the lengths."""
    settings = ("actor_rollout_ref.model.lora_rank=4", CHECKPOINTING)
    rows = [[0, 1, 2, 3], [1, 3, 5], [2, 3, 4, 5, 6], [4, 6, 7]]  # with shared prompts, and without
    batches = [experience().select(torch.tensor(each)) for each in rows]
    plain = steps(actor(rank_info(), model, *settings, PLAIN), batches)
    with float64():
        exact = steps(actor(rank_info(), model, *settings, PLAIN, *PASSES), batches)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    worker, of_graphs = (
        actor(rank_info(), model, *settings, COMPILE),
        torch._dynamo.utils.counters["stats"],
    )
    found = steps(worker, batches[:2])
    num_graphs = of_graphs["unique_graphs"]
    found += steps(worker, batches[2:])
    assert 0 < num_graphs == of_graphs["unique_graphs"]
    for each, expected, reference in zip(found, plain, exact, strict=True):
        assert_as_exact(each, expected, reference.double())


def norm(where: RankInfo, model: str) -> float:
    """Return the gradient norm of an update with compiled layers."""
    torch.compile = partial(torch.compile, backend="eager")
    worker = actor(where, model, CHECKPOINTING, COMPILE)
    rows = torch.arange(8).view(2, 4)[where.rank]
    return to_floats(worker.update(experience().select(rows), lr=1e-2))["actor/grad_norm"]


@pytest.mark.soak
def test_compiled_layers_are_sharded(model: Path) -> None:
    batches = [experience()]
    plain = steps(actor(rank_info(), model, PLAIN), batches)[-1]
    with float64():
        exact = steps(actor(rank_info(), model, PLAIN, *PASSES), batches)[-1]
    for found in on_ranks(2, norm, str(model)):
        assert_as_exact(torch.tensor(found), plain, exact.double())


def test_the_engine_decodes_with_plain_layers(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a compiled layer was called")

    monkeypatch.setattr(torch, "compile", lambda *_, **__: refuse)
    worker = actor(rank_info(), model, COMPILE)
    worker.start_engine()
    prompts = experience().prompt_ids
    sampling = SamplingParams(1.0, 1.0, -1, max_tokens=3, stop_token_ids=(), seed=0, n=1)
    assert worker.engine.generate(prompts, sampling).response_ids.lengths.tolist() == [3] * 8
    with pytest.raises(AssertionError, match="compiled"):
        worker.compute_log_probs(experience())


def test_a_missing_compiler_is_an_error_before_the_start(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = compose("ppo", [f"actor_rollout_ref.model.path={model}", COMPILE]).config
    devices = Devices.from_config(config.trainer)
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(ConfigError, match=r"a C\+\+ compiler, and there is no no-such-compiler"):
        check_software(config, devices, inline=True)
    monkeypatch.delenv("CXX")
    compiled.check_compiler("cpu")
