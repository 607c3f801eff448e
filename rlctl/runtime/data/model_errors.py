"""Errors of a model's files: those that transformers raises, as errors of the configuration."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rlctl import quickstart
from rlctl.errors import ConfigError, RlctlError
from rlctl.hub import not_downloaded
from rlctl.storage import local
from rlctl.suggest import did_you_mean

_LONGEST = 500  # characters of a reason


def tokenizer_error(error: Exception, path: str, folder: Path, offline: bool) -> RlctlError:
    """Return the error of a tokenizer at `path`, which is in `folder` if that exists."""
    source = str(folder) if folder.is_dir() else path
    if offline:
        return not_downloaded(path, source)
    hint = "no folder of that name exists, so it was looked up on the hub"
    return ConfigError(
        f"the tokenizer cannot be loaded: {_reason(error)}",
        where=source,
        hint=None if folder.is_dir() else hint,
    )


def config_error(error: Exception, path: str, key: str, offline: bool) -> RlctlError:
    """Return the error of a model whose config.json cannot be read; `key` names the model."""
    near = did_you_mean(path, quickstart.MODELS)
    if offline and not near:
        return not_downloaded(path, key)
    return ConfigError(
        f"the model {path!r} has no readable config.json: {_reason(error)}",
        where=key,
        hint=None
        if Path(local(path)).exists()
        else near
        or "without a network, give a local folder, or set HF_HUB_OFFLINE=1 to use the hub's "
        "cache; HF_ENDPOINT=URL selects a mirror of the hub",
    )


def template_error(
    error: Exception, chat: Sequence[Mapping[str, Any]], where: str, continues: bool
) -> ConfigError:
    """Return the error of a chat template; `continues` if it was to continue the last message."""
    if continues and "continue_final_message" in str(error):
        return ConfigError(
            "the chat template cannot continue a prompt that ends with an assistant's message",
            where=where,
            hint="leave that message out; +data.apply_chat_template_kwargs."
            "add_generation_prompt=true begins another one after it",
        )
    roles = ", ".join(str(message["role"]) for message in chat)
    return ConfigError(
        f"the chat template rejects a prompt with the roles {roles}: {_reason(error)}", where=where
    )


def check_own_code(error: Exception, path: str, section: str = "actor_rollout_ref.model") -> None:
    """Raise ConfigError if `error` says that the model at `path` needs code of its folder."""
    if "trust_remote_code=True" in str(error):
        key = f"{section}.trust_remote_code"
        raise ConfigError(
            f"the model {path!r} needs Python code of its own, which has not been run",
            where=key,
            hint=f"read the *.py files there; {key}=true runs them",
        ) from error


def _reason(error: Exception) -> str:
    """Return the message of an error on one line, or its class."""
    return " ".join(str(error).split())[:_LONGEST] or type(error).__name__
