"""The model's tokenizer and chat template: what turns a row's chat into the token ids that the model continues."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, GenerationConfig, PreTrainedTokenizerBase

from rlctl.data_prep.hub import hub_answers
from rlctl.errors import ConfigError
from rlctl.quickstart import real_path
from rlctl.storage import local

Chat = Sequence[dict[str, str]]

_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model")
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")


def load_tokenizer(path: str, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """The tokenizer of a model folder (or its address), or of a model on the hub (`owner/name`), with a chat template.

    Raises ConfigError when the folder is missing, holds no tokenizer, or its tokenizer has no chat template.
    """
    folder = Path(local(real_path(path))).expanduser()
    if folder.is_dir():
        if not any((folder / name).exists() for name in _FILES):
            raise ConfigError(
                "the model folder has no tokenizer",
                where=str(folder),
                hint=f"one of {', '.join(_FILES)} must be in it",
            )
        source = str(folder)
    elif folder.exists():
        raise ConfigError("the model path is a file, wanted a folder", where=str(folder))
    elif _HUB_NAME.fullmatch(path):
        source = path
    else:
        raise ConfigError(
            "the model folder does not exist",
            where=str(folder),
            hint="a folder in transformers' format, or owner/name on the hub",
        )
    try:
        only_here = not folder.is_dir() and not hub_answers()
        tokenizer = AutoTokenizer.from_pretrained(
            source, trust_remote_code=trust_remote_code, local_files_only=only_here
        )
    except (
        Exception
    ) as error:  # a broken tokenizer.json makes the tokenizers library raise this very class
        hint = (
            None
            if folder.is_dir()
            else "a folder of that name does not exist here, so it was looked up on the hub"
        )
        raise ConfigError(
            f"the tokenizer cannot be loaded: {str(error).splitlines()[0]}", where=source, hint=hint
        ) from error
    if not tokenizer.chat_template:
        raise ConfigError(
            "the tokenizer has no chat template",
            where=source,
            hint="the model's instruct variant, or a chat_template.jinja in the folder that you write",
        )
    return tokenizer


def render_prompt(
    tokenizer: PreTrainedTokenizerBase, chat: Chat, **apply_chat_template_kwargs: Any
) -> str:
    """The text that the model continues: `chat` in the model's template, ending where the assistant's turn begins.

    Raises ConfigError when the template refuses the chat (a role it does not know, turns in an order it does not take).
    """
    import jinja2

    try:
        text = tokenizer.apply_chat_template(
            list(chat), tokenize=False, add_generation_prompt=True, **apply_chat_template_kwargs
        )
    except jinja2.TemplateError as error:
        roles = ", ".join(message["role"] for message in chat)
        raise ConfigError(
            f"the chat template refuses a prompt with the roles {roles}: {error}",
            where=tokenizer.name_or_path,
        ) from error
    assert isinstance(text, str)  # one chat, not tokenized
    return text


def encode_prompt(
    tokenizer: PreTrainedTokenizerBase, chat: Chat, **apply_chat_template_kwargs: Any
) -> list[int]:
    """The token ids of `render_prompt`. Special tokens are the template's: none is added."""
    text = render_prompt(tokenizer, chat, **apply_chat_template_kwargs)
    return tokenizer.encode(
        text, add_special_tokens=False, verbose=False
    )  # how long is too long is the caller's affair


def stop_token_ids(tokenizer: PreTrainedTokenizerBase, model_path: str) -> tuple[int, ...]:
    """The tokens that end an answer: the tokenizer's, and those of the model's generation_config.json where it has one; sorted.

    Raises ConfigError when there is none: no answer would ever end.
    """
    own = tokenizer.eos_token_id
    found = {own} if isinstance(own, int) else set[int]()
    folder = Path(local(model_path)).expanduser()
    if (folder / "generation_config.json").is_file() or not folder.is_dir():
        try:
            ends = GenerationConfig.from_pretrained(
                str(folder) if folder.is_dir() else model_path
            ).eos_token_id
        except OSError as error:
            if folder.is_dir():
                raise ConfigError(
                    f"generation_config.json cannot be read: {error}", where=str(folder)
                ) from error
            ends = None  # a model on the hub need not have one
        found |= {ends} if isinstance(ends, int) else set(ends or ())
    if not found:
        raise ConfigError(
            "neither the tokenizer nor generation_config.json names a token that ends an answer",
            where=model_path,
        )
    return tuple(sorted(found))
