"""Metrics and samples of a batch of episodes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rlctl.data_prep.rows import PromptRow
from rlctl.quickstart import real_path
from rlctl.runtime.agents.metrics import agent_metrics
from rlctl.runtime.data.tokenizer import load_tokenizer
from rlctl.runtime.training.validation import to_samples
from rlctl.tracking.episodes import Episode, Message, Use
from tests.numerics.batches import scored_batch

TURN, REPLY = Message("assistant", "", True), Message("tool", "", False)
USES = (
    Use("search", 1.0),
    Use("search", 3.0, "timeout"),
    Use("search", 2.0, "raised"),
    Use("an invented name", 0.0, "unknown"),
    Use("", 0.0, "malformed"),
    Use("search", 0.0, "too_many"),
)


def test_metrics() -> None:
    episodes = [
        Episode("done", (TURN, REPLY, TURN), USES),
        Episode("done", (TURN,)),
        Episode("length", (TURN,)),
        Episode("timeout", (), error="late"),
    ]
    assert agent_metrics(scored_batch()) == {}
    assert agent_metrics(replace(scored_batch(), episodes=episodes)) == {
        "agent/turns/mean": 1.0,
        "agent/turns/max": 2.0,
        "agent/turns/min": 0.0,
        "agent/outcome/done": 0.5,
        "agent/outcome/length": 0.25,
        "agent/outcome/timeout": 0.25,
        "agent/num_failed": 1.0,
        "agent/tool_tokens_share": pytest.approx(0.0),
        "agent/retokenized_tokens": 0.0,
        "agent/refused_calls/unknown": 1.0,
        "agent/refused_calls/malformed": 1.0,
        "agent/refused_calls/too_many": 1.0,
        "tool/search/calls": 3.0,
        "tool/search/errors": 2.0,
        "tool/search/timeouts": 1.0,
        "tool/search/seconds": 2.0,
    }


def test_samples_have_their_episodes() -> None:
    episodes = [Episode(name) for name in "abcd"]
    scored = replace(scored_batch(), rows=[PromptRow("x", [], "t")] * 4)
    tokenizer = load_tokenizer(real_path("quickstart"))
    assert [each.episode for each in to_samples(scored, tokenizer)] == [None] * 4
    found = to_samples(replace(scored, episodes=episodes), tokenizer)
    assert [each.episode for each in found] == episodes
