"""Configuration that evaluates a run's checkpoint or a model folder, without training."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rlctl.quickstart import FOLDERS
from rlctl.recipes.compose import Recipe, compose
from rlctl.recipes.schema import Config
from rlctl.recipes.stored import recompose
from rlctl.runs.run import Run
from rlctl.runs.store import RunStore
from rlctl.runtime.checkpoint.store import CheckpointStore
from rlctl.runtime.data import quickstart
from rlctl.runtime.planning.model_runs import with_runs
from rlctl.storage import is_url

_SETTINGS = (
    "actor_rollout_ref.model.tokenizer_path=null",
    "actor_rollout_ref.model.custom_chat_template=null",  # a checkpoint has the run's template
    "actor_rollout_ref.model.init=auto",
    "actor_rollout_ref.model.lora_rank=0",  # a checkpoint has its adapters merged
    "trainer.n_gpus_per_node=1",
)


def target_config(
    target: str | Path | Run,
    overrides: Sequence[str],
    recipe: str | Path,
    step: int | None = None,
    root: Path | None = None,
) -> Config:
    """Return the config that evaluates `target`: a run, a selector of one under `root`, or a model.

    A model folder, its URL or a bundled model gets the settings of `recipe`; a run has its own, and
    its checkpoint of `step` (the latest if None). Raises NotFoundError without run or checkpoint.
    """
    if isinstance(target, Run):
        return _run_config(target.path, step, overrides)
    if _is_model(str(target)):
        return _model_config(str(target), recipe, overrides)
    return _run_config(RunStore.at(root).find(str(target)).path, step, overrides)


def _is_model(target: str) -> bool:
    """Return True for a model folder, its URL, or the name of a bundled model."""
    folder = Path(target).expanduser()
    return is_url(target) or (folder / "config.json").is_file() or target in FOLDERS


def _model_config(model: str, recipe: str | Path, overrides: Sequence[str]) -> Config:
    """Return the config of `recipe` with the folder `model` as its model."""
    settings = [f"actor_rollout_ref.model.path={model}", *_SETTINGS, *overrides]
    return _resolve(compose(recipe, settings))


def _run_config(run: Path, step: int | None, overrides: Sequence[str]) -> Config:
    """Return the config of a run with its checkpoint of `step` (None: the latest) as its model."""
    model = CheckpointStore(run / "checkpoints").policy(step)
    settings = [f"actor_rollout_ref.model.path={model}", *_SETTINGS, *overrides]
    return _resolve(recompose(run, settings))


def _resolve(recipe: Recipe) -> Config:
    root = Path(recipe.config.trainer.run_dir)
    config = with_runs(quickstart.resolve(recipe.config, root))
    quickstart.write_data(config, root)
    return config
