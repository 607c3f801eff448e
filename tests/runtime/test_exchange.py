"""Versions of the weights that wrote the tokens of a response."""

from __future__ import annotations

import pytest
import torch

from rlctl.runtime.budget import OomRetry
from rlctl.runtime.rollout.exchange import WeightVersions, exchange
from rlctl.runtime.rollout.hf import HFEngine
from rlctl.runtime.rollout.requests import Completion, Decoding, Request, Slice
from rlctl.runtime.rollout.running import RunningRows
from tests.models import tiny_model


def spans(
    versions: WeightVersions, key: int, num_tokens: int, index: int = 0
) -> tuple[tuple[int, int], ...]:
    """Finish a response; return the versions of its tokens."""
    ids = torch.zeros(num_tokens, dtype=torch.int64)
    completion = Completion(key, index, ids, torch.zeros(num_tokens), "stop")
    return versions.stamped([completion])[0].spans


def test_a_response_may_end_with_the_last_token_before_a_load() -> None:
    versions = WeightVersions()
    versions.switch(1, {(0, 0): 4})
    assert spans(versions, 0, 4) == ((0, 4),)


def test_responses_that_finish_before_memory_runs_out_are_complete(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first of three responses ends with the step whose next pass runs out of memory."""
    num_steps = 2

    def run(out_of_memory: bool) -> list[Completion]:
        versions, advance = WeightVersions(), RunningRows.advance

        def restart(retry: OomRetry) -> None:
            assert retry == OomRetry("actor_rollout_ref.rollout.max_num_seqs", 2, 1, "rows")
            versions.restart()

        engine = HFEngine(tiny_model(), None, on_oom=restart)
        limits = (num_steps + 1, 6, 6)
        request = Request(5, torch.arange(4), Decoding(1.0, 1.0, -1, ()), limits, (1, 2, 3))
        exchange(engine, [request], Slice(num_steps), (), versions)
        versions.switch(7, engine.progress())

        def fail_once(rows: RunningRows) -> None:
            monkeypatch.setattr(RunningRows, "advance", advance)
            raise torch.OutOfMemoryError("out of memory")

        if out_of_memory:
            monkeypatch.setattr(RunningRows, "advance", fail_once)
        done = exchange(engine, [], Slice(None), (), versions)
        return sorted(done, key=lambda each: each.index)

    plain, retried = run(False), run(True)
    assert [(each.key, each.index) for each in retried] == [(5, 0), (5, 1), (5, 2)]
    for before, after in zip(plain, retried, strict=True):
        assert torch.equal(before.response_ids, after.response_ids)
    assert retried[0].spans == plain[0].spans
    assert retried[1].spans == ((7, 6),), "it was restarted with the new weights"
