"""The configuration that a run was made with, composed anew with overrides, and what they change."""

from __future__ import annotations

import dataclasses
import json
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from rlctl.errors import ConfigError, NotFoundError
from rlctl.recipes.layers import Origin, Recipe, leaves
from rlctl.recipes.sources import read

# What a run may change and stay the same run: how long and where it runs, what it writes down, and how much it computes at a time.
FREE = (
    "trainer.total_epochs",
    "trainer.total_training_steps",
    "trainer.logger",
    "trainer.log_val_generations",
    "trainer.save_freq",
    "trainer.mirror",
    "trainer.test_freq",
    "trainer.max_ckpt_to_keep",
    "trainer.keep_best.*",
    "trainer.max_skipped_updates",
    "trainer.alarms.*",
    "trainer.mismatch.*",
    "trainer.tracking.*",
    "trainer.nnodes",
    "trainer.n_gpus_per_node",
    "trainer.device",
    "trainer.num_threads",
    "trainer.placement.*",
    "trainer.balance_batch",
    "trainer.timeouts.*",
    "trainer.tracking.*",
    "trainer.resume_mode",
    "trainer.resume_from_path",
    "ray_kwargs.*",
    "reward.num_processes",
    "*.ppo_max_token_len_per_gpu",
    "*.ppo_micro_batch_size_per_gpu",
    "*.log_prob_max_token_len_per_gpu",
    "*.log_prob_micro_batch_size_per_gpu",
    "*.enable_gradient_checkpointing",
    "*.fsdp_config.param_offload",
    "*.fsdp_config.optimizer_offload",
    "*.fsdp_config.reshard_after_forward",
    "*.fsdp_config.fsdp_size",
    "actor_rollout_ref.rollout.gpu_memory_utilization",
    "actor_rollout_ref.rollout.max_num_seqs",
)


@dataclass(frozen=True)
class Change:
    """A key whose value is another than the stored one."""

    key: str
    old: Any
    new: Any

    @property
    def free(self) -> bool:
        return any(fnmatchcase(self.key, pattern) for pattern in FREE)

    def __str__(self) -> str:
        return f"{self.key}: {_shown(self.old)} → {_shown(self.new)}"


def recompose(folder: Path, overrides: Sequence[str] = ()) -> Recipe:
    """The stored `config.yaml` of `folder` (a run or a checkpoint) with overrides on top; keys keep the origins that they had.

    Errors: NotFoundError when there is none, ConfigError as `compose`.
    """
    from rlctl.recipes.compose import compose

    stored = folder / "config.yaml"
    if not stored.is_file():
        raise NotFoundError(f"{folder.name} has no configuration", where=str(stored))
    with tempfile.NamedTemporaryFile(
        "w", suffix=".yaml"
    ) as file:  # it names every key; as a recipe on a base it takes overrides
        file.write("defaults: [ppo_trainer, _self_]\n" + stored.read_text(encoding="utf-8"))
        file.flush()
        recipe = compose(file.name, overrides)
    origins = stored_origins(folder)
    for key, chain in recipe.origins.items():
        if chain[-1].level == 3 or key not in origins:
            origins[key] = [*origins.get(key, ()), chain[-1]]
    return dataclasses.replace(recipe, name=folder.name, path=stored, origins=origins)


def stored_origins(folder: Path) -> dict[str, list[Origin]]:
    """What `origins.json` of a run's folder says, or nothing where there is none. ConfigError for one that cannot be read."""
    path = folder / "origins.json"
    if not path.is_file():
        return {}
    try:
        chains = json.loads(path.read_text(encoding="utf-8"))
        return {key: [Origin(**origin) for origin in chain] for key, chain in chains.items()}
    except (ValueError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"cannot read where the values came from: {error}", where=str(path)
        ) from error


def changes(folder: Path, container: Mapping[str, Any]) -> list[Change]:
    """Where `container` differs from the configuration stored in `folder`. Keys that the stored one does not know are of a newer rlctl."""
    old = leaves(read(folder / "config.yaml").data)
    new = leaves(dict(container))
    differing = [key for key in dict.fromkeys([*old, *new]) if old.get(key) != new.get(key)]
    known = [
        key
        for key in differing
        if key in old
        or any(key.startswith(f"{other}.") or other.startswith(f"{key}.") for other in old)
    ]
    return [Change(key, old.get(key), new.get(key)) for key in known]


def _shown(value: Any) -> str:
    return (
        "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
    )
