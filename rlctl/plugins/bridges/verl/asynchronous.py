"""verl's one-step-off and fully asynchronous training: settings that mean several keys here.

Meanings are those of verl's docs/advance/{one_step_off,fully_async,v1_async_trainer}.md. verl's
staleness threshold is a share of a batch: 0 generates each batch under the newest weights, and 1
lets engines be one batch ahead. Here it is rounded up to whole steps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from rlctl.errors import Problem
from rlctl.recipes.role_table import ROLLOUT

_ASYNC = "async_training"
_THRESHOLD = f"{_ASYNC}.staleness_threshold"
_PARTIAL = f"{_ASYNC}.partial_rollout"
_SYNC_STEP = f"{_ASYNC}.trigger_parameter_sync_step"
_BATCHES = f"{_ASYNC}.require_batches"
_TOTAL = "rollout.total_rollout_steps"
_BATCH = "data.train_batch_size"
_MINI = "actor_rollout_ref.actor.ppo_mini_batch_size"
_PLACEMENT = "trainer.placement"
_DEFAULT_THRESHOLD = 0.1  # verl's


@dataclass
class Combination:
    """Values that the settings `given` (value and place by key) mean, and their problems.

    `unused` are keys without effect, with the reason. `look` returns the value of a key of rlctl,
    and `is_set` is True if the user set it.
    """

    given: Mapping[str, tuple[Any, str]]
    look: Callable[[str], Any]
    is_set: Callable[[str], bool]
    values: dict[str, tuple[Any, str]] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    unused: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for section in (ROLLOUT.name, ROLLOUT.section):
            self._add_engines(section)
        if any(key in self.given for key in (_THRESHOLD, _SYNC_STEP, _BATCHES, _PARTIAL, _TOTAL)):
            self._add_staleness()
            self._add_batch()

    def _get(self, key: str, default: Any) -> tuple[Any, str]:
        """Return value and place of verl's key; if it is not given, those of verl's default."""
        return self.given.get(key, (default, next((place for _, place in self.given.values()), "")))

    def _refuse(self, message: str, key: str, hint: str) -> None:
        """Add a problem at the place of verl's key."""
        self.problems.append(Problem(message, self._get(key, None)[1], hint))

    def _add_engines(self, section: str) -> None:
        """Give the engines a separate pool. In verl, trainer.n_gpus_per_node excludes them."""
        key = f"{section}.n_gpus_per_node"
        on_nodes = f"{section}.nnodes"
        is_given = key in self.given
        nodes, _ = self._get(on_nodes, 1 if section == ROLLOUT.name and is_given else 0)
        engines, where = self._get(key, None)
        all_nodes = self.look("trainer.nnodes")
        trainers = self.look("trainer.n_gpus_per_node")
        if not nodes:
            if is_given:
                self.unused[key] = f"{on_nodes} is 0"
        elif engines is None:
            hint = f"{key}=NUMBER of GPUs per node for the rollout engines"
            self._refuse(f"{on_nodes}={nodes}, but {key} is not set", on_nodes, hint)
        elif nodes != all_nodes:
            self._refuse(
                f"{on_nodes}={nodes} differs from trainer.nnodes={all_nodes}: each pool has "
                "devices on every node",
                on_nodes,
                "set both to the number of all nodes, and divide the GPUs of a node by "
                f"trainer.n_gpus_per_node and {key}",
            )
        else:
            main = self.look(f"{_PLACEMENT}.actor")
            pools = f"{_PLACEMENT}.pools"
            pool = self.look(f"{_PLACEMENT}.rollout") or ROLLOUT.name
            counts = {f"{_PLACEMENT}.rollout": pool, f"{pools}.{pool}": engines}
            if trainers and isinstance(engines, int):
                counts |= {f"{pools}.{main}": trainers}
                counts |= {"trainer.n_gpus_per_node": trainers + engines}
            self.values |= {name: (value, where) for name, value in counts.items()}

    def _add_staleness(self) -> None:
        """Set the staleness: a whole number of steps, which covers verl's share of a batch."""
        threshold, where = self._get(_THRESHOLD, _DEFAULT_THRESHOLD)
        if not isinstance(threshold, int | float) or threshold < 0:
            hint = f"{_THRESHOLD}=0 trains synchronously, =1 lets engines be one step ahead"
            self._refuse(f"{_THRESHOLD}={threshold} should be 0 or more", _THRESHOLD, hint)
            return
        self.values[f"{_ASYNC}.max_staleness"] = (math.ceil(threshold), where)
        if threshold and (threshold != 1 or self._get(_PARTIAL, True)[0]):
            self.values[f"{_ASYNC}.schedule"] = ("eager", where)

    def _add_batch(self) -> None:
        """Set prompts and number of steps: a step is what verl trains on between two syncs."""
        steps, where = self._get(_SYNC_STEP, 4)
        batches, _ = self._get(_BATCHES, 1)
        mini = self.look(_MINI)
        chosen = self.look(_BATCH)
        if not all(isinstance(factor, int) for factor in (steps, batches, mini)):
            hint = f"set {_BATCH}, and remove {_SYNC_STEP} and {_BATCHES}"
            factors = f"{_SYNC_STEP}={steps}, {_BATCHES}={batches} and {_MINI}={mini}"
            self._refuse(f"{factors} should be numbers", _SYNC_STEP, hint)
            return
        batch = steps * batches * mini
        if self.is_set(_BATCH) and chosen not in (0, batch):
            product = f"{_SYNC_STEP}={steps} × {_BATCHES}={batches} × {_MINI}={mini}"
            hint = f"{_BATCH}={batch}, or 0 as in verl's scripts"
            self._refuse(f"{_BATCH}={chosen} differs from {product}", _SYNC_STEP, hint)
            return
        self.values[_BATCH] = (batch, where)
        if self.is_set("data.gen_batch_size"):  # verl's stream of single prompts
            self.values["data.gen_batch_size"] = (None, where)
        total, where = self._get(_TOTAL, None)
        if batch and isinstance(total, int):
            self.values["trainer.total_training_steps"] = (total // batch, where)
