"""Files that `rlctl new` writes: data, reward function and recipe."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2

from rlctl.data_prep.raw_data import RowMaker
from rlctl.data_prep.rows import RowSource, write_rows
from rlctl.errors import ConflictError
from rlctl.files import write_text
from rlctl.plugins.console.project.questions import Answers
from rlctl.quickstart import MODELS

_NUM_MEASURED = 1000  # prompts whose tokens are counted
_MAX_BATCH = 128  # prompts of a step
_MIN_STEPS = 50  # which show whether a model learns
_MAX_STEPS = 100
_SMALL = {"lr": 2.0e-4, "response_length": 64}  # for the bundled models
_LARGE = {"lr": 1.0e-6, "response_length": 512}


@dataclass(frozen=True)
class Schedule:
    """Prompts of a step, number of steps, and steps between validations and checkpoints."""

    batch: int
    steps: int
    every: int

    @classmethod
    def of_rows(cls, num_rows: int, devices: int) -> Schedule:
        """Return a schedule from which a model can learn.

        A step has an eighth to a quarter of the rows, of which each device gets as many in each of
        two updates. There are at least 50 steps, in complete passes through the rows if these have
        no more than 100.
        """
        share = 2 ** max(0, (num_rows // 4).bit_length() - 1)
        unit = 2 * devices
        batch = min(num_rows, max(unit, min(_MAX_BATCH, share) // unit * unit))
        steps_per_epoch = num_rows // batch
        steps = min(_MAX_STEPS, -(-_MIN_STEPS // steps_per_epoch) * steps_per_epoch)
        return cls(batch, steps, steps // 10)


@dataclass(frozen=True)
class Project:
    """Files of a project; paths are relative to the folder in which rlctl is started."""

    folder: Path
    algorithm: str

    @property
    def name(self) -> str:
        """Name of the folder, also of `.`."""
        return self.folder.resolve().name

    @property
    def files(self) -> dict[str, Path]:
        """Files of the recipe, the reward function, and the rows of each split."""
        names = {"recipe": f"{self.name}.yaml", "reward": "reward.py"}
        names |= {split: f"{split}.parquet" for split in ("train", "val")}
        return {part: self.folder / name for part, name in names.items()}

    @property
    def command(self) -> str:
        """Command that starts the run."""
        return f"rlctl train {self.algorithm} --recipe {shlex.quote(str(self.files['recipe']))}"

    def refuse_existing(self) -> None:
        """Raise ConflictError if a file of the project exists."""
        if existing := [str(file) for file in self.files.values() if file.exists()]:
            raise ConflictError(
                f"existing files would be overwritten: {', '.join(existing)}",
                hint="name another folder, or overwrite them with --force",
            )

    def write(self, answers: Answers, rows: RowMaker, splits: Mapping[str, RowSource]) -> None:
        """Write the rows of `splits`, which `rows` makes, the reward and the recipe."""
        from rlctl.runtime.data.image_prompts import row_renderer
        from rlctl.runtime.data.tokenizer import encode_text  # imports transformers

        measured = rows.first(_NUM_MEASURED)
        render = row_renderer(answers.tokenizer)
        longest = max(len(encode_text(answers.tokenizer, render(row))) for row in measured)
        for name, split in splits.items():
            write_rows(self.files[name], split)
        write_text(self.files["reward"], reward_source(answers.reward))
        recipe = _render(
            "recipe.yaml",
            project=self,
            answers=answers,
            num_rows=len(splits["train"]),
            schedule=Schedule.of_rows(len(splits["train"]), answers.devices),
            prompt_length=-(-longest * 5 // 4 // 32) * 32,  # a quarter more than was seen
            **(_SMALL if answers.model in MODELS else _LARGE),
        )
        write_text(self.files["recipe"], recipe)


def reward_source(kind: str) -> str:
    """Return the text of the reward function of a kind."""
    return _render("reward.py", kind=kind)


def _render(template: str, **values: Any) -> str:
    path = Path(__file__).with_name(f"{template}.jinja")
    environment = jinja2.Environment(keep_trailing_newline=True, undefined=jinja2.StrictUndefined)
    environment.filters["quoted"] = lambda value: json.dumps(str(value), ensure_ascii=False)
    return environment.from_string(path.read_text(encoding="utf-8")).render(values)
