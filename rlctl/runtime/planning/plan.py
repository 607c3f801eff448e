"""Plan of a run: configuration, data, devices and memory, all checked without a process."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from rlctl.cores import default_threads
from rlctl.data_prep.rows import PromptRow
from rlctl.debugging import call_limit
from rlctl.recipes import schema
from rlctl.recipes.compose import Recipe
from rlctl.recipes.role_table import needed_roles, rollout_pool
from rlctl.runtime.algorithms.base import Algorithm
from rlctl.runtime.base.rank_info import RankInfo
from rlctl.runtime.build import load_algorithm
from rlctl.runtime.data import bundled
from rlctl.runtime.data.loader import PromptLoader
from rlctl.runtime.planning.devices import Devices, pool_device, pool_sizes
from rlctl.runtime.planning.disk import warn_of_full_disk
from rlctl.runtime.planning.draft import CHECKS, Draft
from rlctl.runtime.planning.model_paths import with_models
from rlctl.runtime.planning.role_memory import MemoryPlan
from rlctl.runtime.rewards.specs import scored_sources
from rlctl.runtime.training.profile import check_profile
from rlctl.runtime.training.validation import ModelValidation, Validator


@dataclass(frozen=True)
class Plan:
    """A run that has passed every check; nothing is started or written yet."""

    recipe: Recipe
    config: schema.Config  # with `quickstart` resolved
    devices: Devices
    algorithm: Algorithm
    memory: MemoryPlan
    tokenizer: PreTrainedTokenizerBase
    loader: PromptLoader
    validator: Validator | ModelValidation | None
    scored_rows: list[PromptRow]  # first ones of each kind that is scored
    num_steps: int
    inline: bool

    @property
    def roles(self) -> set[str]:
        """Names of the roles that the algorithm uses, without the reward."""
        return {role.name for role in needed_roles(self.config, self.algorithm.needs)}

    @property
    def rollout_pool(self) -> str | None:
        """Pool of the rollout engines; None where they run in the actor's processes."""
        return rollout_pool(self.config, self.algorithm.needs)

    def device_of(self, pool: str) -> str:
        """Return the device of the processes of `pool`, "cpu" or "cuda"."""
        return pool_device(self.config, self.devices, self.algorithm.needs, pool)

    @property
    def pool_sizes(self) -> Mapping[str, int]:
        """Processes of each pool on all nodes, the actor's first; with `inline` they share one."""
        return pool_sizes(self.config, self.devices, self.algorithm.needs)

    @property
    def engine_bundles(self) -> tuple[int, ...]:
        """Devices of an engine of the pool on each of its nodes: on one, or all of several."""
        assert self.rollout_pool is not None
        size = self.config.actor_rollout_ref.rollout.tensor_model_parallel_size
        on_node = min(size, self.pool_sizes[self.rollout_pool] // self.devices.num_nodes)
        return (on_node,) * (size // on_node)

    @property
    def data_sources(self) -> list[str]:
        """Data sources of the rows that reward functions score."""
        return scored_sources(self.config, (row.data_source for row in self.scored_rows))

    @property
    def num_threads(self) -> int:
        """CPU threads of each process."""
        return self.config.trainer.num_threads or default_threads(sum(self.pool_sizes.values()))

    @property
    def first_rank(self) -> RankInfo:
        """Rank 0 of a pool of one process, which writes no log."""
        trainer = self.config.trainer
        return RankInfo(
            rank=0,
            world_size=1,
            device=self.devices.kind,
            num_threads=self.num_threads,
            timeout_s=call_limit(trainer.timeouts.call_s),
            deterministic=trainer.deterministic,
            log_path=None,
            seed=trainer.seed,
            access=trainer.run_dir_access,
        )


def make_plan(recipe: Recipe, inline: bool, run: Path | None = None) -> Plan:
    """Read the data and run every check that needs no process. Raises all problems at once.

    Writes nothing and starts nothing that stays. `run` is the folder of the run that resumes with
    this plan; None: a new run, whose name must be free.
    """
    config = with_models(recipe.config)
    with bundled.readable(config) as existing:
        draft = Draft(recipe, config, existing.data, inline, run)
        for check in CHECKS:
            draft.errors.run(check, draft)
        draft.errors.raise_all()
    trainer = config.trainer
    num_steps = trainer.total_training_steps or trainer.total_epochs * draft.loader.steps_per_epoch
    check_profile(trainer.profile, draft.pool_sizes, num_steps)
    plan = Plan(
        recipe=recipe,
        config=draft.config,
        devices=draft.devices,
        algorithm=load_algorithm(draft.config, num_steps),
        memory=draft.memory,
        tokenizer=draft.tokenizer,
        loader=draft.loader,
        validator=draft.validator,
        scored_rows=draft.scored_rows,
        num_steps=num_steps,
        inline=inline,
    )
    warn_of_full_disk(plan)
    return plan
