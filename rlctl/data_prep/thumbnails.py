"""Thumbnails of the images in validation prompts: small JPEG files in the folder of a run."""

from __future__ import annotations

import io
import logging
import re
from collections.abc import Mapping
from pathlib import Path

from rlctl.errors import ConfigError
from rlctl.files import replacing

LOG = logging.getLogger(__name__)

MAX_FILES = 1000  # of a run
MAX_BYTES = 8 * 1024  # of a file
_STEPS = ((160, 80), (160, 50), (96, 50), (48, 40))  # pixels of the longer side, quality
_DIGEST = re.compile(r"[0-9a-f]{64}")
_START = b"\xff\xd8\xff"  # of a JPEG file


def write_thumbnails(run: Path, images: Mapping[str, bytes]) -> None:
    """Write thumbnails of `images`, files by their SHA-256, that the run has not yet.

    A run has at most `MAX_FILES`. Images that cannot be decoded have none; a full disk is logged.
    """
    folder = run / "generations" / "images"
    if not images:
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
        left = MAX_FILES - sum(1 for _ in folder.glob("*.jpg"))
        for digest, content in images.items():
            file = folder / f"{digest}.jpg"
            if left > 0 and not file.exists() and (small := _thumbnail(content)) is not None:
                with replacing(file, sync=False) as aside:
                    aside.write_bytes(small)
                left -= 1
    except OSError as error:
        LOG.warning("thumbnails of images are not written: %s", error)


def _thumbnail(content: bytes) -> bytes | None:
    """Return a JPEG of at most `MAX_BYTES`; None for an image that Pillow refuses to decode."""
    from rlctl.data_prep.decoded_images import opened

    try:
        image = opened(content)
    except ConfigError:
        return None
    for side, quality in _STEPS:
        image.thumbnail((side, side))
        buffer = io.BytesIO()
        image.save(buffer, "JPEG", quality=quality)
        if buffer.tell() <= MAX_BYTES:
            return buffer.getvalue()
    return None


def read_thumbnail(run: Path, digest: str) -> bytes | None:
    """Return the thumbnail of the image with this SHA-256, None without a valid file of it."""
    file = run / "generations" / "images" / f"{digest}.jpg"
    if not _DIGEST.fullmatch(digest) or file.is_symlink():
        return None
    try:
        with file.open("rb") as opened_file:
            content = opened_file.read(MAX_BYTES + 1)
    except OSError:
        return None
    if not content.startswith(_START) or len(content) > MAX_BYTES:
        return None
    return content
