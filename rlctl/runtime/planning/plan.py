"""What a run is going to do, judged as a whole: every check that needs no process, and all that is wrong at once."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from rlctl.data_prep.rows import PromptRow, read_rows
from rlctl.errors import ConfigError, UsageError, raise_problems
from rlctl.plugins import load
from rlctl.recipes import schema
from rlctl.recipes.compose import Recipe
from rlctl.recipes.roles import needed_roles, pool_names, rollout_pool
from rlctl.runs.run_dir import check_free
from rlctl.runtime.algorithms.base import Algorithm, Needs
from rlctl.runtime.build import load_algorithm
from rlctl.runtime.checkpoint.remote_copy import check_mirror
from rlctl.runtime.data import quickstart
from rlctl.runtime.data.loader import PromptLoader, PromptSet
from rlctl.runtime.data.samplers import sequential_order
from rlctl.runtime.data.tokenizer import load_tokenizer
from rlctl.runtime.planning import preflight
from rlctl.runtime.planning.capacity import check_capacity
from rlctl.runtime.planning.model_files import check_weights
from rlctl.runtime.planning.preflight import Devices, ErrorCollector
from rlctl.runtime.rank_info import available_cores
from rlctl.runtime.training.validation import Validator
from rlctl.tracking.fanout import preflight as check_logger


@dataclass(frozen=True)
class Plan:
    """A run that has passed every check and has touched nothing yet."""

    recipe: Recipe
    config: schema.Config  # with `quickstart` resolved
    devices: Devices
    algorithm: Algorithm
    tokenizer: PreTrainedTokenizerBase
    loader: PromptLoader
    validator: Validator | None
    num_steps: int
    inline: bool

    @property
    def roles(self) -> set[str]:
        """Return the names of the roles that the algorithm uses, the reward aside."""
        needed = needed_roles(self.config.trainer.placement, self.algorithm.needs)
        return {role.name for role in needed}

    @property
    def rollout_pool(self) -> str | None:
        """The pool of the rollout engines; None where they live in the actor's processes."""
        return rollout_pool(self.config.trainer.placement, self.algorithm.needs)

    @property
    def pool_sizes(self) -> dict[str, int]:
        """The processes of each pool on all nodes, the actor's first. With `inline` it is one process for all of them."""
        return pool_sizes(self.config.trainer.placement, self.devices, self.algorithm.needs)

    @property
    def num_threads(self) -> int:
        """CPU threads of each process."""
        return self.config.trainer.num_threads or max(
            1, available_cores() // sum(self.pool_sizes.values())
        )


def pool_sizes(placement: schema.Placement, devices: Devices, needs: Needs) -> dict[str, int]:
    """The processes of each pool on all nodes, the actor's first."""
    names = pool_names(placement, needs)
    return {name: placement.pools.get(name, devices.per_node) * devices.num_nodes for name in names}


