"""Models in GGUF files, converted once to folders that transformers loads and trains.

A folder is in the cache (`RLCTL_CACHE`), named by the file's content and the version of
transformers. It has float32 weights in safetensors, the tokenizer and the chat template.
"""

from __future__ import annotations

import hashlib
import logging
import re
from functools import cache
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rlctl.errors import ConfigError, ResourceError
from rlctl.files import apply_umask, free_space, replacing
from rlctl.hub import hub_answers, not_downloaded
from rlctl.packages import require
from rlctl.remote_files import locked
from rlctl.storage import CACHE_VARIABLE, cache_folder, local

LOG = logging.getLogger(__name__)

_ON_HUB = re.compile(r"([\w.-]+/[\w.-]+):(.+)")
_ENDS = ("eos", "eot", "eom")  # tokens of a GGUF file that end a response


def folder_of(path: str) -> str:
    """Return the folder of the model in a GGUF file, which is converted if the cache lacks it.

    `path` is a file, its address, or `owner/name:FILE.gguf` on the hub; a folder is returned as is.
    Raises MissingExtraError without the package gguf, ConfigError for a file that is missing,
    damaged or not supported, ResourceError without a network or enough space on the disk.
    """
    if Path(path).expanduser().is_dir():
        return path
    require("gguf", f"the model {path!r} needs the package gguf", "gguf")
    file = _local_file(path)
    status = file.stat()
    return str(_converted(path, file, status.st_size, status.st_mtime_ns))


def _local_file(path: str) -> Path:
    file = Path(local(path)).expanduser()
    if file.is_file():
        return file
    on_hub = _ON_HUB.fullmatch(path)
    if on_hub is None:
        raise ConfigError(
            f"there is no model file {path!r}",
            hint="the path or address of a GGUF file, or OWNER/NAME:FILE.gguf of one on the hub",
        )
    from huggingface_hub import hf_hub_download

    is_online = hub_answers()
    try:
        return Path(hf_hub_download(*on_hub.groups(), local_files_only=not is_online))
    except (OSError, ValueError) as error:
        if not is_online:
            raise not_downloaded(path, path) from error
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ConfigError(f"the model file {path!r} is not on the hub: {reason}") from error


@cache
def _converted(path: str, file: Path, *_state: int) -> Path:
    """Return the folder of a file, which is converted if it is missing.

    `_state` is the file's size and time, so that a changed file is read again.
    """
    with file.open("rb") as opened:
        content = hashlib.file_digest(opened, "sha256").hexdigest()
    folder = cache_folder() / f"gguf-{content[:16]}-{version('transformers')}"
    target = folder / "model"
    if target.is_dir():
        LOG.info(f"the model {path} is read as float32 safetensors, converted before: {target}")
        return target
    reader = _reader(path, file)
    with locked(folder, path):
        if not target.is_dir():
            _convert(path, file, reader, target)
    return target


def _reader(path: str, file: Path) -> Any:
    """Return the reader of a complete file. Raises ConfigError."""
    try:
        reader = import_module("gguf").GGUFReader(file)
    except Exception as error:  # damaged files lead to errors of many classes
        raise _unreadable(path, error, "is no complete GGUF file") from error
    parts = _value(reader, "split.count")
    if parts is not None and parts > 1:
        raise ConfigError(
            f"the model file {path!r} is one of {parts} parts of a model",
            hint="llama-gguf-split --merge FIRST_PART FILE.gguf makes one file of them",
        )
    return reader


def _convert(path: str, file: Path, reader: Any, target: Path) -> None:
    """Write the model in `file` to the folder `target`, which appears when it is complete."""
    num_bytes = 4 * sum(int(tensor.n_elements) for tensor in reader.tensors)
    free = free_space(target.parent)
    size = f"{num_bytes / 2**20:.0f} MiB"
    if free < num_bytes:
        raise ResourceError(
            f"the model {path!r} needs {size} as float32, but only {free / 2**20:.0f} MiB are free",
            where=str(target.parent),
            hint=f"set {CACHE_VARIABLE}=DIR to a folder on a larger disk",
        )
    LOG.info(f"the model {path} is converted once to float32 safetensors ({size}): {target}")
    model, tokenizer = _load(path, file)
    ends = (_value(reader, f"tokenizer.ggml.{name}_token_id") for name in _ENDS)
    stops = sorted({int(end) for end in ends if end is not None})
    if stops and model.generation_config is not None:
        model.generation_config.eos_token_id = stops
        if len(stops) == 1:
            model.generation_config.eos_token_id = stops[0]
    try:
        with replacing(target, unique=False) as aside:
            model.save_pretrained(aside)
            tokenizer.save_pretrained(aside)
            apply_umask(*aside.iterdir())
    except Exception as error:  # safetensors and tokenizers have no OSError
        if "(os error " not in str(error):
            raise
        raise ResourceError(
            f"the model {path!r} cannot be written as float32: {error}",
            where=str(target.parent),
            hint=f"set {CACHE_VARIABLE}=DIR to a folder on a larger disk",
        ) from error


def _load(path: str, file: Path) -> tuple[Any, Any]:
    """Return model and tokenizer of a file, with float32 weights. Raises ConfigError."""
    import torch
    import transformers
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    options: dict[str, Any] = {"gguf_file": file.name, "local_files_only": True}
    quantization: dict[str, Any] = {}
    plain = getattr(transformers, "GgufConfig", None)  # older versions always dequantize
    if plain is not None:
        quantization = {"quantization_config": plain(dequantize=True)}
    try:
        loaded: Any = transformers.AutoModelForCausalLM.from_pretrained(
            str(file.parent),
            dtype=torch.float32,
            output_loading_info=True,
            **options,
            **quantization,
        )
        model, loading = loaded
        tokenizer = transformers.AutoTokenizer.from_pretrained(str(file.parent), **options)
    except MemoryError:
        raise
    except Exception as error:  # damaged files lead to errors of many classes
        raise _unreadable(path, error, "cannot be read by transformers") from error
    lacking = sorted([*loading["missing_keys"], *map(str, loading["mismatched_keys"])])
    if lacking:
        message = (
            f"the model file {path!r} lacks {len(lacking)} of its model's weights: {lacking[0]}"
        )
        if len(lacking) > 1:
            message += ", …"
        raise ConfigError(message)
    if unread := sorted(loading["unexpected_keys"]):
        LOG.warning(f"tensors of {path} that the model does not have: {', '.join(unread)}")
    return model, tokenizer


def _value(reader: Any, key: str) -> Any:
    """Return a value of the file's header, None if it has none."""
    field = reader.get_field(key)
    if field is None:
        return None
    return field.contents()


def _unreadable(path: str, error: Exception, what: str) -> ConfigError:
    reason = (str(error).strip() or type(error).__name__).splitlines()[0]
    return ConfigError(
        f"the model file {path!r} {what}: {reason}",
        hint="a complete GGUF file of an architecture that transformers reads, or the model's "
        "folder in safetensors",
    )
