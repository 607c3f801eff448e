"""Text of the recipe that `rlctl new` writes."""

from __future__ import annotations

import json
import shlex
from dataclasses import dataclass
from pathlib import Path

_MAX_BATCH = 128  # prompts of a step
_SMALL = (2.0e-4, 64)  # learning rate and response length of the bundled models
_LARGE = (1.0e-6, 512)


@dataclass(frozen=True)
class NewRecipe:
    """Choices of a recipe; paths are relative to the folder in which rlctl is started."""

    verb: str
    folder: Path
    data: str
    model: str
    is_small: bool  # one of the bundled models
    devices: int
    num_rows: int  # for training
    prompt_length: int  # tokens

    @property
    def path(self) -> Path:
        """File of the recipe."""
        return self.folder / f"{self.folder.name}.yaml"

    @property
    def reward(self) -> Path:
        """File of the reward function."""
        return self.folder / "reward.py"

    def split(self, name: str) -> Path:
        """Return the file of the rows of a split."""
        return self.folder / f"{name}.parquet"

    @property
    def command(self) -> str:
        """Command that starts the run."""
        return f"rlctl train {self.verb} --recipe {shlex.quote(str(self.path))}"

    def text(self) -> str:
        """Return the recipe as YAML with comments."""
        lr, response = _SMALL if self.is_small else _LARGE
        batch = min(_MAX_BATCH, 2 ** (self.num_rows.bit_length() - 1))
        return f"""\
# Made by `rlctl new` from {self.data}. Paths are relative to the folder where rlctl starts.
# Start: {self.command}
# `rlctl config keys WORD` explains more keys, `--dry-run` checks a change.
defaults: [{self.verb}_trainer, _self_]
data:
  train_files: {_quoted(self.split("train"))}
  val_files: {_quoted(self.split("val"))}
  train_batch_size: {batch:<7} # prompts of a step, of {self.num_rows}
  max_prompt_length: {self.prompt_length:<6} # tokens; longer prompts are dropped and counted
  max_response_length: {response:<4} # tokens; longer responses are cut off
actor_rollout_ref:
  model: {{path: {_quoted(self.model)}}}
  actor:
    ppo_mini_batch_size: {max(1, batch // 2)}  # prompts of an optimizer step
    optim: {{lr: {lr:.1e}}}
reward:
  custom_reward_function: {{path: {_quoted(self.reward)}}}
trainer:
  project_name: {_quoted(self.folder.name)}
  n_gpus_per_node: {self.devices}      # GPUs, or processes on a CPU
  total_epochs: 3
  test_freq: 10           # steps between validations
  save_freq: 10           # steps between checkpoints
"""


def _quoted(value: str | Path) -> str:
    """Return a text as a YAML scalar."""
    return json.dumps(str(value), ensure_ascii=False)
