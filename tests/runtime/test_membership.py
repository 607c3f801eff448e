"""Requests to change a pool's engines that Ray refuses."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rlctl.runs.engines import REQUESTS, PoolStatus, new_request
from rlctl.runtime.cluster import membership
from rlctl.runtime.cluster.membership import Membership


def test_a_request_that_ray_refuses_has_failed_and_reserves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Refuse the second of two placement groups."""
    made, removed, events = [], [], []

    def request_devices() -> str:
        if made:
            raise ValueError("no such resource")
        made.append("first")
        return "first"

    monkeypatch.setattr(membership, "remove_placement_group", removed.append)
    monkeypatch.setattr(Membership, "_serve", lambda _: None)  # the test calls `advance`
    pool: Any = SimpleNamespace(
        joined=[],
        engines=[],
        spec=SimpleNamespace(start_timeout_s=60.0),
        request_devices=request_devices,
    )
    spec: Any = SimpleNamespace()
    members = Membership(pool, spec, tmp_path, lambda kind, **_: events.append(kind))
    (tmp_path / REQUESTS).mkdir()
    request = new_request("add", 2)
    (tmp_path / REQUESTS / "1.json").write_text(json.dumps(asdict(request)))
    members.advance()
    status = PoolStatus.read(tmp_path)
    assert status is not None
    (told,) = status.requests
    assert (told.progress, removed) == ("failed", ["first"])
    assert told.message == "Ray did not accept the request: no such resource"
    assert events == ["engine_request", "engine_request_failed"]
