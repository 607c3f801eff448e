"""Gradients and training on meshes, with checks against one process."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from rlctl.runtime.base.rank_info import RankInfo
from rlctl.runtime.model.adapter_names import merged_parameters
from tests.distributed.ranks import rank_info
from tests.distributed.test_gradient import gradient
from tests.models import MIXTURES, mixture_model, tiny_tokenizer, write_tiny_model
from tests.tolerance import PASSES, float64
from tests.workers import actor, save, update, weights

NUM_RANKS = 4
SECTIONS = ("actor_rollout_ref.actor", "critic", "reward.reward_model")
# Relative difference of gradients in float64 where each rank has all rows. With other rows on each
# rank they differ by 1e-7, because transformers' norms and routers compute in float32.
EXACT = 1e-12


def mesh(tensor: int = 1, sequence: int = 1, experts: int = 1) -> tuple[str, ...]:
    """Return the settings of a mesh; experts are divided over the shards of the parameters."""
    sizes = {
        "tensor_model_parallel_size": tensor,
        "ulysses_sequence_parallel_size": sequence,
        "expert_model_parallel_size": experts,
        "fsdp_size": -1 if experts == 1 else experts,
    }
    return tuple(
        f"{section}.fsdp_config.{key}={size}" for section in SECTIONS for key, size in sizes.items()
    )


def stages(number: int, schedule: str = "1f1b", **sizes: int) -> tuple[str, ...]:
    """Return the settings of a mesh whose ranks divide the layers; `sizes` are of other kinds."""
    sizes = {"pipeline_model": number, **sizes}
    kinds = (*(f"{kind}_parallel_size={size}" for kind, size in sizes.items()),)
    return tuple(
        f"{section}.fsdp_config.{each}"
        for section in SECTIONS
        for each in (*kinds, f"pipeline_schedule={schedule}")
    )


LORA = ("actor_rollout_ref.model.lora_rank=4",)
# Other implementations of experts do not compute in float64.
EAGER = ("actor_rollout_ref.model.override_config.experts_implementation=eager",)


def write_models(folder: Path, kinds: Iterable[str] = MIXTURES) -> Path:
    """Write small models that four ranks can divide, and a mixture of each of the kinds."""
    write_tiny_model(folder / "two_kv_heads")
    write_tiny_model(folder / "dense", "qwen3", vocab_size=264, num_key_value_heads=4)
    write_tiny_model(folder / "deep", "qwen3", vocab_size=264, num_hidden_layers=5)
    for kind in kinds:
        tiny_tokenizer().save_pretrained(folder / kind)
        mixture_model(kind, vocab_size=264).save_pretrained(folder / kind)
    return folder


class Case(NamedTuple):
    """Gradient of a role on a mesh, in float64."""

    role: str
    mesh: tuple[str, ...]
    micro_batches: int = 2
    model: str = "dense"
    settings: tuple[str, ...] = ()  # of one process, too
    joins: tuple[tuple[int, ...], ...] = ()  # ranks with the layers of a model; else each has all
    tolerance: float = 1e-6


def gradient_of(where: RankInfo, models: Path, case: Case) -> tuple[Tensor, dict[str, float]]:
    """Return gradient and metrics of a case; one process has neither mesh nor micro-batches."""
    model, alone = str(models / case.model), where.world_size == 1
    settings = (*case.settings, *PASSES, *(() if alone else case.mesh))
    with float64():
        if case.role == "reward":
            from tests.plugins.objectives.test_reward_model import gradient as reward_gradient

            return reward_gradient(where, model, None, settings)[0], {}
        cuts = 1 if alone else case.micro_batches
        return gradient(where, model, case.role, "token-mean", cuts, settings)


def gradients_of(
    where: RankInfo, models: Path, cases: tuple[Case, ...]
) -> list[tuple[Tensor, dict[str, float]]]:
    """Return `gradient_of` of each case."""
    return [gradient_of(where, models, case) for case in cases]


def check_gradients(
    ranks: list[list[tuple[Tensor, dict[str, float]]]], models: Path, cases: tuple[Case, ...]
) -> None:
    """Check that the ranks have the gradient of one process, and its metrics if all have all rows.

    The last stage repeats the embeddings of a policy, which are its head.
    """
    alone: dict[tuple[object, ...], tuple[Tensor, dict[str, float]]] = {}
    for number, case in enumerate(cases):
        key = (case.role, case.model, case.settings)
        if key not in alone:
            alone[key] = gradient_of(rank_info(), models, case)
        whole, metrics = alone[key]
        found = [rank[number] for rank in ranks]
        for join in case.joins or [(rank,) for rank in range(len(ranks))]:
            parts = [found[rank][0] for rank in join]
            tied = sum(map(len, parts)) - len(whole)
            assert torch.equal(parts[-1][:tied], parts[0][:tied]), case
            mine = torch.cat([*parts[:-1], parts[-1][tied:]]) if tied else torch.cat(parts)
            assert (whole - mine).norm() <= case.tolerance * whole.norm() > 0, case
        if case.micro_batches == 1:
            for _, values in found:
                assert values == pytest.approx(metrics, rel=1e-5, abs=1e-6), case


class Trained(NamedTuple):
    saved: Tensor  # weights after an update
    engine: dict[str, Tensor]  # in the form of rollout engines
    updated: Tensor  # weights after another update
    resumed: Tensor  # after the same update of what was saved


def train(where: RankInfo, model: str, folder: Path, settings: tuple[str, ...]) -> Trained:
    """Update an actor, save it to `folder`, update it again, and do so again from the file."""
    worker = actor(where, model, settings)
    update(worker)
    save(worker, folder)
    saved, engine = weights(worker), dict(merged_parameters(worker.policy.hf))
    update(worker)
    updated = weights(worker)
    worker.load(folder)
    update(worker)
    return Trained(saved, engine, updated, weights(worker))


def check_trained(found: list[Trained], model: str, folder: Path) -> None:
    """Check that all ranks resume exactly, and that one process loads and sends the same."""
    loaded = actor(rank_info(), model)
    loaded.load(folder)
    alone, engine = weights(loaded), dict(merged_parameters(loaded.policy.hf))
    for rank in found:
        assert torch.equal(rank.saved, alone)
        assert rank.engine.keys() == engine.keys()
        assert all(torch.equal(rank.engine[name], engine[name]) for name in engine)
        assert torch.equal(rank.updated, rank.resumed)
        assert not torch.equal(rank.updated, rank.saved)
