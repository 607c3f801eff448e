"""Broken updates of runs, run again in this process: `rlctl debug RUN --replay`."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from rlctl.errors import ConfigError, NotFoundError
from rlctl.files import by_step, read_record, step_of
from rlctl.recipes.role_table import ACTOR, CRITIC, REWARD_LEARNER
from rlctl.recipes.schema import Config
from rlctl.runs.run import Run, read_run
from rlctl.runs.store import RunStore
from rlctl.runs.trust import recompose_run
from rlctl.runtime.algorithms.base import Algorithm
from rlctl.runtime.base.batch import Batch, Rollouts
from rlctl.runtime.build import build_actor, critic_spec, load_algorithm, role_plugin
from rlctl.runtime.cluster.pools import InlinePool
from rlctl.runtime.data import bundled
from rlctl.runtime.data.tokenizer import tokenizer_of
from rlctl.runtime.model.sharding import full_tensor, local_part
from rlctl.runtime.planning.devices import inline_rank_info
from rlctl.runtime.planning.evaluation import ONE_RANK
from rlctl.runtime.planning.model_paths import with_models
from rlctl.runtime.training.skipped_updates import BUNDLES, FACTS, ROWS, WEIGHTS
from rlctl.runtime.training.stored_rollouts import read_rollouts
from rlctl.runtime.workers.base import LearningWorker
from rlctl.runtime.workers.broken_update import fingerprint, trained
from rlctl.runtime.workers.critic import CriticWorker


@dataclass(frozen=True)
class Bundle:
    """Folder of a broken update."""

    path: Path
    run: Run
    facts: dict[str, Any]

    @classmethod
    def find(cls, name: str, root: Path | None) -> Bundle:
        """Return the bundle in the folder `name`, or the first one of a run."""
        path = Path(name)
        if (path / FACTS).is_file():
            run = read_run(path.absolute().parents[1])
        else:
            run = RunStore(root).find(name)
            found = sorted((run.path / BUNDLES).glob("step_*"))
            if not found:
                raise NotFoundError(
                    "this run has no broken update",
                    where=str(run.path),
                    hint="runs write one when they skip an update: `rlctl explain skipped_updates`",
                )
            path = found[0]
        try:
            return cls(path, run, json.loads(read_record(path / FACTS)))
        except (OSError, ValueError) as error:
            raise ConfigError(f"cannot be read: {error}", where=str(path / FACTS)) from error

    def batch(self) -> Rollouts:
        """Return the rows. Raises ConfigError for files that cannot be read."""
        kinds = {kind.__name__: kind for kind in _subclasses(Rollouts)}
        if (kind := kinds.get(self.facts["kind"])) is None:
            raise ConfigError(f"unknown rows: {self.facts['kind']!r}", where=str(self.path / FACTS))
        images = [tuple(map(base64.b64decode, row)) for row in self.facts["images"]]
        return replace(read_rollouts(self.path / ROWS, [], kind), images=images)


def _subclasses(kind: type[Batch]) -> Iterator[Any]:
    yield kind
    for each in kind.__subclasses__():
        yield from _subclasses(each)


def replay(bundle: Bundle) -> dict[str, Any]:
    """Run the update again; return `weights`, where they are from, `fits`, and `found` facts.

    `fits` is True for the weights of the run. Those of the bundle come first, then the checkpoint
    before and the one after, then the initial model; without any that fits, the checkpoint before.
    """
    config = with_models(_on_one_rank(recompose_run(bundle.run.path).config))
    with bundled.readable(config) as readable:
        algorithm = load_algorithm(readable, num_steps=bundle.facts["step"] + 1)
        pool = InlinePool(inline_rank_info(readable.trainer))
        try:
            worker = _worker(bundle.facts["role"], readable, algorithm, pool)
            weights, fits = _load(worker, bundle)
            batch: Any = bundle.batch()
            if "lr" in bundle.facts:  # else the update had not begun
                worker.update(batch, bundle.facts["lr"])
                found = worker.pop_broken_updates()
            else:
                found = worker.pop_broken_updates(batch)
            facts = next((update.facts for update in found), None)
            return {"weights": weights, "fits": fits, "found": facts}
        finally:
            pool.close()


def _on_one_rank(config: Config) -> Config:
    """Return the configuration with a mesh of one process."""
    for role in (ACTOR, CRITIC, REWARD_LEARNER):
        for key, size in ONE_RANK.items():
            config = config.replaced(f"{role.fsdp_key}.{key}", size)
    return config


def _worker(role: str, config: Any, algorithm: Algorithm, pool: InlinePool) -> Any:
    """Return the worker of a role that learns."""
    if role == ACTOR.name:
        return build_actor(config, algorithm, tokenizer_of(config.actor_rollout_ref.model), pool)
    if role == CRITIC.name:
        return pool.spawn(role, CriticWorker, critic_spec(config, algorithm))
    return role_plugin(REWARD_LEARNER.name).build(config, pool, algorithm)


def _load(worker: LearningWorker, bundle: Bundle) -> tuple[str, bool]:
    """Load the weights of the break, or those nearest to it; return their name, and if they fit."""
    model = worker.learner.model
    wanted = bundle.facts["weights"]

    def fits() -> bool:
        return wanted == fingerprint((name, full_tensor(each)) for name, each in trained(model))

    if (bundle.path / WEIGHTS).is_file():
        stored = load_file(bundle.path / WEIGHTS)
        if stored.keys() == {name for name, _ in trained(model)}:  # else a stage of a pipeline
            with torch.no_grad():
                for name, each in trained(model):
                    local_part(each).copy_(stored[name])  # on one rank, so all of it
            return "the bundle", fits()
    if fits():
        return "the initial model", True
    folders = by_step(bundle.run.path / "checkpoints")
    step = step_of(bundle.path.name.partition("-")[0]) or 0
    before = [number for number in folders if number < step][-1:]
    for number in [*before, *[each for each in folders if each >= step][:1], *before]:
        worker.load((folders[number] / bundle.facts["role"]).absolute())
        if fits():
            return folders[number].name, True
    if not before:
        return "the initial model", False
    return folders[before[0]].name, False
