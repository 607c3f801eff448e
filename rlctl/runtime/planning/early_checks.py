"""Checks of a start that need neither torch nor transformers, whose import takes seconds."""

from __future__ import annotations

import json
from collections.abc import Sequence
from importlib import import_module
from importlib.metadata import requires
from importlib.util import find_spec
from pathlib import Path

from rlctl.data_prep.rows import existing_file
from rlctl.data_prep.sources import RAW_SUFFIXES, TRAIN, VALIDATION, data_files
from rlctl.errors import ConfigError, raise_problems
from rlctl.packages import installed_version, require
from rlctl.plugins import entry_points_of, load
from rlctl.quickstart import NAME, real_path
from rlctl.recipes import schema
from rlctl.recipes.compose import Recipe
from rlctl.recipes.recorded import missing_secrets
from rlctl.recipes.search_path import MODEL, verbs
from rlctl.runs.naming import check_free
from rlctl.runs.run_dir import RECORD_FILE
from rlctl.runtime.cluster.address import address_of
from rlctl.runtime.data.model_folder import check_folder, check_tokenizer_files, template_of
from rlctl.runtime.data.row_table import Rows
from rlctl.runtime.planning.error_collector import ErrorCollector
from rlctl.storage import is_url


def resumed_run(trainer: schema.Trainer) -> Path | None:
    """Return the folder of the run that `rlctl train` resumes; None for a new run."""
    run = Path(trainer.run_dir) / trainer.project_name / (trainer.experiment_name or "")
    by_name = trainer.resume_mode not in ("disable", "resume_path") and trainer.experiment_name
    return run if by_name and (run / RECORD_FILE).exists() else None


def check_early(recipe: Recipe, has_name: bool = False) -> None:
    """Raise the problems of a run that its configuration and files show, all at once.

    `has_name` says that it has its folder, whose name need not be free.
    """
    config = recipe.config
    errors = ErrorCollector()
    errors.run(lambda: raise_problems(missing_secrets(config)))
    trainer = config.trainer
    if trainer.resume_mode == "disable" and not has_name:
        root = Path(trainer.run_dir)
        errors.run(check_free, root, trainer.project_name, trainer.experiment_name)
    for logger in trainer.logger:
        errors.run(_check_logger, logger)
    errors.run(_check_engine, config)
    of_verbs = {facts.algorithm: facts.model for facts in verbs().values()}
    key = of_verbs.get(config.algorithm.name, MODEL)
    model = (config.actor_rollout_ref if key == MODEL else config.reward.reward_model).model
    errors.run(check_extras, model)
    errors.run(_check_model, model, key)
    errors.run(_check_template, model)
    data = config.data
    for split, files in ((TRAIN, data.train_paths), (VALIDATION, data.val_files or ())):
        for file in files:
            errors.run(_check_data, file, split, data)
    rewards = [name.rpartition(":")[0] for name in config.reward.functions or ()]
    for path in (*rewards, config.reward.custom_reward_function.path or ""):
        if path.endswith(".py"):
            from rlctl.plugins.user_code import check_file

            errors.run(check_file, Path(path).expanduser(), "the reward file does not exist")
    errors.raise_all()


def check_extras(model: schema.Model) -> None:
    """Raise MissingExtraError if `peft` or `bitsandbytes` is needed and not installed."""
    if model.lora_rank > 0:
        require("peft", "LoRA needs peft", "peft", "lora_rank")
        if model.load_in_4bit:
            what = "a base in 4 bits needs bitsandbytes"
            require("bitsandbytes", what, "qlora", "load_in_4bit")


def _check_logger(name: str) -> None:
    """Load a logger if a package of its extras is not installed, which raises its error."""
    for point in entry_points_of("loggers"):
        if point.name == name and point.dist is not None:
            wanted = _packages(point.dist.name, point.extras)
            if any(installed_version(package) is None for package in wanted):
                load("loggers", name)


def _packages(package: str, extras: Sequence[str]) -> list[str]:
    from packaging.requirements import Requirement

    return [
        needed.name
        for needed in map(Requirement, requires(package) or ())
        if needed.marker is not None
        and any(needed.marker.evaluate({"extra": extra}) for extra in extras)
    ]


def _check_engine(config: schema.Config) -> None:
    """Run the early check of the engine's package, if it is one of rlctl and has one."""
    if address_of(config.ray_kwargs.ray_init) is not None:  # its nodes may have other packages
        return
    for point in entry_points_of("engines"):
        early = f"{point.module.rpartition('.')[0]}.early"
        chosen = point.name == config.actor_rollout_ref.rollout.name
        if chosen and early.startswith("rlctl.") and find_spec(early) is not None:
            from rlctl.runtime.cluster.nvidia import visible_gpus

            import_module(early).check(config, bool(visible_gpus()))


def _check_model(model: schema.Model, key: str) -> None:
    if is_url(model.path):
        return
    check_folder(model.path, key)
    folder = Path(real_path(model.path)).expanduser()
    if folder.is_dir():
        _check_config_file(folder / "config.json", model.path, key)
    if not is_url(model.tokenizer_path or ""):
        check_tokenizer_files(Path(real_path(model.tokenizer_path or model.path)).expanduser())


def _check_config_file(file: Path, path: str, key: str) -> None:
    try:
        json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        message = f"the model {path!r} has no readable config.json: {error}"
        raise ConfigError(message, where=key) from error


def _check_template(model: schema.Model) -> None:
    """Raise ConfigError if the configured template is no valid Jinja."""
    if not is_url(model.chat_template_file or "") and (text := template_of(model)) is not None:
        from rlctl.runtime.planning.template_syntax import check_syntax

        check_syntax(text, model.chat_template_file)


def _check_data(file: str, split: str, data: schema.Data) -> None:
    """Check that a local data file exists, and the rows of one that is not large."""
    given = Path(file).expanduser()
    is_local = not is_url(file) and not file.startswith(NAME)  # a folder may have a bundled name
    if is_local and not data.reader and (given.exists() or given.suffix in RAW_SUFFIXES):
        for path in data_files(file, split):
            if existing_file(path).stat().st_size < 2**20:  # the plan reads them once more
                Rows.load(path, data, data.skip_invalid and split == TRAIN)
