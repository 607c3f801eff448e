"""Export of a run's model in the format of transformers and vLLM, with a model card."""

from __future__ import annotations

import json
import re
import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath

from rlctl.errors import ConfigError, ConflictError, NotFoundError, ResourceError
from rlctl.files import apply_umask, replacing, step_of
from rlctl.recipes.role_table import ACTOR, REWARD_LEARNER, Role
from rlctl.runs.run import Run
from rlctl.runtime.card import CARD, Kind, model_card
from rlctl.runtime.data import bundled
from rlctl.runtime.model.adapter_names import merged_parameters
from rlctl.runtime.model.lora import add_adapters
from rlctl.runtime.training.checkpoint_store import MANIFEST, CheckpointStore, ControllerState
from rlctl.runtime.training.complete_checkpoints import checkpoint_of, damage

MARKER = "rlctl_export.json"  # run, step and files of the folder that `--force` may replace
_FOLDERS: dict[Kind, str] = {"merged": "huggingface", "adapter": "adapter"}


def export(
    run: Run,
    step: int | None,
    target: Path,
    kind: Kind = "merged",
    force: bool = False,
    card_only: bool = False,
) -> int:
    """Write the model of `step` (None: the latest) to `target` and return the step.

    The folder appears complete or not at all; `force` replaces an earlier export, and `card_only`
    writes the model card alone. Raises `NotFoundError` without such a checkpoint or adapter,
    `ConfigError` for a damaged one, `ConflictError` where `target` has other files or is the
    current folder, and `ResourceError` for disk errors.
    """
    store = CheckpointStore(run.path / "checkpoints")
    checkpoint = checkpoint_of(store, step)
    if (problem := damage(checkpoint)) is not None:
        raise ConfigError(
            problem, where=str(checkpoint), hint="--step N exports another checkpoint"
        )
    number = step_of(checkpoint.name)
    assert number is not None, "a folder of the store"
    with _aside(target, force) as folder:
        source = checkpoint / _FOLDERS[kind]
        if kind == "adapter" and not source.is_dir():
            raise NotFoundError(
                f"{checkpoint.name} has no adapter",
                where=str(run.path),
                hint="the run did not train adapters (lora_rank > 0)",
            )
        if source.is_dir() and not card_only:
            _copy_listed(checkpoint, source.name, folder)
        elif not card_only:
            rebuild(run.path, checkpoint, folder)
        card = model_card(run, number, _trained(checkpoint), kind)
        (folder / CARD).write_text(card, encoding="utf-8")
        marker = {"run": run.key, "step": number, "files": sorted(_files(folder))}
        (folder / MARKER).write_text(json.dumps(marker, indent=1) + "\n", encoding="utf-8")
    return number


def _copy_listed(checkpoint: Path, part: str, folder: Path) -> None:
    """Copy the files of a checkpoint's subfolder that its manifest lists, which `damage` checked.

    Links, and what else somebody put there, are left out.
    """
    listing = json.loads((checkpoint / MANIFEST).read_text(encoding="utf-8"))["files"]
    for name in listing:
        inner = PurePosixPath(name)
        if inner.parts[0] == part and not (checkpoint / inner).is_symlink():
            target = folder / inner.relative_to(part)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(checkpoint / inner, target)


@contextmanager
def _aside(target: Path, force: bool) -> Iterator[Path]:
    """Yield a temporary folder that replaces `target` if the block succeeds."""
    target = target.absolute()
    taken = target.exists() and not (target.is_dir() and not any(target.iterdir()))
    if taken:
        _check_replaceable(target, force)
    if target.exists() and Path.cwd().is_relative_to(target.resolve()):
        raise ConflictError(
            f"{target} is the current folder", hint="write to another folder, such as my-model"
        )
    old = target.with_name(f".{target.name}.old")
    try:
        with replacing(target, unique=False, sync=False) as aside:
            aside.mkdir(parents=True)
            yield aside
            if taken:
                target.rename(old)
        if taken:
            shutil.rmtree(old)
    except shutil.Error as error:  # one or more files that cannot be copied
        source, _, text = error.args[0][0]
        reason = re.sub(r"^\[Errno \d+\] |: '.*", "", text)  # without number and paths
        raise ResourceError(f"cannot write {target / Path(source).name}: {reason}") from error
    except OSError as error:
        from rlctl.write_errors import cannot_write

        raise cannot_write(target.name, target, error) from error


