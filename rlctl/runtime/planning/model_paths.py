"""Folders of models that a configuration names: bundled ones, and those of runs."""

from __future__ import annotations

from collections.abc import Mapping
from operator import attrgetter
from pathlib import Path
from typing import Any

from rlctl.errors import ConfigError
from rlctl.quickstart import real_path
from rlctl.recipes.role_table import ROLES
from rlctl.recipes.schema import Config
from rlctl.runs.run_dir import RECORD_FILE
from rlctl.runtime.data import bundled
from rlctl.runtime.training.checkpoint_store import CheckpointStore
from rlctl.storage import is_url


def with_models(config: Config) -> Config:
    """Replace bundled names and names of runs by the folders of their (latest exported) models.

    Raises NotFoundError for a run without a checkpoint, and ConfigError for an ambiguous name.
    """
    root = Path(config.trainer.run_dir)
    config = bundled.resolve(config, root)
    for key in sorted({role.model_key for role in ROLES}):
        path = _path(attrgetter(key)(config).path, root, key)
        config = config.replaced(f"{key}.path", path)
    params = _in_settings(config.algorithm.params, root, "algorithm.params")
    return config.replaced("algorithm.params", params)


def _in_settings(values: Mapping[str, Any], root: Path, key: str) -> dict[str, Any]:
    """Return the settings with real paths for the runs and bundled models of each `model_path`."""
    found = dict(values)
    for name, value in values.items():
        if isinstance(value, Mapping):
            found[name] = _in_settings(value, root, f"{key}.{name}")
        elif name == "model_path" and isinstance(value, str):
            found[name] = real_path(_path(value, root, key))
    return found


def _path(path: str, root: Path, key: str) -> str:
    """Return the folder of the model that `path` names; other paths unchanged."""
    folder = Path(path).expanduser()
    if is_url(path) or (folder.exists() and not _is_run(folder)):
        return path
    if path.startswith("@"):
        raise ConfigError(
            f"there is no model folder {path!r}",
            where=f"{key}.path",
            hint="give the run's name: a resumed run must find the same model",
        )
    found = [folder] if folder.exists() else _runs(path, root)
    if len(found) > 1:
        raise ConfigError(
            f"{path!r} is the name of {len(found)} runs",
            where=f"{key}.path",
            hint="give the project, too: "
            + " or ".join(str(run.relative_to(root)) for run in found),
        )
    if not found:
        return path
    from rlctl.runtime.training.complete_checkpoints import policy_folder

    return str(policy_folder(CheckpointStore(found[0] / "checkpoints")))


def _runs(name: str, root: Path) -> list[Path]:
    """Return the folders of the runs `project/run`, or `run` in any project."""
    parts = Path(name).parts
    if not 1 <= len(parts) <= 2 or Path(name).is_absolute() or ".." in parts:
        return []
    projects = [root / parts[0]] if len(parts) == 2 else sorted(root.glob("*"))
    return [folder / parts[-1] for folder in projects if _is_run(folder / parts[-1])]


def _is_run(folder: Path) -> bool:
    return (folder / RECORD_FILE).is_file() and (folder / "config.yaml").is_file()
