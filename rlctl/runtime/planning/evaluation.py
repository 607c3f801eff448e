"""Configuration that evaluates a run's checkpoint or a model folder, without training."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rlctl.recipes.compose import Recipe, compose
from rlctl.recipes.schema import Config
from rlctl.recipes.stored import recompose
from rlctl.runtime.checkpoint.store import CheckpointStore
from rlctl.runtime.data import quickstart
from rlctl.storage import is_url

_SETTINGS = (
    "actor_rollout_ref.model.tokenizer_path=null",
    "actor_rollout_ref.model.init=auto",
    "actor_rollout_ref.model.lora_rank=0",  # a checkpoint has its adapters merged
    "trainer.n_gpus_per_node=1",
)


def is_model(target: str) -> bool:
    """Return True for a model folder, its address, or the name of the quickstart model."""
    folder = Path(target).expanduser()
    return is_url(target) or (folder / "config.json").is_file() or target == quickstart.NAME


def model_config(model: str, recipe: str | Path, overrides: Sequence[str]) -> Config:
    """Return the config of `recipe` with the folder `model` as its model."""
    settings = [f"actor_rollout_ref.model.path={model}", *_SETTINGS, *overrides]
    return _resolve(compose(recipe, settings))


def run_config(run: Path, step: int | None, overrides: Sequence[str]) -> Config:
    """Return the config of a run with its checkpoint of `step` (the latest if None) as its model.

    Raises NotFoundError if there is no such checkpoint.
    """
    model = CheckpointStore(run / "checkpoints").policy(step)
    settings = [f"actor_rollout_ref.model.path={model}", *_SETTINGS, *overrides]
    return _resolve(recompose(run, settings))


def _resolve(recipe: Recipe) -> Config:
    return quickstart.resolve(recipe.config, Path(recipe.config.trainer.run_dir))
