"""Rollouts in a checkpoint: tensors as safetensors, the rest as JSON; nothing is unpickled."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from itertools import compress
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from rlctl.data_prep.images import content_of, digest_of
from rlctl.data_prep.rows import PromptRow
from rlctl.episodes import Episode
from rlctl.errors import ConfigError
from rlctl.files import apply_umask
from rlctl.runtime.base.batch import Ragged, Rollouts
from rlctl.runtime.base.ops import first_rows

_IMAGES = "other_images"  # by the number of a row
_PROMPTS = "prompts"  # digests of the rows, by number
R = TypeVar("R", bound=Rollouts)

_TENSORS = "tensors.safetensors"
_REST = "rest.json"
# Numbers (B,) of the objects that rows of the batch share.
_ROW = "row"
_EPISODE = "episode"


def write_rollouts(folder: Path, rollouts: Rollouts, numbers: Sequence[int]) -> None:
    """Write B rollouts into the new `folder`; `numbers` are those of their prompts."""
    tensors: dict[str, Tensor] = {
        _ROW: torch.tensor(numbers),
        _EPISODE: rollouts.episode_of_row,
    }
    episodes = compress(rollouts.episodes, first_rows(rollouts.episode_of_row))
    rest: dict[str, Any] = {"episodes": [asdict(episode) for episode in episodes]}
    rest[_PROMPTS] = {str(i): _digest(row) for i, row in zip(numbers, rollouts.rows, strict=True)}
    rest[_IMAGES] = {  # of rows with others than those of their prompt
        str(i): [base64.b64encode(image).decode() for image in images]
        for i, (row, images) in enumerate(zip(rollouts.rows, rollouts.images, strict=False))
        if images != tuple(map(content_of, row.images))
    }
    for field in fields(rollouts):
        value = getattr(rollouts, field.name)
        if isinstance(value, Ragged):
            tensors |= {
                f"{field.name}.values": value.values,
                f"{field.name}.lengths": value.lengths,
            }
        elif isinstance(value, Tensor):
            tensors[field.name] = value
        elif isinstance(value, dict):
            rest[field.name] = list(value)
            tensors |= {f"{field.name}.{name}": part for name, part in value.items()}
        elif field.name not in ("rows", "episodes", "images"):
            rest[field.name] = value
    folder.mkdir()
    save_file({name: tensor.clone() for name, tensor in tensors.items()}, folder / _TENSORS)
    apply_umask(folder / _TENSORS)
    (folder / _REST).write_text(json.dumps(rest), encoding="utf-8")


def read_rollouts(folder: Path, prompts: Sequence[PromptRow], kind: type[R]) -> R:
    """Return the rollouts of a `kind` that `write_rollouts` wrote, with rows of `prompts`.

    Raises ConfigError for files of another format, or if the rows at their numbers have changed.
    """
    try:
        tensors = load_file(folder / _TENSORS)
        rest: dict[str, Any] = json.loads((folder / _REST).read_text(encoding="utf-8"))
        _check_prompts(rest.pop(_PROMPTS, {}), prompts, folder)
        numbers = tensors.pop(_ROW).tolist()
        images = {i: tuple(map(content_of, prompts[i].images)) for i in set(numbers)}
        others = {int(i): tuple(map(base64.b64decode, v)) for i, v in rest.pop(_IMAGES, {}).items()}
        episodes = [Episode.from_dict(episode) for episode in rest.pop("episodes")]
        values: dict[str, Any] = {
            "rows": [prompts[i] for i in numbers],
            "images": [others.get(row, images[i]) for row, i in enumerate(numbers)],
            "episodes": [episodes[i] for i in tensors.pop(_EPISODE).tolist() if episodes],
        }
        if (names := rest.pop("components", None)) is not None:
            values["components"] = {name: tensors.pop(f"components.{name}") for name in names}
        values |= {name: value for name, value in rest.items() if name not in values}
        for name in list(tensors):
            field, _, part = name.partition(".")
            if part == "values":
                values[field] = Ragged(tensors[name], tensors[f"{field}.lengths"])
            elif not part:
                values[field] = tensors[name]
        return kind(**values)
    except (OSError, ValueError, TypeError, KeyError, IndexError) as error:
        raise ConfigError(
            f"the rollouts of a checkpoint cannot be read: {type(error).__name__}: {error}",
            where=str(folder),
        ) from error


def _check_prompts(digests: Mapping[str, str], prompts: Sequence[PromptRow], folder: Path) -> None:
    """Raise ConfigError unless the rows of these numbers have these digests."""
    for number, digest in digests.items():
        if int(number) >= len(prompts) or _digest(prompts[int(number)]) != digest:
            raise ConfigError(
                "the data has changed, and the checkpoint has responses to prompts that no step "
                "has learned from",
                where=str(folder),
                hint="resume with the data of the run, or start a new run",
            )


def _digest(row: PromptRow) -> str:
    """Return a digest of what a row asks for and is scored by."""
    images = (*map(digest_of, row.images),)
    content = repr((row.prompt, row.data_source, row.ground_truth, *images))
    return hashlib.sha256(content.encode(errors="surrogatepass")).hexdigest()[:16]
