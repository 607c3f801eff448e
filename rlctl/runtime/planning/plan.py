"""Plan of a run: configuration, data, devices and memory, all checked without a process."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from rlctl.data_prep.rows import PromptRow
from rlctl.data_prep.sources import TRAIN, VALIDATION, data_files
from rlctl.errors import ConfigError, UsageError, raise_problems
from rlctl.plugins import load
from rlctl.recipes import schema
from rlctl.recipes.compose import Recipe
from rlctl.recipes.recorded import missing_secrets
from rlctl.recipes.roles import ACTOR, needed_roles, rollout_pool, trained_role
from rlctl.runs.naming import check_free
from rlctl.runtime.algorithms.base import Algorithm, Needs
from rlctl.runtime.algorithms.references import routed_models
from rlctl.runtime.build import load_algorithm
from rlctl.runtime.checkpoint.remote_copy import check_remote_copy
from rlctl.runtime.checkpoint.store import checkpoint_at
from rlctl.runtime.data import quickstart
from rlctl.runtime.data.loader import PromptLoader, PromptSet
from rlctl.runtime.data.pairs import Pairs
from rlctl.runtime.data.row_table import Rows
from rlctl.runtime.data.tokenizer import tokenizer_of
from rlctl.runtime.planning import mesh, preflight, router_check
from rlctl.runtime.planning.adapter_check import check_adapters
from rlctl.runtime.planning.devices import Devices, pool_sizes
from rlctl.runtime.planning.episode_check import check_rows
from rlctl.runtime.planning.error_collector import ErrorCollector
from rlctl.runtime.planning.model_runs import with_runs
from rlctl.runtime.planning.reward_check import NUM_REWARD_ROWS, check_reward
from rlctl.runtime.planning.role_memory import MemoryPlan, check_capacity, plan_memory
from rlctl.runtime.planning.role_models import check_models, check_optimizers, check_routes
from rlctl.runtime.planning.unusual_values import unusual_values
from rlctl.runtime.rank_info import default_threads
from rlctl.runtime.rewards.specs import scored_sources
from rlctl.runtime.training.pair_validation import PairValidator
from rlctl.runtime.training.profile import check_profile
from rlctl.runtime.training.validation import Validator
from rlctl.tracking.loggers import preflight as check_logger

LOG = logging.getLogger(__name__)


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
    validator: Validator | PairValidator | None
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

    @property
    def pool_sizes(self) -> Mapping[str, int]:
        """Processes of each pool on all nodes, the actor's first; with `inline` they share one."""
        return pool_sizes(self.config, self.devices, self.algorithm.needs)

    @property
    def data_sources(self) -> list[str]:
        """Data sources of the rows that reward functions score."""
        return scored_sources(self.config, (row.data_source for row in self.scored_rows))

    @property
    def scored_rows(self) -> list[PromptRow]:
        """First rows of each kind that is scored: of validation, and of sampled training rows."""
        return _scored_rows(_samples_responses(self.algorithm), self.loader, self.validator)

    @property
    def num_threads(self) -> int:
        """CPU threads of each process."""
        return self.config.trainer.num_threads or default_threads(sum(self.pool_sizes.values()))


