"""The bundled models and data, named `quickstart` and the like as a model path or data file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from rlctl.data_prep.arithmetic import ArithmeticParams, arithmetic
from rlctl.data_prep.arithmetic_pairs import arithmetic_pairs
from rlctl.data_prep.gridworld import GridworldParams, gridworld
from rlctl.data_prep.rows import PromptRow, write_rows
from rlctl.quickstart import NAME, real_path
from rlctl.recipes import schema
from rlctl.recipes.roles import CRITIC
from rlctl.runs.run_dir import relaxed_umask

M = TypeVar("M", schema.Model, schema.RefModel)

FOLDER = ".quickstart"
_DATA: dict[str, Callable[[], dict[str, list[PromptRow]]]] = {
    NAME: lambda: arithmetic(ArithmeticParams()),
    "quickstart-tools": lambda: arithmetic(ArithmeticParams(val=128, level=4, tools="calculator")),
    "quickstart-preferences": lambda: arithmetic_pairs(4096, 256, seed=0),
    "quickstart-miscounts": lambda: arithmetic_pairs(4096, 256, seed=0, miscounted=True),
    "quickstart-gridworld": lambda: gridworld(GridworldParams()),
}


def resolve(config: schema.Config, root: Path) -> schema.Config:
    """Replace the bundled names by real paths; `write_data` writes the data under `root`."""
    actor_rollout, critic, data = config.actor_rollout_ref, config.critic, config.data
    return config.model_copy(
        update={
            "data": data.model_copy(
                update={
                    "train_files": tuple(
                        each.model_copy(update={"path": _files((each.path,), "train", root)[0]})
                        if isinstance(each, schema.WeightedFile)
                        else _files((each,), "train", root)[0]
                        for each in data.train_files
                    ),
                    "val_files": data.val_files and _files(data.val_files, "val", root),
                }
            ),
            "actor_rollout_ref": actor_rollout.model_copy(
                update={"model": _model(actor_rollout.model), "ref": _ref(actor_rollout.ref)}
            ),
            CRITIC.section: critic.model_copy(update={"model": _model(critic.model)}),
            "reward": config.reward.model_copy(update={"reward_model": _reward_model(config)}),
        }
    )


def write_data(config: schema.Config, root: Path) -> None:
    """Write the data under `root` that the configuration uses and that is missing."""
    used = {Path(file) for file in (*config.data.train_paths, *(config.data.val_files or ()))}
    for name, make in _DATA.items():
        files = {split: _file(name, split, root) for split in ("train", "val")}
        if all(file.exists() for file in used & set(files.values())):
            continue
        with relaxed_umask(config.trainer.run_dir_access):  # it creates the folder of all runs
            for split, rows in make().items():
                files[split].parent.mkdir(parents=True, exist_ok=True)
                write_rows(files[split], rows)


def _ref(ref: schema.Ref) -> schema.Ref:
    return ref.model_copy(update={"model": _model(ref.model)})


def _model(model: M) -> M:
    """Replace the names of bundled models in the paths of model and tokenizer."""
    tokenizer_path = model.tokenizer_path and real_path(model.tokenizer_path)
    return model.model_copy(
        update={"path": real_path(model.path), "tokenizer_path": tokenizer_path}
    )


def _reward_model(config: schema.Config) -> schema.RewardModel:
    settings = config.reward.reward_model
    return settings.model_copy(update={"model": _model(settings.model)})


def _files(files: tuple[str, ...], split: str, root: Path) -> tuple[str, ...]:
    return tuple(str(_file(file, split, root)) if file in _DATA else file for file in files)


def _file(name: str, split: str, root: Path) -> Path:
    """Return the path of a data file of the quickstart."""
    return root / FOLDER / name.removeprefix(NAME).removeprefix("-") / f"{split}.parquet"
