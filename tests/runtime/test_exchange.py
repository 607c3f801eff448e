"""Versions of the weights that wrote the tokens of a response."""

from __future__ import annotations

import torch

from rlctl.runtime.rollout.exchange import WeightVersions
from rlctl.runtime.rollout.requests import Completion


def spans(
    versions: WeightVersions, key: int, num_tokens: int, index: int = 0
) -> tuple[tuple[int, int], ...]:
    """Finish a response; return the versions of its tokens."""
    ids = torch.zeros(num_tokens, dtype=torch.int64)
    completion = Completion(key, index, ids, torch.zeros(num_tokens), "stop")
    return versions.stamp(completion).spans


def test_tokens_have_the_version_that_was_loaded_when_they_were_written() -> None:
    versions = WeightVersions()
    versions.switch(3, {})
    assert spans(versions, 0, 5) == ((3, 5),)
    versions.switch(4, {(1, 0): 2, (1, 1): 6, (2, 0): 0})
    versions.switch(7, {(1, 0): 9, (1, 1): 6, (2, 0): 1})
    assert spans(versions, 1, 11) == ((3, 2), (4, 7), (7, 2))
    assert spans(versions, 1, 8, index=1) == ((3, 6), (7, 2))
    assert spans(versions, 2, 3) == ((4, 1), (7, 2))
    assert spans(versions, 3, 4) == ((7, 4),), "it began after the last load"


def test_a_response_may_end_with_the_last_token_before_a_load() -> None:
    versions = WeightVersions()
    versions.switch(1, {(0, 0): 4})
    assert spans(versions, 0, 4) == ((0, 4),)


def test_restarted_responses_have_the_version_of_the_restart() -> None:
    versions = WeightVersions()
    versions.switch(1, {(0, 0): 2, (0, 1): 3})
    assert spans(versions, 0, 5, index=1) == ((0, 3), (1, 2))
    versions.restart()
    versions.switch(2, {(0, 0): 1})
    assert spans(versions, 0, 5) == ((1, 1), (2, 4))


def test_cancelled_requests_are_forgotten() -> None:
    versions = WeightVersions()
    versions.switch(1, {(0, 0): 2, (0, 1): 3, (1, 0): 4})
    versions.forget([0, 9])
    assert spans(versions, 1, 5) == ((0, 4), (1, 1))
    assert not versions._spans
