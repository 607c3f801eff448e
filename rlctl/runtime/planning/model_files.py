"""Whether the weights of a model's folder are all there, from sizes and headers alone: nothing is loaded."""

from __future__ import annotations

import json
from pathlib import Path

from rlctl.errors import Problem
from rlctl.recipes import schema
from rlctl.storage import local

_INDEXES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
_WHOLE = ("model.safetensors", "pytorch_model.bin")


def check_weights(model: schema.Model, key: str) -> list[Problem]:
    """No weights, shards that the index names and that are missing, files cut off. `key` is the one that named the model.

    A name on the hub is not looked into, nor a model that starts with random weights.
    """
    folder = Path(local(model.path)).expanduser()
    if model.init != "auto" or not folder.is_dir():
        return []
    again = "copy or download the model again"
    files = [folder / name for name in _WHOLE if (folder / name).is_file()][:1]
    index = next((folder / name for name in _INDEXES if (folder / name).is_file()), None)
    if not files and index is not None:
        try:
            names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        except (ValueError, KeyError, AttributeError, TypeError, OSError) as error:
            return [Problem(f"{index} cannot be read as an index of weights: {error}", key, again)]
        missing = [name for name in names if not (folder / name).is_file()]
        if missing:
            return [
                Problem(
                    f"{len(missing)} of {len(names)} weight files are missing in {folder}: {', '.join(missing)}",
                    key,
                    again,
                )
            ]
        files = [folder / name for name in names]
    if not files:
        hint = (
            "a folder with *.safetensors, or actor_rollout_ref.model.init=random for random weights"
        )
        return [
            Problem(
                f"{folder} holds no weights: neither {' nor '.join(_WHOLE)} nor an index of shards",
                key,
                hint,
            )
        ]
    faults = {file: _fault(file) for file in files if file.suffix == ".safetensors"}
    return [
        Problem(f"{file} is damaged: {fault}", key, again)
        for file, fault in faults.items()
        if fault
    ]


def _fault(file: Path) -> str | None:
    """What is wrong with a safetensors file: eight bytes of length, a header in JSON, and as many bytes as that says."""
    size = file.stat().st_size
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if size < 8 + length:
            return f"its header should take {length} bytes, and the file has {size}"
        try:
            header = json.loads(stream.read(length))
            end = max(
                (
                    entry["data_offsets"][1]
                    for name, entry in header.items()
                    if name != "__metadata__"
                ),
                default=0,
            )
        except (ValueError, KeyError, TypeError, AttributeError):
            return "its header is not that of a safetensors file"
    return None if size == 8 + length + end else f"{size} bytes long instead of {8 + length + end}"
