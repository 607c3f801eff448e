"""Models of runs: as paths in a configuration, and to evaluate without training."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rlctl.errors import UsageError
from rlctl.recipes.compose import Recipe, compose
from rlctl.recipes.role_table import ACTOR, Role, trained_role
from rlctl.recipes.schema import Config
from rlctl.runs.run import Run
from rlctl.runtime.build import load_algorithm
from rlctl.runtime.data import bundled
from rlctl.runtime.planning.model_paths import with_models
from rlctl.runtime.planning.preflight import read_model_config
from rlctl.runtime.training.checkpoint_store import CheckpointStore
from rlctl.suggest import hydra_text

_NO_TRAINING_DATA = "data.train_files=[]"
ONE_RANK = {  # values of `fsdp_config` for one process
    "fsdp_size": -1,
    "ulysses_sequence_parallel_size": 1,
    "expert_model_parallel_size": 1,
    "tensor_model_parallel_size": 1,
    "pipeline_model_parallel_size": 1,
}
_OF_MODEL = (
    "tokenizer_path=null",
    "custom_chat_template=null",  # a checkpoint has the run's template
    "init=auto",
    "lora_rank=0",  # a checkpoint has its adapters merged
)


def target_config(
    target: str | Path | Run,
    overrides: Sequence[str],
    recipe: str | Path,
    step: int | None = None,
    root: Path | None = None,
) -> Config:
    """Return the config that evaluates `target`: a run, a selector of one under `root`, or a model.

    A model folder, its URL or a bundled model gets the settings of `recipe`. A run has the recorded
    ones, and its checkpoint of `step` (the latest if None). Raises NotFoundError without run or
    checkpoint, and UsageError for the folder of a reward model and a recipe that generates.
    """
    if isinstance(target, Run):
        return _run_config(target.path, step, overrides)
    from rlctl.runs.store import find_run_or_model

    found = find_run_or_model(str(target), root)
    if isinstance(found, str):
        return _model_config(found, recipe, overrides)
    return _run_config(found.path, step, overrides)


def _model_config(model: str, recipe: str | Path, overrides: Sequence[str]) -> Config:
    """Return the config of `recipe` with the folder `model` as its model."""
    given = [_NO_TRAINING_DATA, *overrides]
    path = hydra_text(f"{ACTOR.model_key}.path", model)  # a recipe may leave it to its users
    role = _trained(compose(recipe, [path, *given]).config)
    config = _resolve(compose(recipe, [*_settings(role, model), *given]))
    if role is ACTOR:
        found = read_model_config(role.model(config), f"{role.model_key}.path").architectures or ()
        if any(name.endswith("ForSequenceClassification") for name in found):
            raise no_responses()
    return config


def no_responses() -> UsageError:
    """Return the error of a reward model that should generate."""
    return UsageError(
        "a reward model generates no responses",
        hint="rlctl reward test --model RUN|DIR scores responses with it",
    )


def _run_config(run: Path, step: int | None, overrides: Sequence[str]) -> Config:
    """Return the config of a run with its checkpoint of `step` (None: the latest) as its model."""
    from rlctl.runs.trust import recompose_run
    from rlctl.runtime.training.complete_checkpoints import policy_folder

    model = policy_folder(CheckpointStore(run / "checkpoints"), step)
    role = _trained(recompose_run(run, overrides).config)
    return _resolve(recompose_run(run, [*_settings(role, str(model)), *overrides]))


def _settings(role: Role, model: str) -> list[str]:
    """Return the overrides that make the folder `model` the model of `role`."""
    others = [f"{role.model_key}.{name}" for name in _OF_MODEL]
    others += [f"{role.fsdp_key}.{name}={size}" for name, size in ONE_RANK.items()]
    return [hydra_text(f"{role.model_key}.path", model), *others, "trainer.n_gpus_per_node=1"]


def _trained(config: Config) -> Role:
    return trained_role(config, load_algorithm(config, num_steps=1).needs)


def _resolve(recipe: Recipe) -> Config:
    config = with_models(recipe.config)
    bundled.write_data(config)
    return config
