"""Checks of a plan, over a draft whose parts are made when a check first needs them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers import PreTrainedTokenizerBase

from rlctl.data_prep.rows import PromptRow
from rlctl.data_prep.sources import TRAIN, VALIDATION, data_files
from rlctl.errors import ConfigError, UsageError, raise_problems
from rlctl.plugins import load
from rlctl.recipes import schema
from rlctl.recipes.compose import Recipe
from rlctl.recipes.recorded import missing_secrets
from rlctl.recipes.role_table import REWARD_LEARNER, Role, rollout_pool, trained_role
from rlctl.runs.naming import check_free
from rlctl.runtime.algorithms.base import Algorithm, Needs, routed_models, row_fields
from rlctl.runtime.build import load_algorithm, role_plugin
from rlctl.runtime.data.loader import PromptLoader, PromptSet
from rlctl.runtime.data.model_folder import is_missing
from rlctl.runtime.data.row_checks import empty_truths
from rlctl.runtime.data.row_table import Rows
from rlctl.runtime.data.tokenizer import tokenizer_of
from rlctl.runtime.planning import preflight
from rlctl.runtime.planning.capacity import check_capacity
from rlctl.runtime.planning.devices import Devices, pool_sizes
from rlctl.runtime.planning.error_collector import ErrorCollector, Part
from rlctl.runtime.planning.placement import check_placement, check_sizes
from rlctl.runtime.planning.reward_check import NUM_REWARD_ROWS, check_reward
from rlctl.runtime.planning.role_memory import MemoryPlan, plan_memory
from rlctl.runtime.planning.role_models import (
    check_adapters,
    check_optimizers,
    check_role_models,
    check_routers,
    check_routes,
)
from rlctl.runtime.planning.unusual_values import (
    check_rows,
    missing_generation_prompt,
    unusual_values,
)
from rlctl.runtime.rollout.auto import reason_for_hf
from rlctl.runtime.training.validation import ModelValidation, Validator
from rlctl.text import counted
from rlctl.tracking.loggers import preflight as check_logger

if TYPE_CHECKING:
    from rlctl.runtime.cluster.gpus import ClusterGpus
    from rlctl.runtime.data.conversations import Pairs

LOG = logging.getLogger(__name__)


@dataclass
class Draft:
    """Plan in the making; a part is made when a check first needs it."""

    recipe: Recipe
    config: schema.Config
    data: schema.Data  # with files that exist
    inline: bool
    run: Path | None
    errors: ErrorCollector = field(default_factory=ErrorCollector)

    @Part
    def devices(self) -> Devices:
        """Devices of the run."""
        gpus: ClusterGpus | None = None
        if not self.inline:
            from rlctl.runtime.cluster.gpus import cluster_gpus

            gpus = cluster_gpus(self.config)
        return Devices.from_config(self.config.trainer, gpus)

    @property
    def known_devices(self) -> Devices | None:
        """The devices, None if there are not as many."""
        return self.errors.run(lambda: self.devices)

    @Part
    def algorithm(self) -> Algorithm:
        """Build the algorithm, whose number of steps is not known yet."""
        return load_algorithm(self.config, 1)

    @property
    def needs(self) -> Needs:
        """Needs of the algorithm."""
        return self.algorithm.needs

    @property
    def data_needs(self) -> Needs:
        """Needs of the algorithm; if it cannot be loaded, those of one that samples responses."""
        needs = self.errors.run(lambda: self.needs)
        return Needs.GROUPS if needs is None else needs

    @property
    def samples(self) -> bool:
        """True if responses are sampled in training, and scored."""
        return Needs.GROUPS in self.data_needs

    @property
    def role(self) -> Role:
        """Role that is trained."""
        return trained_role(self.config, self.data_needs)

    @property
    def pool_sizes(self) -> Mapping[str, int]:
        """Processes of each pool on all nodes."""
        return pool_sizes(self.config, self.devices, self.needs)

    @Part
    def memory(self) -> MemoryPlan:
        """Memory of the roles."""
        references = routed_models(self.algorithm)
        return plan_memory(self.config, self.devices, self.pool_sizes, self.needs, references)

    @Part
    def vocabulary(self) -> tuple[PreTrainedTokenizerBase, Mapping[int, str]]:
        """Tokenizer of the model that reads the data, and its tokens that the model lacks."""
        model = self.role.model(self.config)
        if not model.tokenizer_path and is_missing(model.path):
            raise_problems(preflight.check_model(self.config, self.role))
        tokenizer = tokenizer_of(model)
        return tokenizer, preflight.check_vocabulary(model, tokenizer, self.role.model_key)

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """Tokenizer of the model that reads the data."""
        return self.vocabulary[0]

    @Part
    def prompts(self) -> PromptSet:
        """Training prompts."""
        model = self.role.model(self.config)
        fields = row_fields(self.errors.run(lambda: self.algorithm))
        prompts = PromptSet.load_train(self.data, self.tokenizer, model, fields)
        prompts.check_tokens(self.vocabulary[1])
        if prompts.skipped:
            LOG.warning(f"training rows left out (data.skip_invalid): {counted(prompts.skipped)}")
        return prompts

    @Part
    def loader(self) -> PromptLoader:
        """Training prompts in batches."""
        return _loader(self.config, self.data, self.prompts, self.samples)

    @Part
    def pairs(self) -> Pairs:
        """Reader of pairs."""
        from rlctl.runtime.data.conversations import Pairs

        return Pairs.from_config(self.config.reward.reward_model, self.data)

    @Part
    def validator(self) -> Validator | ModelValidation | None:
        """Validation prompts; None without validation."""
        data = self.data
        tokenizer = self.tokenizer
        if data.val_files is None:
            return None
        files = data.val_files
        model = self.role.model(self.config)
        prompts = PromptSet.load(files, data, tokenizer, data.val_max_samples, VALIDATION, model)
        prompts.check_tokens(self.vocabulary[1])
        if self.role is REWARD_LEARNER:
            return role_plugin(self.role.name).validator(self.config, prompts)
        if data.reader is not None and not self.samples:
            from rlctl.runtime.training.loss_validation import LossValidator

            by_loss: Any = LossValidator(prompts, data.val_batch_size)
            return by_loss
        return Validator(prompts, data.val_batch_size, tokenizer, self.config.trainer.seed)

    @Part
    def scored_files(self) -> dict[str, list[PromptRow]]:
        """First rows of each kind that is scored, by key and file.

        Without a tokenizer, and of several files, also rows with too long prompts.
        """
        run = self.errors.run
        data = self.data
        sets: list[tuple[str, str, PromptSet | None]] = []
        if run(lambda: self.tokenizer) is not None:
            loader = run(lambda: self.loader)
            validator = run(lambda: self.validator)
            if loader and self.samples:
                sets.append(("data.train_files", TRAIN, loader.prompts))
            if isinstance(validator, Validator):
                sets.append(("data.val_files", VALIDATION, validator.prompts))
        else:
            if self.samples:
                sets.append(("data.train_files", TRAIN, None))
            if data.val_files:
                sets.append(("data.val_files", VALIDATION, None))
        found: dict[str, list[PromptRow]] = {}
        for key, split, prompts in sets:
            paths = data.train_paths if split == TRAIN else data.val_files or ()
            for file in paths:
                if prompts is not None and (len(paths) == 1 or data.reader):
                    rows = prompts.rows.first_of_each_kind(NUM_REWARD_ROWS)
                else:
                    rows = (not data.reader and run(_first_rows, file, data, split)) or []
                found[f"{key}: {file}"] = rows
        return found

    @property
    def scored_rows(self) -> list[PromptRow]:
        """First rows of each kind that is scored, of all files."""
        return [row for rows in self.scored_files.values() for row in rows]


def _check_surroundings(draft: Draft) -> None:
    """Check the name of the run, its remote copy, and that engine and loggers can be used."""
    trainer = draft.config.trainer
    run = draft.errors.run
    name = trainer.experiment_name
    if draft.run is None:
        run(check_free, Path(trainer.run_dir), trainer.project_name, name)
    run(load, "engines", draft.config.actor_rollout_ref.rollout.name)
    if trainer.resume_mode == "resume_path":
        from rlctl.runtime.training.complete_checkpoints import checkpoint_at

        run(checkpoint_at, trainer.resume_from_path)
    for unused in sorted(set(trainer.tracking.modes) - set(trainer.logger)):
        LOG.warning(
            f"trainer.tracking.modes.{unused} has no effect: {unused} is not in trainer.logger"
        )
    for logger in trainer.logger:
        tracking = trainer.tracking
        run(check_logger, logger, tracking.modes.get(logger), tracking.params)


def _check_listeners(draft: Draft) -> None:
    if draft.config.trainer.listening:
        from rlctl.runtime.training.listeners import check_listener

        validator = draft.errors.run(lambda: draft.validator)
        sources = validator.prompts.rows.count_sources() if validator else ()
        for name in draft.config.trainer.listening:
            draft.errors.run(check_listener, name, draft.config, draft.run, sources)


def _check_inline(draft: Draft) -> None:
    if draft.inline and draft.devices.total > 1:
        raise UsageError(
            f"--inline runs one process, but the configuration asks for {draft.devices.total}",
            hint="trainer.n_gpus_per_node=1",
            fix=("trainer.n_gpus_per_node", "trainer.n_gpus_per_node=1"),
        )


def _check_pools(draft: Draft) -> None:
    config = draft.config
    needs = draft.needs
    ranks = draft.pool_sizes
    engines = rollout_pool(config, needs)
    if draft.inline and engines is not None:
        draft.errors.add(
            UsageError(
                "--inline runs one process, but trainer.placement.rollout puts engines into others",
                hint="leave one out",
            )
        )
    problems = check_placement(config, draft.devices, list(ranks), engines)
    raise_problems(chain(problems, check_sizes(config, ranks, needs)))


def _check_memory(draft: Draft) -> None:
    name = draft.config.actor_rollout_ref.rollout.name
    reason = reason_for_hf(draft.devices.kind)
    if name == "auto" and reason is not None and Needs.ENGINE in draft.needs:
        LOG.warning(f"rollout.name=auto generates with hf, which is slower than vLLM: {reason}")
    for warning in (*draft.memory.warnings, *unusual_values(draft.config, draft.needs)):
        LOG.warning(warning)
    raise_problems(check_capacity(draft.memory, draft.devices, draft.pool_sizes))


def _check_template(draft: Draft) -> None:
    if draft.role is not REWARD_LEARNER:
        kwargs = draft.data.apply_chat_template_kwargs
        for warning in missing_generation_prompt(draft.tokenizer, kwargs):
            LOG.warning(warning)


def _check_images(draft: Draft, rows: Rows) -> None:
    if rows.with_images().any():
        from rlctl.runtime.planning.image_check import check_images

        check_images(draft.config, draft.known_devices, draft.needs)


def _check_pairs(draft: Draft) -> None:
    if draft.role is not REWARD_LEARNER:
        return
    draft.errors.run(lambda: draft.pairs.check_template(draft.loader.prompts.rows))
    if draft.validator is not None:
        rows = draft.validator.prompts.rows
        draft.errors.run(lambda: draft.pairs.check(rows))


def check_rewards(draft: Draft) -> None:
    """Try the reward functions on the first rows."""
    if draft.role is REWARD_LEARNER:
        return
    draft.errors.run(check_reward, draft.config, draft.scored_files, draft.data_needs)
    if draft.samples:
        for warning in empty_truths(draft.loader.prompts.rows):
            LOG.warning(warning)
        check_rows(draft.config, draft.tokenizer, draft.scored_rows)


# In the order of their problems. Each may use parts of the draft that cannot be made.
CHECKS: tuple[Callable[[Draft], object], ...] = (
    lambda draft: raise_problems(missing_secrets(draft.recipe.config)),
    _check_surroundings,
    lambda draft: draft.devices,
    _check_inline,
    lambda draft: preflight.check_software(draft.config, draft.devices, draft.inline),
    lambda draft: draft.algorithm,
    lambda draft: check_adapters(draft.config, draft.known_devices, draft.needs),
    lambda draft: check_optimizers(draft.config, draft.needs),
    lambda draft: check_routers(
        draft.config, draft.known_devices and draft.known_devices.kind, draft.algorithm
    ),
    _check_pools,
    _check_memory,
    lambda draft: raise_problems(preflight.check_model(draft.config, draft.role)),
    lambda draft: raise_problems(check_role_models(draft.config, draft.algorithm)),
    lambda draft: preflight.check_disk(draft.config, Path(draft.config.trainer.run_dir), draft.run),
    _check_template,
    lambda draft: draft.loader,
    lambda draft: _check_images(draft, draft.loader.prompts.rows),
    lambda draft: check_routes(draft.algorithm, draft.loader.prompts.rows),
    lambda draft: draft.validator and _check_images(draft, draft.validator.prompts.rows),
    _check_listeners,
    _check_pairs,
    check_rewards,
)


def _first_rows(file: str, data: schema.Data, split: str) -> list[PromptRow]:
    skip = data.skip_invalid and split == TRAIN
    rows = Rows.concat([Rows.load(path, data, skip) for path in data_files(file, split)])
    return rows.first_of_each_kind(NUM_REWARD_ROWS)


def _loader(
    config: schema.Config, data: schema.Data, prompts: PromptSet, samples: bool
) -> PromptLoader:
    key = "data.train_batch_size"
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
