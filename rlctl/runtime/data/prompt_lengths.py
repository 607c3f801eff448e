"""Lengths of prompts in tokens, counted in batches on all cores and cached for large files."""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import date
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
import transformers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from rlctl.data_prep.records import BATCH_ROWS
from rlctl.errors import ConfigError
from rlctl.files import write_bytes
from rlctl.runtime.data.image_prompts import ImagePrompts
from rlctl.runtime.data.row_table import Rows
from rlctl.runtime.data.tokenizer import render_prompt
from rlctl.storage import cache_folder

LOG = logging.getLogger(__name__)

_FORMAT = 1  # of the rendered prompts
_PROGRESS_S = 10.0  # between two reports
_DIGEST_BYTES = 32  # of SHA-256, before the lengths in a cached file


def prompt_lengths(
    rows: Rows,
    tokenizer: PreTrainedTokenizerBase,
    kwargs: Mapping[str, Any],
    images: ImagePrompts | None = None,
) -> np.ndarray:
    """Return the lengths (N,) of the rows' prompts; −1 where the chat template rejects one.

    They are those of `encode_prompt`, or of `images` with the tokens of images. Rows of a cached
    file have cached lengths.
    """
    target = _cache_file(rows, tokenizer, kwargs, images)
    if target is not None and target.exists():
        content = target.read_bytes()
        digest, values = content[:_DIGEST_BYTES], content[_DIGEST_BYTES:]
        if digest == hashlib.sha256(values).digest():
            return np.frombuffer(values, np.int32)
        LOG.warning("the cached lengths %s are damaged: counting tokens again", target)
    lengths = _count(rows, tokenizer, kwargs, images)
    if target is not None:
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            values = lengths.tobytes()
            write_bytes(target, hashlib.sha256(values).digest() + values)
        except OSError as error:
            LOG.warning("the lengths of prompts are not cached: %s", error)
    return lengths


def _cache_file(
    rows: Rows,
    tokenizer: PreTrainedTokenizerBase,
    kwargs: Mapping[str, Any],
    images: ImagePrompts | None,
) -> Path | None:
    """Return the path of cached lengths; None for rows or a tokenizer without a digest of all."""
    backend = _plain_backend(tokenizer)
    if rows.digest is None or rows.names_images or backend is None:
        return None
    template = str(tokenizer.chat_template)
    today = str(date.today()) if "strftime_now" in template else None
    parts = [
        _FORMAT,
        rows.digest,
        len(rows),
        dict(kwargs),
        template,
        tokenizer.special_tokens_map,
        today,
    ]
    if images is not None:
        parts.append(images.settings)
    versions = [transformers.__version__, tokenizers.__version__, type(tokenizer).__name__]
    key = hashlib.sha256(json.dumps([parts, versions], default=str).encode())
    key.update(backend.to_str().encode())
    return cache_folder() / "lengths" / key.hexdigest()


def _plain_backend(tokenizer: PreTrainedTokenizerBase) -> tokenizers.Tokenizer | None:
    """Return the backend of a fast tokenizer; None for one with code of its own (remote code)."""
    own_code = not type(tokenizer).__module__.startswith("transformers.")
    if own_code or not isinstance(tokenizer, PreTrainedTokenizerFast):
        return None
    return tokenizer.backend_tokenizer


def _count(
    rows: Rows,
    tokenizer: PreTrainedTokenizerBase,
    kwargs: Mapping[str, Any],
    images: ImagePrompts | None,
) -> np.ndarray:
    """Count tokens: a thread tokenizes a batch on all cores, while the next one is rendered."""
    lengths = np.full(len(rows), -1, np.int32)
    pending: deque[tuple[int, list[int], Future[list[int]]]] = deque()

    def finish() -> None:
        start, places, counts = pending.popleft()
        lengths[start + np.array(places, np.int64)] = counts.result()

    def render(row: Any) -> str:
        if images is None:
            return render_prompt(tokenizer, row, **kwargs)
        return images.render(row.prompt, row.images, **kwargs)

    reported, prompts = time.monotonic(), rows.prompts() if images is None else iter(rows)
    with ThreadPoolExecutor(1, "tokenizer") as thread:
        for start in range(0, len(rows), BATCH_ROWS):
            texts = [_text(render, prompt) for prompt in islice(prompts, BATCH_ROWS)]
            places = [place for place, text in enumerate(texts) if text is not None]
            usable = [text for text in texts if text is not None]
            pending.append((start, places, thread.submit(_count_tokens, tokenizer, usable)))
            if len(pending) > 1:
                finish()
            if time.monotonic() > reported + _PROGRESS_S:
                reported = time.monotonic()
                LOG.info("counted the tokens of %d of %d prompts", start, len(rows))
        while pending:
            finish()
    return lengths


def _text(render: Callable[[Any], str], prompt: Any) -> str | None:
    try:
        return render(prompt)
    except ConfigError:
        return None


def _count_tokens(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]) -> list[int]:
    """Return the lengths of `tokenizer.encode(text)`, without ids where the backend allows it."""

    def encoded(text: str) -> int:
        return len(tokenizer.encode(text, add_special_tokens=False, verbose=False))

    if not texts:
        return []
    backend = _plain_backend(tokenizer)
    if backend is not None:
        first = encoded(texts[0])  # also resets truncation and padding of the backend
        found = [
            len(encoded) for encoded in backend.encode_batch_fast(texts, add_special_tokens=False)
        ]
        if found[0] == first:
            return found
    return [encoded(text) for text in texts]
