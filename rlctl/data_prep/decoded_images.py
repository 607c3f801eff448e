"""Decoding of images by Pillow; only runs with images load this module."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

from rlctl.errors import ConfigError, MissingExtraError

# Formats that are decoded: others run programs (EPS) or are seldom tried against bad files.
_FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")
_MAX_PIXELS = 64_000_000  # 192 MB in RGB; a camera's are below
_ORIENTATION = 0x0112  # tag of EXIF
_TURNED = range(5, 9)  # its values for a quarter turn


def require_pillow(where: str) -> None:
    """Raise MissingExtraError if Pillow is not installed."""
    if find_spec("PIL") is None:
        hint = "pip install 'rlctl[images]'"
        raise MissingExtraError(
            "images need Pillow, which is not installed", where=where, hint=hint
        )


def opened(content: bytes) -> Any:
    """Return an image of Pillow in RGB, upright. Raises ConfigError."""
    from PIL import ImageOps

    with _decoding(content) as image:
        if _orientation(image) == 1:
            return image.convert("RGB")
        return ImageOps.exif_transpose(image).convert("RGB")


def size_of(content: bytes) -> tuple[int, int]:
    """Return width and height of an image, upright, from its header. Raises ConfigError."""
    with _decoding(content) as image:
        width, height = image.size
        if _orientation(image) in _TURNED:
            return height, width
        return width, height


def _orientation(image: Any) -> int:
    """Return the orientation in the EXIF data of an image, 1 for none, without decoding it."""
    if image.format == "TIFF":  # Pillow turns it itself
        return 1
    if image.format != "PNG":
        return image.getexif().get(_ORIENTATION, 1)
    from PIL.Image import Exif

    found = Exif()  # `getexif` decodes a PNG to look behind its pixels
    found.load(image.info.get("exif") or b"")
    return found.get(_ORIENTATION, 1)


@contextmanager
def _decoding(content: bytes) -> Iterator[Any]:
    from PIL import Image

    try:
        with Image.open(io.BytesIO(content), formats=_FORMATS) as image:
            if image.width * image.height > _MAX_PIXELS:
                raise ValueError(
                    f"it has {image.width} x {image.height} pixels, and {_MAX_PIXELS} are allowed"
                )
            yield image
    except Exception as error:  # decoders raise errors of any class
        where = f"the image with SHA-256 {hashlib.sha256(content).hexdigest()[:12]}"
        reason = str(error).partition(" <")[0]  # an address in memory follows
        raise ConfigError(f"an image cannot be decoded: {reason}", where=where) from error


def pattern(width: int, height: int) -> bytes:
    """Return a PNG whose pixels differ, always the same."""
    from PIL import Image

    pixels = bytes(i * 7919 % 251 for i in range(3 * width * height))
    buffer = io.BytesIO()
    Image.frombytes("RGB", (width, height), pixels).save(buffer, "PNG")
    return buffer.getvalue()
