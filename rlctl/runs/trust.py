"""Stored configurations of runs that others may have made: what they name is not used unasked.

A run is the user's own if it is in the list of `ownership`, with its configuration as rlctl wrote
it. Of any other run, keys that select code, send data away, read the environment or write elsewhere
need the user's word: as overrides, by `--trust`, or for all runs below a trusted folder.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from rlctl.errors import ConfigError
from rlctl.files import read_record
from rlctl.plugins import names
from rlctl.recipes.layers import Recipe
from rlctl.recipes.recorded_config import recompose, stored_values
from rlctl.redaction import redact
from rlctl.runs.folders_elsewhere import PARTS
from rlctl.runs.ownership import Place, own_folder
from rlctl.runs.record import RunRecord
from rlctl.runs.run_dir import CONFIG_FILE, RECORD_FILE
from rlctl.suggest import overridden_keys
from rlctl.terminal import visible

log = logging.getLogger(__name__)

TRUSTED_VARIABLE = "RLCTL_TRUSTED"  # folders, separated as in PATH
_MAX_NAMED = 6

# Keys whose value, if there is one, is code, is run, leaves the machine or is written elsewhere.
# Those of verl, which have other sections, have the same ends.
_GUARDED = (
    *("*trust_remote_code", "*custom_reward_function.path", "*reward_manager.*path"),
    *("*tool_config_path", "*function_tool_path", "*interaction_config_path", "*custom_cls.path"),
    *("*external_lib", "*agent.program", "*agent.python", "*agent.env", "*reward.env"),
    *("*agent_loop_config_path", "*agent_loop_manager_class", "*optimizer_impl", "hydra*"),
    *("ray_kwargs.ray_init.address", "*runtime_env*", "ray_kwargs.timeline_json_file"),
    *("reward.cache_path", "trainer.tracking.modes*", "*api_key*", "*.url", "*base_url*"),
    *("defaults*", "trainer.notify", "trainer.listener*"),
)
# Places that a resumed run may change: those of another's run are not used.
_ELSEWHERE = (
    *("trainer.default_local_dir", "trainer.rollout_data_dir", "trainer.validation_data_dir"),
    "trainer.mirror",
)
_OPTIMIZERS = ("torch.optim", "torchao.optim", "bitsandbytes.optim")  # of `optimizer_impl`
_MAPPINGS = ("*params.*", "*engine_kwargs.*", "*override_config.*", "*reward_kwargs.*")
_DATA = (  # names and texts that no plug-in reads
    *("data.train_files", "data.val_files", "trainer.project_name", "trainer.experiment_name"),
    *("trainer.tracking.tags", "trainer.tracking.description", "*.custom_chat_template"),
)

_NAMES_CODE = re.compile(r".*:\s*[A-Za-z_]\w*(\.\w+)*\s*|.*\.(py|pyc|so|pth)\s*", re.DOTALL)
_REFERENCE = re.compile(r"\$\{([\w.]+)\}")
_PLACE = re.compile(r"[/\\]|\.\.|^~|\w\.\w*[A-Za-z]")  # a path, an address or a dotted name


def recompose_run(run: Path, overrides: Sequence[str] = ()) -> Recipe:
    """Compose the configuration of a run with overrides, as `recompose`, after `check`.

    Folders elsewhere and remote copies that another's run names are null, with a warning, unless
    `overrides` give them.
    """
    check(run, overrides)
    return recompose(run, [*_within(run, overrides), *overrides])


def check(run: Path, overrides: Sequence[str] = (), section: str = "") -> None:
    """Raise ConfigError if another's run names what needs the user's word; see the module.

    Keys of `overrides` are the user's. Only keys that begin with `section` are checked.
    """
    if not (run / CONFIG_FILE).is_file() or is_own(run) or is_trusted(run):
        return
    given = overridden_keys(overrides)
    found = {
        key: value
        for key, value in guarded(stored_values(run)).items()
        if key.startswith(section) and not any(f"{key}.".startswith(f"{name}.") for name in given)
    }
    named = [f"{key}={visible(redact(str(value)))[:80]}" for key, value in found.items()]
    named += [f"the link {visible(str(link.relative_to(run)))}" for link in links_to_elsewhere(run)]
    if named:
        refuse(f"the run {run.name!r}", named, run)


def links_to_elsewhere(run: Path) -> Iterator[Path]:
    """Yield the links from a run's folder to another place, but those of its parts elsewhere."""
    parts = [run / part for part in PARTS]
    inside = run.resolve()
    of_sdks = {run / name for name in names("loggers")}  # W&B's SDK links its logs there
    for folder, folders, files in os.walk(run):
        if Path(folder) in of_sdks:
            folders.clear()
            continue
        for path in (Path(folder, name) for name in (*folders, *files)):
            is_other = path.is_symlink() and path not in parts
            if is_other and not path.resolve().is_relative_to(inside):
                yield path


