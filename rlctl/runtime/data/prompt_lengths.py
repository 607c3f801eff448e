"""Lengths of prompts in tokens, counted in batches on all cores and cached for large files."""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from datetime import date
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import tokenizers
import transformers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from rlctl.data_prep.parquet_files import BATCH_ROWS
from rlctl.errors import ConfigError
from rlctl.files import write_bytes
from rlctl.runtime.data.row_table import Rows
from rlctl.runtime.data.tokenizer import render_prompt
from rlctl.storage import cache_folder

if TYPE_CHECKING:
    from rlctl.runtime.data.image_prompts import ImagePrompts

LOG = logging.getLogger(__name__)

_FORMAT = 1  # of the rendered prompts
_PROGRESS_S = 10.0  # between two reports
_DIGEST_BYTES = 32  # of SHA-256, before the lengths in a cached file


def prompt_lengths(
    rows: Rows,
    tokenizer: PreTrainedTokenizerBase,
    kwargs: Mapping[str, Any],
    images: ImagePrompts | None = None,
    limit: int | None = None,
) -> np.ndarray:
    """Return the lengths (N,) of the rows' prompts; −1 where the chat template rejects one.

    They are those of `encode_prompt`, or of `images` with the tokens of images. Rows of a cached
    file have cached lengths; else a length that is above `limit` for sure may be too small.
    """
    target = _cache_file(rows, tokenizer, kwargs, images)
    if target is not None and target.exists():
        content = target.read_bytes()
        digest = content[:_DIGEST_BYTES]
        values = content[_DIGEST_BYTES:]
        if digest == hashlib.sha256(values).digest():
            return np.frombuffer(values, np.int32)
        LOG.warning("the cached lengths %s are damaged: counting tokens again", target)
    lengths = _count(rows, tokenizer, kwargs, images, None if target else limit)
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
    """Return the backend of a fast tokenizer; None for one with other code (remote code)."""
    own_code = not type(tokenizer).__module__.startswith("transformers.")
    if own_code or not isinstance(tokenizer, PreTrainedTokenizerFast):
        return None
    return tokenizer.backend_tokenizer


def _count(
    rows: Rows,
    tokenizer: PreTrainedTokenizerBase,
    kwargs: Mapping[str, Any],
    images: ImagePrompts | None,
    limit: int | None,
) -> np.ndarray:
    """Count tokens: a thread tokenizes a batch on all cores, while the next one is rendered."""
    lengths = np.full(len(rows), -1, np.int32)
    pending: deque[tuple[int, list[int], Future[list[int]]]] = deque()

    def finish() -> None:
        start, places, counts = pending.popleft()
        while not counts.done() and wait([counts], _PROGRESS_S).not_done:
            LOG.info("counting the tokens of prompt %d and later ones of %d", start, len(rows))
        lengths[start + np.array(places, np.int64)] = counts.result()

    def render(row: Any) -> str:
        if images is None:
            return render_prompt(tokenizer, row, **kwargs)
        return images.render(row.prompt, row.images, **kwargs)

    reported = time.monotonic()
    prompts = rows.prompts() if images is None else iter(rows)
    with ThreadPoolExecutor(1, "tokenizer") as thread:
        for start in range(0, len(rows), BATCH_ROWS):
            texts = [_text(render, prompt) for prompt in islice(prompts, BATCH_ROWS)]
            places = [place for place, text in enumerate(texts) if text is not None]
            usable = [text for text in texts if text is not None]
            counts = thread.submit(_count_tokens, tokenizer, usable, limit)
            pending.append((start, places, counts))
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


def _count_tokens(
    tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], limit: int | None
) -> list[int]:
    """Return the lengths of `tokenizer.encode(text)`, without ids where the backend allows it.

    For a text that is longer than `limit` tokens for sure, return a lower bound.
    """
    longest = None if limit is None else _longest_token(tokenizer)
    if limit is None or longest is None:
        return _exact_counts(tokenizer, texts)
    bounds = [-(-len(text) // longest) for text in texts]
    short = [text for text, bound in zip(texts, bounds, strict=True) if bound <= limit]
    counts = iter(_exact_counts(tokenizer, short))
    return [bound if bound > limit else next(counts) for bound in bounds]


def _longest_token(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """Return the characters of the longest token; None if a token may stand for a longer text."""
    backend = _plain_backend(tokenizer)
    if backend is None or not isinstance(backend.normalizer, tokenizers.normalizers.NFC | None):
        return None
    composed = 1 if backend.normalizer is None else 4  # characters that NFC makes one, at most
    model = backend.model
    added = tokenizer.added_tokens_decoder.values()
    exact = isinstance(model, tokenizers.models.BPE) and model.unk_token is None
    if not exact or any(token.lstrip or token.rstrip for token in added):
        return None
    return composed * max(map(len, tokenizer.get_vocab()))


def _exact_counts(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]) -> list[int]:
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
