"""Files of a model's folder, checked without transformers, whose import takes seconds."""

from __future__ import annotations

import re
from pathlib import Path

from rlctl.errors import ConfigError
from rlctl.recipes import schema
from rlctl.storage import local

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model")


def is_missing(model_path: str) -> bool:
    """Return whether the path can only be a folder, and the folder does not exist."""
    path = Path(local(model_path)).expanduser()
    is_path = path.is_absolute() or model_path.startswith(("./", "../")) or len(path.parts) != 2
    return not path.exists() and is_path


def check_folder(model_path: str, key: str) -> None:
    """Raise ConfigError for a model that is missing and can only be a folder."""
    if is_missing(model_path) and "/" in model_path:  # the hub has short names, too
        raise ConfigError(
            f"there is no model folder {model_path!r}",
            where=key,
            hint="a folder with config.json, or ORGANIZATION/NAME of a model on the hub",
        )
    _check_parts(Path(local(model_path)).expanduser() / "config.json")


def check_tokenizer_files(folder: Path) -> None:
    """Raise ConfigError for a folder without a tokenizer, or a file in its place."""
    if folder.is_dir() and not any((folder / name).exists() for name in _TOKENIZER_FILES):
        raise ConfigError(
            "the model folder has no tokenizer",
            where=str(folder),
            hint=f"the folder must contain one of {', '.join(_TOKENIZER_FILES)}",
        )
    if folder.exists() and not folder.is_dir():
        raise ConfigError("the model path is a file, not a folder", where=str(folder))
    _check_parts(folder / "config.json")


def _check_parts(file: Path) -> None:
    if file.is_file() and re.search(rb"backbone|architecture\"|\\u", file.read_bytes()):
        from rlctl.runtime.data.other_models import refuse_other_models

        refuse_other_models(file)


def template_of(model: schema.Model) -> str | None:
    """Return the configured chat template. Raises ConfigError if its file cannot be read."""
    file = model.chat_template_file
    if file is None:
        return model.custom_chat_template
    try:
        return Path(local(file)).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"the chat template cannot be read: {error}",
            where="actor_rollout_ref.model.custom_chat_template",
            hint="give a jinja file, its address, or the text of a template",
        ) from error


def is_hub_silent() -> bool:
    """Return True if the hub, which may have a model that is no folder, does not respond."""
    from rlctl.hub import hub_answers

    return not hub_answers()
