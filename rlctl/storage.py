"""Paths and URLs of files: `s3://…`, `gs://…`, `https://…`, and others with a driver of fsspec.

Files are downloaded once per machine into a cache folder (`RLCTL_CACHE`, by default
`~/.cache/rlctl`), and again after a change. A `file://` URL is used in place, without a copy.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

CACHE_VARIABLE = "RLCTL_CACHE"
_URL = re.compile(r"[a-z][a-z0-9+.-]*://")


def is_url(text: str) -> bool:
    """Return True for a URL (`scheme://…`), False for a path or a name."""
    return _URL.match(text) is not None


def local(text: str) -> str:
    """Return a local path: download a URL unless the cache is up to date; return other text as is.

    Raises NotFoundError, MissingExtraError for a driver that is not installed, ConfigError for
    refused access, ResourceError if the server cannot be reached or the disk is full.
    """
    if not is_url(text):
        return text
    from rlctl.remote_files import fetched

    return fetched(text)


def cache_folder() -> Path:
    """Return the cache folder; it may not exist yet."""
    return Path(os.environ.get(CACHE_VARIABLE) or "~/.cache/rlctl").expanduser()
