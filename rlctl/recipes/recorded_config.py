"""Configuration of an earlier run, recomposed with overrides, and the differences to it."""

from __future__ import annotations

import dataclasses
import json
import re
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import yaml

from rlctl.errors import ConfigError, NotFoundError
from rlctl.files import read_record
from rlctl.log import warn_once
from rlctl.recipes.layers import Origin, Recipe, leaves, nested
from rlctl.recipes.yaml_sources import read
from rlctl.redaction import is_secret_key
from rlctl.suggest import overridden_keys, written

# Keys that a resumed run may change: duration, placement, logging, the size of passes, and one of
# earlier versions.
FREE = (
    "actor_rollout_ref.rollout.mode",
    "trainer.total_epochs",
    "trainer.total_training_steps",
    "trainer.logger",
    "trainer.log_val_generations",
    "trainer.log_train_generations",
    "trainer.save_freq",
    "trainer.save_every",
    "trainer.default_local_dir",
    "trainer.rollout_data_dir",
    "trainer.validation_data_dir",
    "trainer.mirror",
    "trainer.stop_when",
    "trainer.notify*",
    "trainer.listener*",
    "trainer.energy",
    "trainer.price_per_hour",
    "trainer.run_dir_access",
    "trainer.test_freq",
    "trainer.max_ckpt_to_keep",
    "trainer.keep_best.*",
    "trainer.checkpoint.*",
    "trainer.max_skipped_updates",
    "trainer.alarms.*",
    "reward.max_failed_steps",
    "trainer.mismatch.*",
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
    "reward.timeout_s",
    "reward.limits.*",
    "*.ppo_max_token_len_per_gpu",
    "*.ppo_micro_batch_size_per_gpu",
    "*.log_prob_max_token_len_per_gpu",
    "*.log_prob_micro_batch_size_per_gpu",
    "*.enable_gradient_checkpointing",
    "*.gradient_checkpointing_every_n_layers",
    "*.enable_activation_offload",
    "*.fsdp_config.param_offload",
    "*.fsdp_config.optimizer_offload",
    "*.fsdp_config.offload_policy",
    "*.fsdp_config.reshard_after_forward",
    "*.fsdp_config.fsdp_size",
    "*.fsdp_config.ulysses_sequence_parallel_size",
    "*.fsdp_config.tensor_model_parallel_size",
    "*.fsdp_config.pipeline_model_parallel_size",
    "*.fsdp_config.pipeline_schedule",
    "*.fsdp_config.expert_model_parallel_size",
    "actor_rollout_ref.rollout.gpu_memory_utilization",
    "actor_rollout_ref.rollout.max_num_seqs",
)


_REFERENCE = re.compile(r"\$\{([\w.]+)\}")  # a value that is another key's


@dataclass(frozen=True)
class Change:
    """A key whose value differs from the stored one."""

    key: str
    old: Any
    new: Any

    @property
    def free(self) -> bool:
        """True if a resumed run may change the key; a secret, for one, may be replaced."""
        return is_secret_key(self.key) or any(fnmatchcase(self.key, pattern) for pattern in FREE)

    def __str__(self) -> str:
        return f"{self.key}: {written(self.old)} → {written(self.new)}"


def recompose(folder: Path, overrides: Sequence[str] = ()) -> Recipe:
    """Compose the `config.yaml` of a run or checkpoint folder with overrides.

    Keys keep their stored origins. Free keys that are defined as an overridden one, such as the
    mesh of the reference, follow it. Raises NotFoundError if there is no configuration, and
    ConfigError as `compose` does.
    """
    from rlctl.recipes.compose import compose

    stored = config_file(folder)
    if not stored.is_file():
        hint = f"`rlctl runs rm {folder.name}` frees the name of a run that was killed at its start"
        if copies := sorted(folder.glob("checkpoints/step_*/config.yaml")):
            hint = f"its newest checkpoint has a copy: cp {copies[-1]} {stored}"
        raise NotFoundError(f"{folder.name} has no configuration", where=str(stored), hint=hint)
    stored_chains = stored_origins(folder)
    values = stored_values(folder) | _following(stored_chains, overrides)
    with tempfile.NamedTemporaryFile("w", encoding="utf-8", suffix=".yaml") as file:

        def renamed(where: str) -> str:
            """Name the stored file instead of the temporary one, whose lines differ."""
            return re.sub(rf"\S*{re.escape(Path(file.name).name)}(:\d+)?", str(stored), where)

        file.write("defaults: [ppo_trainer, _self_]\n")
        yaml.safe_dump(nested(values), file, allow_unicode=True)
        file.flush()
        try:
            recipe = compose(file.name, overrides)
        except ConfigError as error:
            raise ConfigError(
                *(
                    dataclasses.replace(problem, where=problem.where and renamed(problem.where))
                    for problem in error.problems
                )
            ) from None
    origins: dict[str, list[Origin]] = {}
    for key, chain in recipe.origins.items():
        origins[key] = list(stored_chains.get(key, ()))
        if chain[-1].level == 3 or not origins[key]:
            last = dataclasses.replace(chain[-1], where=renamed(chain[-1].where))
            origins[key].append(last)
    return dataclasses.replace(recipe, name=folder.name, path=stored, origins=origins)


def _following(chains: Mapping[str, list[Origin]], overrides: Sequence[str]) -> dict[str, str]:
    """Return the free keys that are defined as one of the overridden keys, with the reference."""
    given = overridden_keys(overrides)
    references = {key: str(chain[-1].value) for key, chain in chains.items() if chain}
    return {
        key: reference
        for key, reference in references.items()
        if (found := _REFERENCE.fullmatch(reference))
        and found[1] in given
        and Change(key, None, None).free
    }


def config_file(folder: Path) -> Path:
    """Return the `config.yaml` of a run or checkpoint. Raises ConfigError if it is a link."""
    path = folder / "config.yaml"
    if path.is_symlink():
        raise ConfigError("a file of a run must not be a link", where=str(path))
    return path


def stored_values(folder: Path) -> dict[str, Any]:
    """Return the values of a folder's `config.yaml` by dotted key."""
    return leaves(read(config_file(folder)).data)


def stored_origins(folder: Path) -> dict[str, list[Origin]]:
    """Return the origins stored in a run folder by key, or nothing if there are none.

    Logs a warning if `origins.json` cannot be read: the values are in `config.yaml`.
    """
    path = folder / "origins.json"
    if not path.is_file():
        return {}
    try:
        chains = json.loads(read_record(path))
        return {key: [Origin(**origin) for origin in chain] for key, chain in chains.items()}
    except (OSError, ValueError, TypeError, AttributeError) as error:
        warn_once(f"no origins of the settings: {path} cannot be read: {error}")
        return {}


def edits(folder: Path, before: Path) -> list[Change]:
    """Return the differences of the configuration in `folder` to the one in `before`."""
    return changes(before, nested(stored_values(folder)))


def changes(folder: Path, container: Mapping[str, Any]) -> list[Change]:
    """Return the differences of `container` (`Recipe.recorded`) to what is stored in `folder`.

    Keys that a newer version of rlctl added are left out.
    """
    old = leaves(nested(stored_values(folder)))  # an empty section is no value
    new = leaves(dict(container))
    differing = [key for key in dict.fromkeys([*old, *new]) if old.get(key) != new.get(key)]
    known = [
        key
        for key in differing
        if key in old
        or any(key.startswith(f"{other}.") or other.startswith(f"{key}.") for other in old)
    ]
    return [Change(key, old.get(key), new.get(key)) for key in known]