def make_plan(
    recipe: Recipe, inline: bool, data_root: Path | None = None, run: Path | None = None
) -> Plan:
    """Read the data and run every check that needs no process. Raises all problems at once.

    `data_root` is the folder for the quickstart's data; None: the root of the runs. `run` is the
    folder of the run that resumes with this plan; None: a new run, whose name must be free.
    """
    trainer, errors = recipe.config.trainer, ErrorCollector()
    root = Path(trainer.run_dir)
    errors.run(raise_problems, missing_secrets(recipe.config))
    _check_surroundings(recipe.config, run, errors)
    config = quickstart.resolve(recipe.config, data_root or root)
    config = errors.run(with_runs, config) or config
    devices = errors.run(Devices.from_config, trainer)
    if inline and devices is not None and devices.total > 1:
        errors.add(
            UsageError(
                f"--inline runs one process, but the configuration asks for {devices.total}",
                hint="trainer.n_gpus_per_node=1",
                fix=("trainer.n_gpus_per_node", "trainer.n_gpus_per_node=1"),
            )
        )
    if devices is not None:
        errors.run(preflight.check_software, config, devices, inline)
    algorithm, memory = errors.run(load_algorithm, config, 1), None
    if algorithm is not None:
        errors.run(check_adapters, config, devices, algorithm.needs)
        errors.run(check_optimizers, config, algorithm.needs)
        errors.run(router_check.check_routers, config, devices and devices.kind, algorithm)
        if devices is not None:
            memory = _check_roles(config, devices, algorithm, inline, errors)
    trained = ACTOR if algorithm is None else trained_role(config, algorithm.needs)
    errors.run(raise_problems, preflight.check_model(config, trained))
    if algorithm is not None:
        errors.run(check_models, config, algorithm)
    if errors.run(preflight.check_disk, config, root) is None:
        errors.raise_all()  # before the quickstart's data is written to a full disk
    quickstart.write_data(config, data_root or root)
    tokenizer, loader, validator = _read_data(config, algorithm, errors)
    errors.raise_all()
    assert devices is not None, "otherwise there is an error"
    assert memory is not None, "otherwise there is an error"
    assert tokenizer is not None, "otherwise there is an error"
    assert loader is not None, "otherwise there is an error"
    assert algorithm is not None, "otherwise there is an error"
    num_steps = trainer.total_training_steps or trainer.total_epochs * loader.steps_per_epoch
    check_profile(trainer.profile, pool_sizes(config, devices, algorithm.needs), num_steps)
    return Plan(
        recipe=recipe,
        config=config,
        devices=devices,
        algorithm=load_algorithm(config, num_steps),
        memory=memory,
        tokenizer=tokenizer,
        loader=loader,
        validator=validator,
        num_steps=num_steps,
        inline=inline,
    )


def _check_surroundings(config: schema.Config, run: Path | None, errors: ErrorCollector) -> None:
    """Check the name of the run, its remote copy, and that engine and loggers can be used."""
    trainer, name = config.trainer, config.trainer.experiment_name
    if run is None:
        errors.run(check_free, Path(trainer.run_dir), trainer.project_name, name)
    if trainer.mirror is not None:
        errors.run(check_remote_copy, trainer.mirror, trainer.project_name, name, run)
    errors.run(load, "engines", config.actor_rollout_ref.rollout.name)
    if trainer.resume_mode == "resume_path":
        errors.run(checkpoint_at, trainer.resume_from_path)
    for unused in sorted(set(trainer.tracking.modes) - set(trainer.logger)):
        LOG.warning(
            f"trainer.tracking.modes.{unused} has no effect: {unused} is not in trainer.logger"
        )
    for logger in trainer.logger:
        errors.run(check_logger, logger, trainer.tracking.modes.get(logger))


def _check_roles(
    config: schema.Config,
    devices: Devices,
    algorithm: Algorithm,
    inline: bool,
    errors: ErrorCollector,
) -> MemoryPlan | None:
    """Check placement, batch sizes and memory of the roles; return their memory if it is known."""
    needs = algorithm.needs
    ranks, engines = pool_sizes(config, devices, needs), rollout_pool(config, needs)
    if inline and engines is not None:
        errors.add(
            UsageError(
                "--inline runs one process, but trainer.placement.rollout puts engines into others",
                hint="leave one out",
            )
        )
    problems = preflight.check_placement(config, devices, list(ranks), engines)
    errors.run(raise_problems, [*problems, *mesh.check_sizes(config, ranks, needs)])
    memory = errors.run(plan_memory, config, devices, ranks, needs, routed_models(algorithm))
    if memory is not None:
        for warning in (*memory.warnings, *unusual_values(config, needs)):
            LOG.warning(warning)
        errors.run(raise_problems, check_capacity(memory, devices, ranks))
    return memory


