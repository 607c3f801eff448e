"""The model's tokenizer and chat template: from chat messages to the token ids of a prompt."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, GenerationConfig, PreTrainedTokenizerBase

from rlctl.data_prep.message_parts import ASSISTANT
from rlctl.errors import ConfigError
from rlctl.quickstart import real_path
from rlctl.recipes import schema
from rlctl.runtime.data.model_folder import check_tokenizer_files, is_hub_silent, template_of
from rlctl.runtime.data.template_limit import render_limited
from rlctl.storage import local

Chat = Sequence[dict[str, Any]]

_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")


def tokenizer_of(model: schema.Model) -> PreTrainedTokenizerBase:
    """Load the tokenizer of the configured model, with its chat template. Raises ConfigError."""
    template = template_of(model)
    return load_tokenizer(model.tokenizer_path or model.path, model.trust_remote_code, template)


def load_tokenizer(
    path: str, trust_remote_code: bool = False, chat_template: str | None = None
) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a model folder, remote address or hub model (`owner/name`).

    `chat_template`, the text of a template, replaces the tokenizer's.
    Raises ConfigError if the folder is missing or has no tokenizer, the tokenizer cannot be loaded,
    or it has no chat template; ResourceError if the hub does not respond and has no cached copy.
    """
    folder = Path(local(real_path(path))).expanduser()
    check_tokenizer_files(folder)
    if folder.is_dir():
        source = str(folder)
    elif _HUB_NAME.fullmatch(path):
        source = path
    else:
        raise ConfigError(
            "the model folder does not exist",
            where=str(folder),
            hint="give a folder in transformers' format, or owner/name on the hub",
        )
    offline = not folder.is_dir() and is_hub_silent()
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            source, trust_remote_code=trust_remote_code, local_files_only=offline
        )
        tokenizer.encode("a", verbose=False)  # fails for settings of wrong types
    except Exception as error:  # tokenizers raises this class itself for a broken tokenizer.json
        from rlctl.runtime.data.model_errors import check_own_code, tokenizer_error

        check_own_code(error, source)
        raise tokenizer_error(error, path, folder, offline) from error
    if chat_template is not None:
        tokenizer.chat_template = chat_template
    if not tokenizer.chat_template:
        raise ConfigError(
            "the tokenizer has no chat template",
            where=source,
            hint="use the model's instruct variant, or give a template in "
            "actor_rollout_ref.model.custom_chat_template",
        )
    return tokenizer


def ends_with_assistant(chat: Chat) -> bool:
    """Return True if the last message is an assistant's text, which a response continues."""
    return bool(chat) and chat[-1]["role"] == ASSISTANT and not chat[-1].get("tool_calls")


def with_response(chat: Chat, text: str) -> list[dict[str, Any]]:
    """Return a prompt with its response, which continues an assistant's last message."""
    if ends_with_assistant(chat):
        return [*chat[:-1], {**chat[-1], "content": chat[-1]["content"] + text}]
    return [*chat, {"role": ASSISTANT, "content": text}]


def render_prompt(
    tokenizer: PreTrainedTokenizerBase, chat: Chat, **apply_chat_template_kwargs: Any
) -> str:
    """Render `chat` with the model's template, up to the start of the assistant's turn.

    An assistant's last message is the start of that turn, unless `add_generation_prompt` is given.
    Raises ConfigError if the template rejects the chat, for example an unknown role.
    """
    continues = "add_generation_prompt" not in apply_chat_template_kwargs
    continues = continues and ends_with_assistant(chat)
    kwargs = {"add_generation_prompt": not continues, **apply_chat_template_kwargs}
    if continues:
        kwargs = {"continue_final_message": True, **kwargs}
    try:
        text = render_limited(tokenizer, list(chat), **kwargs)
    except Exception as error:  # of any class, as templates are programs
        from rlctl.runtime.data.model_errors import template_error

        raise template_error(error, chat, tokenizer.name_or_path, continues) from error
    return text.encode(errors="replace").decode()  # lone surrogates cannot be tokenized


def encode_prompt(
    tokenizer: PreTrainedTokenizerBase, chat: Chat, **apply_chat_template_kwargs: Any
) -> list[int]:
    """Tokenize `render_prompt`. The template contains all special tokens; none is added."""
    return encode_text(tokenizer, render_prompt(tokenizer, chat, **apply_chat_template_kwargs))


def encode_text(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Tokenize the text of a rendered prompt."""
    # verbose=False: the caller checks the length.
    return tokenizer.encode(text, add_special_tokens=False, verbose=False)


def stop_token_ids(tokenizer: PreTrainedTokenizerBase, model_path: str) -> tuple[int, ...]:
    """Return the sorted stop tokens of the tokenizer and the model's generation_config.json.

    Raises ConfigError if there are none, since responses would never end.
    """
    found: set[int] = set()
    if isinstance(tokenizer.eos_token_id, int):
        found.add(tokenizer.eos_token_id)
    folder = Path(local(model_path)).expanduser()
    if (folder / "generation_config.json").is_file() or not folder.is_dir():
        try:
            ends = GenerationConfig.from_pretrained(
                str(folder) if folder.is_dir() else model_path,
                local_files_only=not folder.is_dir() and is_hub_silent(),
            ).eos_token_id
        except (OSError, ValueError, TypeError, AttributeError) as error:
            if folder.is_dir():
                raise ConfigError(
                    f"generation_config.json cannot be read: {error}", where=str(folder)
                ) from error
            ends = None  # optional for a model on the hub
        found |= {ends} if isinstance(ends, int) else set(ends or ())
    if not found:
        raise ConfigError(
            "neither the tokenizer nor generation_config.json defines a stop token",
            where=model_path,
        )
    return tuple(sorted(found))
