"""Images of a prompt row: the column `images` of verl, and content parts of messages.

A row has a list of images, or a single one; each is the bytes of its file, a path or an address
(`data:…` too), a struct `{bytes, path}` as in `datasets`, or an image of Pillow. The text of its
messages refers to them in their order by `<image>`; see `message_parts`.
"""

from __future__ import annotations

import base64
import hashlib
import io
import stat
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, TypeGuard

from rlctl.data_prep.message_parts import PLACEHOLDER
from rlctl.errors import ConfigError, RlctlError
from rlctl.storage import local

_MAX_BYTES = 128 * 2**20  # of a file

Image = bytes | str  # content of a file, or its path or address


def images_of(value: Any) -> tuple[Image, ...]:
    """Return the images in the value of a column. Raises ValueError for another value."""
    if value is None:
        return ()
    if isinstance(value, Sequence) and not isinstance(value, bytes | str):
        return tuple(_image(item) for item in value)
    return (_image(value),)


def _image(value: Any) -> Image:
    if isinstance(value, Mapping):
        value = value.get("bytes") or value.get("path")
    if isinstance(value, str) and value.startswith("data:"):
        value = _decoded(value)
    if is_picture(value):
        buffer = io.BytesIO()
        value.save(buffer, "PNG")
        return buffer.getvalue()
    if isinstance(value, bytes | str) and value:
        return value
    kind = "empty value"
    if value:
        kind = type(value).__name__
    raise ValueError(f"an image is bytes, a path, or {{bytes, path}}, not {kind}")


def is_picture(value: Any) -> TypeGuard[Any]:
    """Return True for an image of Pillow, which may not be installed."""
    return hasattr(value, "save") and hasattr(value, "mode")


def read_images(value: Any, folder: Path) -> tuple[bytes, ...]:
    """Return the files of the images in the value of a column; paths are relative to `folder`.

    Raises ValueError for another value, and for an image that cannot be read or decoded.
    """
    try:
        from rlctl.data_prep.decoded_images import size_of

        contents = tuple(content_of(image, folder) for image in images_of(value))
        for content in contents:
            size_of(content)
    except RlctlError as error:
        raise ValueError(error.problems[0].message) from error
    return contents


def image_faults(value: Any, image_key: str, texts: Sequence[Any]) -> list[str]:
    """Return what is wrong with the images in the value of a row whose messages have `texts`."""
    try:
        images = images_of(value)
    except ValueError as error:
        return [f"column {image_key!r}: {error}"]
    count = sum(text.count(PLACEHOLDER) for text in texts if isinstance(text, str))
    if count == len(images):
        return []
    return [
        f"the prompt refers to {count} images by {PLACEHOLDER}, and column {image_key!r} has "
        f"{len(images)}"
    ]


def _parts(text: str, images: Iterator[Image]) -> list[dict[str, Any]]:
    """Return the content parts of a text with placeholders of the next `images`."""
    first, *others = text.split(PLACEHOLDER)
    parts: list[dict[str, Any]] = []
    if first:
        parts.append({"type": "text", "text": first})
    for other in others:
        image = next(images, None)
        parts.append({"type": "image", "image": image and content_of(image)})
        if other:
            parts.append({"type": "text", "text": other})
    return parts


def with_parts(messages: Sequence[Mapping[str, Any]], images: Sequence[Image]) -> list[Any]:
    """Return messages with content parts where their text refers to `images` by `<image>`.

    Raises ConfigError if it refers to another number of images; messages without any drop them.
    """
    if not images:
        return list(messages)
    rest = iter(images)
    used = 0
    found: list[Any] = []
    for message in messages:
        content = message["content"]
        if isinstance(content, str) and PLACEHOLDER in content:
            used += content.count(PLACEHOLDER)
            content = _parts(content, rest)
        found.append({**message, "content": content})
    if used not in (0, len(images)):
        raise ConfigError(f"the messages refer to {used} images, and the row has {len(images)}")
    return found


def images_in(messages: Iterable[Mapping[str, Any]]) -> tuple[bytes, ...]:
    """Return the images in content parts, which are bytes or data addresses."""
    parts = chain(*(m["content"] for m in messages if isinstance(m.get("content"), list)))
    images = [part["image"] for part in parts if part["type"] == "image"]
    # Messages of other processes name no files of this one.
    return tuple(image if isinstance(image, bytes) else _decoded(image) for image in images)


def _decoded(address: str) -> bytes:
    return base64.b64decode(address.partition(",")[2])


def content_of(image: Image, folder: str | Path = "") -> bytes:
    """Return the bytes of an image's file. Raises ConfigError if it cannot be read.

    Its path may be relative to `folder`, by default the current one. Devices and pipes, which may
    have no end, are not read.
    """
    if isinstance(image, bytes):
        return image
    try:
        path = Path(folder, Path(local(image)).expanduser())
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            raise ConfigError("an image cannot be read: it is no regular file", where=image)
        if status.st_size > _MAX_BYTES:
            raise ConfigError(
                f"an image has {status.st_size} bytes, and {_MAX_BYTES} are allowed", where=image
            )
        return path.read_bytes()
    except OSError as error:
        hint = "paths are relative to the current folder"
        raise ConfigError(f"an image cannot be read: {error}", where=image, hint=hint) from error


def data_url(content: bytes) -> str:
    """Return the file of an image as an address that contains it."""
    kinds = {b"\x89PNG": "png", b"GIF8": "gif", b"RIFF": "webp", b"BM": "bmp"}
    kind = next((kind for start, kind in kinds.items() if content.startswith(start)), "jpeg")
    return f"data:image/{kind};base64,{base64.b64encode(content).decode()}"


def digest_of(image: Image) -> str:
    """Return the SHA-256 of an image's file."""
    return hashlib.sha256(content_of(image)).hexdigest()