def _read_data(
    config: schema.Config, algorithm: Algorithm | None, errors: ErrorCollector
) -> tuple[PreTrainedTokenizerBase | None, PromptLoader | None, Validator | PairValidator | None]:
    """Load the tokenizer, training prompts and validation prompts, and try the reward functions.

    Reads the files also without a tokenizer. Training rows are scored if responses are sampled.
    """
    samples = algorithm is None or _samples_responses(algorithm)
    if algorithm is not None and Needs.REWARD_LEARNER in algorithm.needs:
        return _read_pairs(config, errors)
    needs = Needs.NOTHING if algorithm is None else algorithm.needs
    data, model, tokenizer = config.data, config.actor_rollout_ref.model, None
    if model.tokenizer_path or not preflight.is_missing(model.path):  # which is reported already
        tokenizer = errors.run(tokenizer_of, model)
    if tokenizer is None:
        scored: list[PromptRow] = []
        for file in data.train_paths:
            rows = errors.run(_first_rows, file, data, TRAIN) or []
            scored += rows if samples else []
        for file in data.val_files or ():
            scored += errors.run(_first_rows, file, data, VALIDATION) or []
        errors.run(check_reward, config, scored, needs)
        return None, None, None
    loader = errors.run(_load_train, config, tokenizer, samples)
    errors.run(check_routes, algorithm, loader.prompts.rows if loader else ())
    validator = errors.run(_load_val, config, tokenizer)
    scored = _scored_rows(samples, loader, validator)
    errors.run(check_reward, config, scored, needs)
    if samples:
        errors.run(check_rows, config, tokenizer, scored)
    return tokenizer, loader, validator


def _read_pairs(
    config: schema.Config, errors: ErrorCollector
) -> tuple[PreTrainedTokenizerBase | None, PromptLoader | None, PairValidator | None]:
    """Load the tokenizer of the reward model, and the pairs of training and validation."""
    model, data = config.reward.reward_model.model, config.data
    if not model.tokenizer_path and preflight.is_missing(model.path):
        return None, None, None  # which is reported already
    tokenizer = errors.run(tokenizer_of, model)
    if tokenizer is None:
        return None, None, None
    loader = errors.run(_load_train, config, tokenizer, False)
    found = errors.run(_load_val, config, tokenizer)
    pairs = Pairs.from_config(config.reward.reward_model, data)
    for prompts in (loader and loader.prompts, found and found.prompts):
        errors.run(pairs.check, prompts.rows if prompts else [])
    validator = found and PairValidator(found.prompts, found.batch_size, pairs)
    return tokenizer, loader, validator


def _samples_responses(algorithm: Algorithm) -> bool:
    return Needs.GROUPS in algorithm.needs


def _scored_rows(
    samples: bool, loader: PromptLoader | None, validator: Validator | PairValidator | None
) -> list[PromptRow]:
    sets = [loader.prompts] if loader and samples else []
    sets += [validator.prompts] if isinstance(validator, Validator) else []
    return [row for each in sets for row in each.rows.first_of_each_kind(NUM_REWARD_ROWS)]


def _first_rows(file: str, data: schema.Data, split: str) -> list[PromptRow]:
    rows = Rows.concat([Rows.load(path, data) for path in data_files(file, split)])
    return rows.first_of_each_kind(NUM_REWARD_ROWS)


def _load_train(
    config: schema.Config, tokenizer: PreTrainedTokenizerBase, samples: bool
) -> PromptLoader:
    data, key = config.data, "data.train_batch_size"
    prompts = PromptSet.load_train(data, tokenizer)
    if len(prompts) < data.train_batch_size:
        mini = config.actor_rollout_ref.actor.ppo_mini_batch_size
        raise ConfigError(
            f"{len(prompts)} training prompts do not fill one batch: {key}={data.train_batch_size}",
            hint=f"{key}={len(prompts)} or less",
            fix=(key, f"{key}={len(prompts) // mini * mini or len(prompts)}"),
        )
    loader = PromptLoader.from_config(prompts, data)
    if loader.stateful is not None and not samples:
        raise ConfigError(
            f"data.sampler={data.sampler} learns from scores, and {config.algorithm.name} has none",
            hint="leave data.sampler out",
        )
    return loader


def _load_val(config: schema.Config, tokenizer: PreTrainedTokenizerBase) -> Validator | None:
    data = config.data
    if data.val_files is None:
        return None
    prompts = PromptSet.load(data.val_files, data, tokenizer, data.val_max_samples, VALIDATION)
    return Validator(prompts, data.val_batch_size, tokenizer, config.trainer.seed)
