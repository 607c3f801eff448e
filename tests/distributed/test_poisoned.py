"""Checkpoints of a stranger: their files are read, never run, whatever their manifest says."""

from __future__ import annotations

import io
import os
import pickle
import shutil
from pathlib import Path, PurePosixPath
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING

from rlctl.errors import ConfigError
from rlctl.runtime.model.sharding import trained_state
from rlctl.runtime.workers.background import begin_writing
from rlctl.runtime.workers.safe_load import load_into, read_metadata
from tests.distributed.ranks import rank_info
from tests.workers import actor, save, update

OF_OPTIMIZER = ("object", "optimizer metadata")


class Bomb:
    """Object that creates a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


@pytest.fixture(scope="module")
def saved(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved") / "actor"
    worker = actor(rank_info(), str(model))
    update(worker)
    begin_writing(folder.parent)
    save(worker, folder)
    return folder


def poison_metadata(folder: Path, bomb: Bomb) -> None:
    found = read_metadata(folder)
    found.planner_data = bomb
    (folder / ".metadata").write_bytes(pickle.dumps(found))


def poison_entry(folder: Path, bomb: Bomb, name: str) -> None:
    """Replace the bytes of the entry `name` by a pickle of `bomb`, at the end of its file."""
    found = read_metadata(folder)
    index, info = next((key, each) for key, each in found.storage_data.items() if key.fqn == name)
    written = io.BytesIO()
    torch.save(bomb, written)
    file = folder / info.relative_path
    info.offset, info.length = file.stat().st_size, len(written.getvalue())
    with file.open("ab") as end:
        end.write(written.getvalue())
    found.storage_data[index] = info
    (folder / ".metadata").write_bytes(pickle.dumps(found))


def first_entry(folder: Path, prefix: str) -> str:
    return next(name for name in read_metadata(folder).state_dict_metadata if prefix in name)


def poison(kind: str, folder: Path, bomb: Bomb) -> None:
    """Put `bomb` into the DCP files in `folder`: metadata, a tensor or another object."""
    if kind in OF_OPTIMIZER:
        folder /= "optimizer"
    if kind.endswith("metadata"):
        poison_metadata(folder, bomb)
    else:
        prefix = {"tensor": "model.", "object": "optimizer.param_groups"}[kind]
        poison_entry(folder, bomb, first_entry(folder, prefix))


class Attribute:
    """Object that is pickled as an attribute of another, as Python 3.11.2 pickles members."""

    def __init__(self, owner: object, name: str) -> None:
        self.owner, self.name = owner, name

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (self.owner, self.name)


def test_only_members_of_enumerations_are_read_as_attributes(saved: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(saved, tmp_path / "copy")
    found = read_metadata(folder)
    found.planner_data = Attribute(_MEM_FORMAT_ENCODING, "TORCH_PRESERVE_FORMAT")
    (folder / ".metadata").write_bytes(pickle.dumps(found))
    member = read_metadata(folder).planner_data
    assert member is _MEM_FORMAT_ENCODING.TORCH_PRESERVE_FORMAT
    found.planner_data = Attribute(torch.Size, "count")
    (folder / ".metadata").write_bytes(pickle.dumps(found))
    with pytest.raises(ConfigError, match=r"refers to builtins\.getattr"):
        read_metadata(folder)


with_kind = pytest.mark.parametrize("kind", ["metadata", "tensor", *OF_OPTIMIZER])


@with_kind
def test_a_poisoned_checkpoint_is_refused_and_runs_nothing(
    kind: str, saved: Path, model: Path, tmp_path: Path
) -> None:
    folder, marker = tmp_path / "actor", tmp_path / "marker"
    shutil.copytree(saved, folder)
    poison(kind, folder, Bomb(marker))
    worker = actor(rank_info(), str(model))
    with pytest.raises(ConfigError) as raised:
        worker.load(folder)
    assert not marker.exists()
    (problem,) = raised.value.problems
    assert "damaged checkpoint" in problem.message
    assert "mkdir" in problem.message
    if kind not in OF_OPTIMIZER:  # as export reads it, which leaves out the optimizer
        with pytest.raises(ConfigError, match="damaged checkpoint"):
            load_into({"model": trained_state(worker.policy)}, folder, no_dist=True)
    assert not marker.exists()


@pytest.mark.parametrize("content", [b"", b"\x80\x04", b"not a pickle", pickle.dumps([1])])
def test_broken_metadata_is_one_error(content: bytes, saved: Path, tmp_path: Path) -> None:
    folder = tmp_path / "actor"
    shutil.copytree(saved, folder)
    (folder / ".metadata").write_bytes(content)
    with pytest.raises(ConfigError, match=r"damaged checkpoint: \.metadata cannot be read"):
        read_metadata(folder)


def test_metadata_has_no_path(saved: Path) -> None:
    written = (saved / ".metadata").read_bytes()
    assert b"pathlib" not in written
    assert str(saved).encode() not in written


@pytest.mark.parametrize("module", ["pathlib", "pathlib._local"])
def test_metadata_of_every_python_is_read(saved: Path, tmp_path: Path, module: str) -> None:
    """Earlier ones have the folder's path, whose class Python 3.13 pickles by another name."""
    folder = shutil.copytree(saved, tmp_path / "actor")
    found = read_metadata(folder)
    found.planner_data = "place"
    written = pickle.dumps(found, protocol=2)
    text = b"X\x05\x00\x00\x00place"
    assert written.count(text) == 1
    path = f"c{module}\nPosixPath\n".encode() + text + b"\x85R"  # a call with one argument
    (folder / ".metadata").write_bytes(written.replace(text, path))
    again = read_metadata(folder)
    assert again.planner_data == PurePosixPath("place")
    assert again.state_dict_metadata == found.state_dict_metadata


def test_a_signal_while_it_loads_is_no_damage(
    saved: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """DCP catches every exception, also Ctrl-C, and raises its own one."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("rlctl.runtime.workers.safe_load._Planner.load_bytes", interrupt)
    with pytest.raises(KeyboardInterrupt):
        actor(rank_info(), str(model)).load(saved)
