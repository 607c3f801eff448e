"""The bundled model and data, named `quickstart` as a model path or data file."""

from __future__ import annotations

from pathlib import Path

from rlctl.data_prep.arithmetic import train_and_validation
from rlctl.data_prep.rows import write_rows
from rlctl.quickstart import NAME, real_path
from rlctl.recipes import schema
from rlctl.recipes.roles import CRITIC

NUM_TRAIN, NUM_VAL, SEED, LEVEL = 4096, 256, 0, 2
FOLDER = ".quickstart"


def resolve(config: schema.Config, root: Path) -> schema.Config:
    """Replace `quickstart` by real paths; `write_data` writes the data under `root`."""
    actor_rollout, critic, data = config.actor_rollout_ref, config.critic, config.data
    return config.model_copy(
        update={
            "data": data.model_copy(
                update={
                    "train_files": _files(data.train_files, root / FOLDER / "train.parquet"),
                    "val_files": data.val_files
                    and _files(data.val_files, root / FOLDER / "val.parquet"),
                }
            ),
            "actor_rollout_ref": actor_rollout.model_copy(
                update={"model": _model(actor_rollout.model)}
            ),
            CRITIC.section: critic.model_copy(update={"model": _model(critic.model)}),
        }
    )


def write_data(config: schema.Config, root: Path) -> None:
    """Write the quickstart's data under `root` if the configuration uses it and it is missing."""
    used = {Path(file) for file in (*config.data.train_files, *(config.data.val_files or ()))}
    train_file, val_file = (root / FOLDER / f"{split}.parquet" for split in ("train", "val"))
    if all(file.exists() for file in used & {train_file, val_file}):
        return
    train_file.parent.mkdir(parents=True, exist_ok=True)
    train, val = train_and_validation(NUM_TRAIN, NUM_VAL, seed=SEED, level=LEVEL, careless=0.0)
    write_rows(train_file, train)
    write_rows(val_file, val)


def _model(model: schema.Model) -> schema.Model:
    """Replace `quickstart` in the paths of model and tokenizer."""
    tokenizer_path = model.tokenizer_path and real_path(model.tokenizer_path)
    return model.model_copy(
        update={"path": real_path(model.path), "tokenizer_path": tokenizer_path}
    )


def _files(files: tuple[str, ...], generated: Path) -> tuple[str, ...]:
    return tuple(str(generated) if file == NAME else file for file in files)
