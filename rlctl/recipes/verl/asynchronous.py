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
from rlctl.recipes.roles import ROLLOUT
from rlctl.recipes.verl import features as missing
from rlctl.recipes.verl.rules import Rule, depends, needs, no_effect, only

_ROLLOUT = ROLLOUT.section
_ASYNC = "async_training"
_THRESHOLD, _PARTIAL = f"{_ASYNC}.staleness_threshold", f"{_ASYNC}.partial_rollout"
_SYNC_STEP, _BATCHES = f"{_ASYNC}.trigger_parameter_sync_step", f"{_ASYNC}.require_batches"
_TOTAL = "rollout.total_rollout_steps"
_BYPASS = "algorithm.rollout_correction.bypass_mode"
_BATCH, _MINI = "data.train_batch_size", "actor_rollout_ref.actor.ppo_mini_batch_size"
_PLACEMENT = "trainer.placement"
_OWN_ENGINES = (f"{_PLACEMENT}.rollout=rollout", f"{_BYPASS}=true")

_DEFAULT_THRESHOLD = 0.1  # verl's

# Settings that verl's configurations of these names have, as overrides of ppo_trainer.
CONFIGURATIONS: dict[str, tuple[str, ...]] = {
    "one_step_off_ppo_trainer": (f"{_ASYNC}.max_staleness=1", *_OWN_ENGINES),
    "fully_async_ppo_trainer": (
        f"{_THRESHOLD}=0.1",
        f"{_SYNC_STEP}=4",
        f"{_BATCHES}=1",
        f"{_PARTIAL}=true",
        *_OWN_ENGINES,
    ),
}

MOVED: tuple[tuple[str, str], ...] = (
    ("rollout.{test_freq,total_epochs}", r"trainer.\1"),
    (f"{{{_ASYNC},actor_rollout_ref.actor}}.use_rollout_log_probs", _BYPASS),
)
# What becomes of keys that are translated together, by `combine`.
COMBINED: dict[str, str] = {
    "rollout.n_gpus_per_node": "is now the pool of trainer.placement.rollout",
    f"{_ROLLOUT}.n_gpus_per_node": "is now the pool of trainer.placement.rollout",
    _THRESHOLD: "is now async_training.max_staleness",
    _SYNC_STEP: f"is a factor of {_BATCH}",
    _BATCHES: f"is a factor of {_BATCH}",
    _TOTAL: f"is now trainer.total_training_steps, in steps of {_BATCH}",
}
RULES: tuple[Rule, ...] = (
    no_effect(f"{{rollout,{_ROLLOUT}}}.nnodes", "a pool is on all nodes of trainer.nnodes"),
    no_effect(
        _PARTIAL, "responses continue under newer weights with async_training.schedule=eager"
    ),
    no_effect(
        f"{_ASYNC}.{{use_trainer_do_validate,parallel_validate_and_rollout}}",
        "the rollout engines generate the responses of validation, between two steps",
    ),
    no_effect(
        f"{{{_ASYNC}.checkpoint_engine*,trainer.weight_sync_with_ray}}",
        "the weight sync is rlctl's own",
    ),
    only(
        f"{_ASYNC}.{{compute_prox_log_prob,recompute_old_log_prob}}",
        (None, False),
        "it is off",
        f"set {_BYPASS}=false and algorithm.rollout_correction.rollout_is=token",
    ),
    only(
        f"{_ASYNC}.compute_advantage_in_rollout",
        (None, False),
        "advantages are computed for all rollouts of a step",
    ),
    no_effect("rollout.max_concurrent_samples_per_replica", "the engine chooses"),
    needs("rollout.*", missing.ASYNC),
    Rule("trainer.v1.trainer_mode", "rlctl has one trainer", (None, "sync"), missing.ASYNC),
    needs("trainer.v1.sampler.custom_sampler.path", missing.DATASET_CODE, (None, "")),
    no_effect("trainer.v1.sampler.sync_refill_failed_groups", "failed requests are repeated"),
    depends("trainer.v1*", "it belongs to an asynchronous trainer_mode"),
)


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

    def get(self, key: str, default: Any) -> Any:
        """Return the given value of verl's key, or verl's default."""
        return self.given[key][0] if key in self.given else default

    def refuse(self, message: str, key: str, hint: str) -> None:
        """Add a problem at the place of verl's key."""
        where = self.given.get(key, next(iter(self.given.values())))[1]
        self.problems.append(Problem(message, where, hint))


