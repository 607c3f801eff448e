"""The bundled models and data, named `quickstart` and the like as a model path or data file."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from rlctl.data_prep.arithmetic import ArithmeticParams, arithmetic
from rlctl.data_prep.rows import PromptRow, write_rows
from rlctl.errors import RlctlError
from rlctl.process import relaxed_umask
from rlctl.quickstart import NAME, real_path
from rlctl.recipes import schema
from rlctl.recipes.role_table import CRITIC

M = TypeVar("M", schema.Model, schema.RefModel)
S = TypeVar("S", schema.Ref, schema.Critic, schema.RewardModel)

FOLDER = ".quickstart"
_SHOWN = "quickstart: "  # in errors, in place of a temporary folder


def _pairs(miscounted: bool) -> dict[str, list[PromptRow]]:
    from rlctl.data_prep.arithmetic_pairs import arithmetic_pairs

    return arithmetic_pairs(4096, 256, seed=0, miscounted=miscounted)


def _gridworld() -> dict[str, list[PromptRow]]:
    from rlctl.data_prep.gridworld import GridworldParams, gridworld

    return gridworld(GridworldParams())


def _shapes() -> dict[str, list[PromptRow]]:
    from rlctl.data_prep.shapes import ShapesParams, shapes

    return shapes(ShapesParams())


_DATA: dict[str, Callable[[], dict[str, list[PromptRow]]]] = {
    NAME: lambda: arithmetic(ArithmeticParams()),
    "quickstart-tools": lambda: arithmetic(ArithmeticParams(val=128, level=4, tools="calculator")),
    "quickstart-preferences": lambda: _pairs(miscounted=False),
    "quickstart-miscounts": lambda: _pairs(miscounted=True),
    "quickstart-gridworld": _gridworld,
    "quickstart-shapes": _shapes,
}


def resolve(config: schema.Config, root: Path) -> schema.Config:
    """Replace the bundled names by real paths, those of data below `root`, where none may exist."""
    actor_rollout = config.actor_rollout_ref
    reward = config.reward

    def real_file(file: str, split: str) -> str:
        return str(_file(file, split, root)) if file in _DATA else file

    return config.model_copy(
        update={
            "data": _with_files(config.data, real_file),
            "actor_rollout_ref": actor_rollout.model_copy(
                update={"model": _model(actor_rollout.model), "ref": _with_model(actor_rollout.ref)}
            ),
            CRITIC.section: _with_model(config.critic),
            "reward": reward.model_copy(update={"reward_model": _with_model(reward.reward_model)}),
        }
    )


def write_data(config: schema.Config) -> None:
    """Write the data of a resolved configuration that is missing, below the root of the runs."""
    root = Path(config.trainer.run_dir)
    with relaxed_umask(config.trainer.run_dir_access):  # it creates the folder of all runs
        for name in _missing(config.data, root):
            _write(name, root)


@contextmanager
def readable(config: schema.Config) -> Iterator[schema.Config]:
    """Yield a resolved configuration with files that exist.

    Data that is missing is in a temporary folder for the time of the block; errors do not name it.
    """
    root = Path(config.trainer.run_dir)
    with tempfile.TemporaryDirectory(prefix="rlctl-") as scratch:
        files: dict[str, str] = {}
        for name in _missing(config.data, root):
            written = _write(name, Path(scratch))
            files |= {str(_file(name, split, root)): file for split, file in written.items()}
        data = _with_files(config.data, lambda file, _: files.get(file, file))
        try:
            yield config.model_copy(update={"data": data})
        except RlctlError as error:
            generated = f"{scratch}/{FOLDER}/"
            error.problems = [
                replace(problem, where=problem.where and problem.where.replace(generated, _SHOWN))
                for problem in error.problems
            ]
            raise


def _missing(data: schema.Data, root: Path) -> list[str]:
    """Return the names of data that is used and was not written."""
    used = {Path(file) for file in (*data.train_paths, *(data.val_files or ()))}
    files = {name: {_file(name, split, root) for split in ("train", "val")} for name in _DATA}
    return [name for name in _DATA if any(not file.exists() for file in used & files[name])]


def _write(name: str, root: Path) -> dict[str, str]:
    """Write data below `root` and return its files by split."""
    files = {split: _file(name, split, root) for split in ("train", "val")}
    for split, rows in _DATA[name]().items():
        write_rows(files[split], rows)
    return {split: str(file) for split, file in files.items()}


def _with_files(data: schema.Data, rename: Callable[[str, str], str]) -> schema.Data:
    """Return the section with other files: `rename` gets a file and its split."""

    def renamed(file: str | schema.WeightedFile) -> str | schema.WeightedFile:
        if isinstance(file, str):
            return rename(file, "train")
        return file.model_copy(update={"path": rename(file.path, "train")})

    train = tuple(map(renamed, data.train_files))
    val = data.val_files and tuple(rename(file, "val") for file in data.val_files)
    return data.model_copy(update={"train_files": train, "val_files": val})


def _with_model(section: S) -> S:
    return section.model_copy(update={"model": _model(section.model)})


def _model(model: M) -> M:
    """Replace the names of bundled models in the paths of model and tokenizer."""
    tokenizer_path = model.tokenizer_path and real_path(model.tokenizer_path)
    return model.model_copy(
        update={"path": real_path(model.path), "tokenizer_path": tokenizer_path}
    )


def _file(name: str, split: str, root: Path) -> Path:
    """Return the path of a data file of the quickstart."""
    return root / FOLDER / name.removeprefix(NAME).removeprefix("-") / f"{split}.parquet"