def make_plan(
    recipe: Recipe, inline: bool, data_root: Path | None = None, run: Path | None = None
) -> Plan:
    """Read the data and check everything that can be checked without starting a process that stays. Raises what is wrong, all at once.

    `data_root` is the folder in which the quickstart's data are made, where they are asked for; None: that of the runs. `run` is the run
    that goes on with this plan; None: a new one, whose name must be free.
    """
    trainer, found = recipe.config.trainer, ErrorCollector()
    root = Path(trainer.run_dir)
    if run is None:
        found.run(check_free, root, trainer.project_name, trainer.experiment_name)
    if trainer.mirror is not None:
        found.run(check_mirror, trainer.mirror, trainer.project_name, trainer.experiment_name, run)
    found.run(load, "engines", recipe.config.actor_rollout_ref.rollout.name)
    for name in trainer.logger:
        found.run(check_logger, name, trainer.tracking.modes.get(name))
    config = quickstart.resolve(recipe.config, data_root or root)
    devices = found.run(Devices.of, trainer)
    if inline and devices is not None and devices.total > 1:
        found.add(
            UsageError(
                f"--inline runs one process, but the configuration asks for {devices.total}",
                hint="trainer.n_gpus_per_node=1",
            )
        )
    found.run(raise_problems, preflight.check_built(config))
    if devices is not None:
        found.run(
            preflight.check_engine,
            config,
            devices,
            trainer.placement.rollout not in (None, trainer.placement.actor),
        )
    algorithm = found.run(load_algorithm, config, 1)
    if algorithm is not None:
        found.run(preflight.check_adapters, config, algorithm.needs)
    if algorithm is not None and devices is not None:
        ranks = pool_sizes(trainer.placement, devices, algorithm.needs)
        separate = rollout_pool(trainer.placement, algorithm.needs)
        if inline and separate is not None:
            found.add(
                UsageError(
                    "--inline runs one process, but trainer.placement.rollout puts engines into others",
                    hint="leave one out",
                )
            )
        placed = preflight.check_placement(
            config, devices, pool_names(trainer.placement, algorithm.needs), separate
        )
        found.run(
            raise_problems, [*placed, *preflight.check_batches(config, ranks, algorithm.needs)]
        )
        found.run(
            raise_problems, found.run(check_capacity, config, devices, ranks, algorithm.needs) or []
        )
    found.run(raise_problems, preflight.check_model(config))
    if (
        algorithm is not None
        and Needs.CRITIC in algorithm.needs
        and config.critic.model != config.actor_rollout_ref.model
    ):
        found.run(preflight.read_model_config, config.critic.model, "critic.model.path")
        found.run(raise_problems, check_weights(config.critic.model, "critic.model.path"))
    found.run(preflight.check_disk, config, root)
    tokenizer, loader, validator = _read_data(config, found)
    found.raise_all()
    assert devices is not None, "or something has been found"
    assert tokenizer is not None, "or something has been found"
    assert loader is not None, "or something has been found"
    num_steps = trainer.total_training_steps or trainer.total_epochs * loader.steps_per_epoch
    return Plan(
        recipe,
        config,
        devices,
        load_algorithm(config, num_steps),
        tokenizer,
        loader,
        validator,
        num_steps,
        inline,
    )


def _read_data(
    config: schema.Config, found: ErrorCollector
) -> tuple[PreTrainedTokenizerBase | None, PromptLoader | None, Validator | None]:
    """Tokenizer, training prompts and validation; without a tokenizer the files are still read and the reward function still tried."""
    data, model = config.data, config.actor_rollout_ref.model
    tokenizer = None
    if model.tokenizer_path or not preflight.is_missing(
        model.path
    ):  # a missing model has been reported once
        tokenizer = found.run(
            load_tokenizer, model.tokenizer_path or model.path, model.trust_remote_code
        )
    if tokenizer is None:
        rows = [each for file in data.train_files for each in found.run(_rows, file, data) or []]
        for file in data.val_files or ():
            found.run(_rows, file, data)
        found.run(preflight.check_reward, config.reward, rows)
        return None, None, None
    loader = found.run(_load_train, config, tokenizer)
    validator = found.run(_load_val, config, tokenizer)
    found.run(preflight.check_reward, config.reward, loader.prompts.rows if loader else [])
    return tokenizer, loader, validator


def _rows(file: str, data: schema.Data) -> list[PromptRow]:
    return read_rows(file, prompt_key=data.prompt_key, reward_fn_key=data.reward_fn_key)


def _load_train(config: schema.Config, tokenizer: PreTrainedTokenizerBase) -> PromptLoader:
    data = config.data
    sampler = load("samplers", data.sampler) if data.shuffle else sequential_order
    prompts = PromptSet.load(data.train_files, data, tokenizer, data.train_max_samples)
    if len(prompts) < data.train_batch_size:
        raise ConfigError(
            f"{len(prompts)} training prompts do not fill one batch of data.train_batch_size={data.train_batch_size}",
            hint=f"data.train_batch_size={len(prompts)} or less",
        )
    return PromptLoader(prompts, data.train_batch_size, sampler, data.seed)


def _load_val(config: schema.Config, tokenizer: PreTrainedTokenizerBase) -> Validator | None:
    data = config.data
    if data.val_files is None:
        return None
    prompts = PromptSet.load(data.val_files, data, tokenizer, data.val_max_samples)
    return Validator(prompts, data.val_batch_size, tokenizer, config.trainer.seed)