def combine(
    given: Mapping[str, tuple[Any, str]],
    look: Callable[[str], Any],
    is_set: Callable[[str], bool],
) -> Combination:
    """Return the meaning of verl's keys `given`."""
    found = Combination(given, look, is_set)
    for section in (ROLLOUT.name, ROLLOUT.section):
        _add_engines(found, section)
    if any(key in given for key in (_THRESHOLD, _SYNC_STEP, _BATCHES, _PARTIAL, _TOTAL)):
        _add_staleness(found)
        _add_batch(found)
    return found


def _add_engines(found: Combination, section: str) -> None:
    """Give the engines a pool of their own. In verl, trainer.n_gpus_per_node excludes them."""
    key = f"{section}.n_gpus_per_node"
    nodes = found.get(
        f"{section}.nnodes", 1 if section == ROLLOUT.name and key in found.given else 0
    )
    if not nodes:
        if key in found.given:
            found.unused[key] = f"{section}.nnodes is 0"
        return
    if key not in found.given:
        found.refuse(
            f"{section}.nnodes={nodes}, but {key} is not set",
            f"{section}.nnodes",
            f"{key}=NUMBER of GPUs per node for the rollout engines",
        )
        return
    engines, where = found.given[key]
    own, trainers = found.look("trainer.nnodes"), found.look("trainer.n_gpus_per_node")
    if nodes != own:
        found.refuse(
            f"{section}.nnodes={nodes} differs from trainer.nnodes={own}: each pool has devices "
            "on every node",
            f"{section}.nnodes",
            "set both to the number of all nodes, and divide the GPUs of a node by "
            f"trainer.n_gpus_per_node and {key}",
        )
        return
    main = found.look(f"{_PLACEMENT}.actor")
    pool = found.look(f"{_PLACEMENT}.rollout") or ROLLOUT.name
    found.values[f"{_PLACEMENT}.rollout"] = (pool, where)
    found.values[f"{_PLACEMENT}.pools.{pool}"] = (engines, where)
    if trainers:
        found.values[f"{_PLACEMENT}.pools.{main}"] = (trainers, where)
        found.values["trainer.n_gpus_per_node"] = (trainers + engines, where)


def _add_staleness(found: Combination) -> None:
    """Set the staleness: a whole number of steps, which covers verl's share of a batch."""
    first = next(iter(found.given.values()))[1]
    threshold, where = found.given.get(_THRESHOLD, (_DEFAULT_THRESHOLD, first))
    if not isinstance(threshold, int | float) or threshold < 0:
        found.refuse(
            f"{_THRESHOLD}={threshold} should be 0 or more",
            _THRESHOLD,
            f"{_THRESHOLD}=0 trains synchronously, =1 lets engines be one step ahead",
        )
        return
    found.values[f"{_ASYNC}.max_staleness"] = (math.ceil(threshold), where)
    if threshold and (threshold != 1 or found.get(_PARTIAL, True)):
        found.values[f"{_ASYNC}.schedule"] = ("eager", where)


def _add_batch(found: Combination) -> None:
    """Set the prompts and the number of steps: a step is what verl trains on between two syncs."""
    factors = [found.get(_SYNC_STEP, 4), found.get(_BATCHES, 1), found.look(_MINI)]
    if not all(isinstance(each, int) for each in factors):
        found.refuse(
            f"{_SYNC_STEP}={factors[0]}, {_BATCHES}={factors[1]} and {_MINI}={factors[2]} should "
            "be numbers",
            _SYNC_STEP,
            f"set {_BATCH}, and remove {_SYNC_STEP} and {_BATCHES}",
        )
        return
    batch = factors[0] * factors[1] * factors[2]
    where = found.given.get(_SYNC_STEP, next(iter(found.given.values())))[1]
    chosen = found.look(_BATCH)
    if found.is_set(_BATCH) and chosen not in (0, batch):
        found.refuse(
            f"{_BATCH}={chosen} differs from {_SYNC_STEP}={factors[0]} × {_BATCHES}={factors[1]} "
            f"× {_MINI}={factors[2]}",
            _SYNC_STEP,
            f"{_BATCH}={batch}, or 0 as in verl's scripts",
        )
        return
    found.values[_BATCH] = (batch, where)
    if found.is_set("data.gen_batch_size"):  # verl's stream of single prompts
        found.values["data.gen_batch_size"] = (None, where)
    if _TOTAL in found.given and isinstance(total := found.given[_TOTAL][0], int):
        found.values["trainer.total_training_steps"] = (total // batch, found.given[_TOTAL][1])