def _check_replaceable(target: Path, force: bool) -> None:
    """Raise ConflictError unless `force` is given and `target` has only files of an export."""
    if not target.is_dir():
        raise ConflictError(f"{target} is a file", hint="write to another folder")
    other = _not_exported(target)
    if other is not None:
        raise ConflictError(
            f"{target} already exists and is not an export: {other}",
            hint="write to another folder; --force replaces only what rlctl exported",
        )
    if not force:
        raise ConflictError(
            f"{target} already exists", hint="write to another folder, or --force to replace it"
        )


def _not_exported(folder: Path) -> str | None:
    """Return why a folder is not an unmixed export of rlctl, or None if it is."""
    try:
        known = set(json.loads((folder / MARKER).read_text(encoding="utf-8"))["files"])
    except (OSError, ValueError, TypeError, KeyError):
        return f"it has no {MARKER}"
    others = sorted(_files(folder) - known - {MARKER})
    if not others:
        return None
    return f"it also has {', '.join(others[:3])}"


def exported_files(folder: Path) -> list[str]:
    """Return the names of the files of an export that may be pushed: those that it wrote."""
    names = json.loads((folder / MARKER).read_text(encoding="utf-8"))["files"]
    return [name for name in names if not (folder / name).is_symlink()]


def _files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if not path.is_dir()}


def _trained(checkpoint: Path) -> Role:
    """Return the role whose model a run is for."""
    if (checkpoint / REWARD_LEARNER.name).is_dir():
        return REWARD_LEARNER
    return ACTOR


def rebuild(run: Path, checkpoint: Path, folder: Path) -> None:
    """Write the model to `folder` from the distributed state, saved by any number of ranks."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

    from rlctl.runs.trust import recompose_run
    from rlctl.runtime.algorithms.pair_metrics import moments
    from rlctl.runtime.data.tokenizer import tokenizer_of
    from rlctl.runtime.model.causal_lm import PolicyModel
    from rlctl.runtime.model.load import load_model, master_dtype
    from rlctl.runtime.model.reward_model import RewardModel, write_scale
    from rlctl.runtime.model.sharding import trained_state
    from rlctl.runtime.model.tower import freeze_tower
    from rlctl.runtime.model.vision import copy_processor
    from rlctl.runtime.workers.safe_load import load_into

    config = bundled.resolve(recompose_run(run, []).config, run)
    role = _trained(checkpoint)
    model = role.model(config)
    fsdp = role.fsdp(config)
    assert fsdp is not None, "roles that learn are sharded"
    hf = load_model(model, role.kind, master_dtype(fsdp), config.trainer.seed)
    is_policy = role is ACTOR
    freeze_tower(hf, not is_policy or config.actor_rollout_ref.actor.freeze_vision_tower)
    add_adapters(hf if is_policy else hf.base_model, model, config.trainer.seed)
    wrapped = PolicyModel(hf, 1.0) if is_policy else RewardModel(hf)
    state = {"model": trained_state(wrapped)}
    warnings.filterwarnings(
        "ignore", message="torch.distributed is disabled"
    )  # one process needs none
    load_into(state, checkpoint / role.name, no_dist=True)
    set_model_state_dict(wrapped, state["model"], options=StateDictOptions(strict=False))
    if not is_policy:
        write_scale(hf.config, *moments(ControllerState.read(checkpoint).algorithm))
    hf.save_pretrained(folder, state_dict=dict(merged_parameters(hf)))
    apply_umask(*folder.glob("*.safetensors"))
    copy_processor(hf, folder)
    tokenizer_of(model).save_pretrained(folder)
