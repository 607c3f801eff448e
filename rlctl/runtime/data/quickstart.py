"""The bundled model and data, named `quickstart` as a model path or data file."""

from __future__ import annotations

from pathlib import Path

from rlctl.data_prep.arithmetic import train_and_validation
from rlctl.data_prep.rows import write_rows
from rlctl.quickstart import NAME, real_path
from rlctl.recipes import schema
from rlctl.recipes.roles import CRITIC

NUM_TRAIN, NUM_VAL, SEED, LEVEL = 4096, 256, 0, 2


def resolve(config: schema.Config, root: Path) -> schema.Config:
    """Replace `quickstart` by real paths; the data is written under `root` on first use."""
    actor_rollout, critic, data = config.actor_rollout_ref, config.critic, config.data
    return config.model_copy(
        update={
            "data": data.model_copy(
                update={
                    "train_files": tuple(_data(file, "train", root) for file in data.train_files),
                    "val_files": data.val_files
                    and tuple(_data(file, "val", root) for file in data.val_files),
                }
            ),
            "actor_rollout_ref": actor_rollout.model_copy(
                update={"model": _model(actor_rollout.model)}
            ),
            CRITIC.section: critic.model_copy(update={"model": _model(critic.model)}),
        }
    )


def _model(model: schema.Model) -> schema.Model:
    """Replace `quickstart` in the paths of model and tokenizer."""
    tokenizer_path = model.tokenizer_path and real_path(model.tokenizer_path)
    return model.model_copy(
        update={"path": real_path(model.path), "tokenizer_path": tokenizer_path}
    )


def _data(file: str, split: str, root: Path) -> str:
    """Return the path of the file, generating the quickstart data if necessary."""
    if file != NAME:
        return file
    folder = root / ".quickstart"
    path = folder / f"{split}.parquet"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        train, val = train_and_validation(NUM_TRAIN, NUM_VAL, seed=SEED, level=LEVEL, careless=0.0)
        write_rows(folder / "train.parquet", train)
        write_rows(folder / "val.parquet", val)
    return str(path)
