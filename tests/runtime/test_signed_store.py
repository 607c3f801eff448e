"""Stores and objects of process groups, with another process that writes to them."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist
from torch.distributed import distributed_c10d

from rlctl.runtime.base.rank_info import RankInfo
from rlctl.runtime.rollout.rendezvous import listen
from rlctl.runtime.rollout.shared_memory import SharedMemory
from rlctl.runtime.rollout.signed_store import Meeting, SignedStore, new_secret, open_store
from rlctl.runtime.rollout.weight_group import BrokenGroupError, GroupAddress, WeightGroup
from tests.distributed.ranks import on_ranks, rank_info

CPU = replace(rank_info(), timeout_s=60.0)
# Each is a key that a sender writes; the last one is that of its address for gloo.
KEYS = ["num-parts", "address-0", "opened-0", "0/0"]
# Writes a value to one key of each store.
INTRUDER = """
import sys
from datetime import timedelta
from torch.distributed import TCPStore
value, *places = sys.argv[1:]
for place in places:
    key, port = place.split("=")
    store = TCPStore("127.0.0.1", int(port), 4, False, timedelta(seconds=60), False)
    store.set(key, bytes.fromhex(value))
"""


class Evil:
    """Object whose pickle creates a file when it is read."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, (str(self.file),)


def test_a_value_of_another_process_ends_the_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is written before the sender comes."""
    monkeypatch.setattr(SharedMemory, "connect", lambda *_: False)  # gloo finds its peers in it
    stores = [open_store(listen("127.0.0.1", 4), 4, timedelta(seconds=60)) for _ in KEYS]
    groups = [GroupAddress("127.0.0.1", store.port, 1, new_secret()) for store in stores]
    for store, group in zip(stores, groups, strict=True):
        sender = SignedStore(store, group.secret)
        for name, value in {"num-parts": "1", "address-0": "", "opened-0": ""}.items():
            sender.set(name, value)
    places = [f"{key}={store.port}" for key, store in zip(KEYS, stores, strict=True)]
    value = pickle.dumps(Evil(tmp_path / "ran")).hex()
    subprocess.run([sys.executable, "-c", INTRUDER, value, *places], check=True)
    for key, group in zip(KEYS, groups, strict=True):
        assert group.secret not in repr(group)
        with pytest.raises(BrokenGroupError, match=f"'{key}' .* is of a process that is no memb"):
            WeightGroup(group, 0, CPU)
    assert not (tmp_path / "ran").exists()


def test_a_value_is_good_for_its_key_only() -> None:
    plain = open_store(listen("127.0.0.1", 4), 4, timedelta(seconds=60))
    store = SignedStore(plain, new_secret())
    store.set("rank-0", "value")
    assert store.get("rank-0") == b"value"
    assert store.has("rank-0")
    assert not store.has("rank-1")
    plain.set("rank-1", plain.get("rank-0").decode("latin-1"))
    for other, key in ((store, "rank-1"), (SignedStore(plain, new_secret()), "rank-0")):
        with pytest.raises(RuntimeError, match=f"'{key}' in the store of the group is of a proc"):
            other.get(key)


def _exchange(where: RankInfo, file: Path) -> str:
    """Exchange an object as usual, then let rank 1 send one without the secret."""
    objects = [f"from {where.rank}"]
    dist.broadcast_object_list(objects, 1)
    assert objects == ["from 1"]
    if where.rank == 1:
        distributed_c10d._pickler = pickle.Pickler
        dist.broadcast_object_list([Evil(file)], 1)
        return ""
    with pytest.raises(RuntimeError) as raised:
        dist.broadcast_object_list([None], 1)
    return str(raised.value)


def test_objects_of_other_processes_are_not_read(tmp_path: Path) -> None:
    error, _ = on_ranks(2, _exchange, tmp_path / "ran")
    assert error == "an object that the process group received is of a process that is no member"
    assert not (tmp_path / "ran").exists()


def test_processes_of_one_machine_meet_in_a_file_of_the_user() -> None:
    meeting = Meeting("127.0.0.1", 2)
    _, place, secret = meeting.address.split()
    assert len(bytes.fromhex(secret)) == 32
    if place.startswith("/proc/"):  # not a port, which others can connect to
        assert os.stat(place).st_mode & 0o777 == 0o600
    else:
        assert not Path("/proc/self/fd").exists()
    assert Meeting("0.0.0.0", 2).address.split()[1].isdecimal()