def _within(run: Path, overrides: Sequence[str]) -> list[str]:
    """Return the overrides that keep another's run in its folder."""
    if not (run / CONFIG_FILE).is_file() or is_own(run) or is_trusted(run):
        return []
    stored = stored_values(run)
    given = overridden_keys(overrides)
    keys = [key for key in _ELSEWHERE if stored.get(key) is not None and key not in given]
    for key in keys:
        log.warning(
            "%s=%s is not used, because the run was not made by you in this folder: give it again, "
            "or add --trust",
            key,
            visible(redact(str(stored[key]))),
        )
    return [f"{key}=null" for key in keys]


def refuse(what: str, named: Sequence[str], folder: Path) -> None:
    """Raise the error of settings `named` by `what`, which this user did not make in `folder`."""
    more = f" and {len(named) - _MAX_NAMED} more" if len(named) > _MAX_NAMED else ""
    raise ConfigError(
        f"{what} was not made by you in this folder, and names code or places outside of it: "
        f"{', '.join(named[:_MAX_NAMED])}{more}",
        where=str(folder),
        hint="read what they name, then repeat the command with --trust; the line "
        f"{folder.resolve()} in {_settings_file() or 'trusted_folders'}, or {TRUSTED_VARIABLE}, "
        "trusts all runs below that folder",
    )


def is_own(run: Path) -> bool:
    """Return True if this user made, or resumed, the run here with this configuration."""
    try:
        record = RunRecord.read(run / RECORD_FILE)
        digest = hashlib.sha256(read_record(run / CONFIG_FILE)).hexdigest()
    except (OSError, ConfigError):
        return False
    return own_folder(Place.of(record.id, run), digest) is not None


def is_trusted(run: Path) -> bool:
    """Return True if the run is below a folder that the user's settings list."""
    folders = os.environ.get(TRUSTED_VARIABLE, "").split(os.pathsep)
    file = _settings_file()
    if file is not None and file.is_file():
        folders += file.read_text(encoding="utf-8").splitlines()
    path = run.resolve()
    return any(
        path.is_relative_to(Path(folder.strip()).expanduser().resolve())
        for folder in folders
        if folder.strip().startswith(("/", "~"))
    )


def trust_all() -> None:
    """Trust all runs in this process and its children: the option `--trust`."""
    os.environ[TRUSTED_VARIABLE] = "/"


def guarded(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings, by dotted key, that need the user's word in another's run."""
    return {
        key: value
        for key, value in values.items()
        if key not in _ELSEWHERE and _is_guarded(key, value)
    }


def _is_guarded(key: str, value: Any) -> bool:
    texts = list(_texts(value))
    if any("${" in text and not _REFERENCE.fullmatch(text) for text in texts):
        return True  # read from the environment, or put together
    targets = [found[1] for text in texts if (found := _REFERENCE.fullmatch(text))]
    if _is(key, _GUARDED):
        harmless = value in (None, False, "", [], {}, *_OPTIMIZERS)
        return not harmless and not (targets and all(_is(target, _GUARDED) for target in targets))
    if any(_NAMES_CODE.fullmatch(text) for text in texts) and not _is(key, _DATA):
        return True
    if _is(key, _MAPPINGS):
        return any(_PLACE.search(text) for text in texts if not _REFERENCE.fullmatch(text)) or any(
            not _is(f"{target}.", (*_MAPPINGS, *_GUARDED)) for target in targets
        )
    outside = key == "trainer.run_dir" and str(value).startswith(("/", "~", ".."))
    return outside or any(_is(target, _DATA) for target in targets)


def _is(key: str, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(key, pattern) for pattern in patterns)


def _texts(value: Any) -> Iterator[str]:
    """Yield all texts of a nested value, also keys."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for name, item in value.items():
            yield from _texts(name)
            yield from _texts(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _texts(item)


def _settings_file() -> Path | None:
    """Return the file that lists trusted folders, one per line; None without a home."""
    try:
        root = os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config"
    except RuntimeError:
        return None
    return Path(root) / "rlctl" / "trusted_folders"
