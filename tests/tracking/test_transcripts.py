"""Episodes as text, in samples files and in what trackers get; metrics of their batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from rlctl.data_prep.rows import PromptRow
from rlctl.episodes import Episode, Message, Use, transcript
from rlctl.errors import ConfigError
from rlctl.quickstart import real_path
from rlctl.runtime.data.tokenizer import load_tokenizer
from rlctl.runtime.training.collector import agent_metrics
from rlctl.runtime.training.validation import to_samples
from rlctl.tracking.delivery import TrackerTimeouts
from rlctl.tracking.fanout import Trackers
from rlctl.tracking.jsonl import read_generations, write_samples
from rlctl.tracking.tracker import RunInfo, Sample
from tests.numerics.batches import scored_batch

EPISODE = Episode(
    "timeout",
    (
        Message("assistant", "12 * 12?\n", True, 7, 0.25, 0.5),
        Message("tool", "144", False, seconds=0.125, name="calculator"),
        Message("assistant", "#### 144", True, 5, 0.5),
    ),
    (Use("calculator", 0.125), Use("calculator", 3.0, "timeout"), Use("", 0.0, "malformed")),
    1.5,
    0.5,
    {"acc": 1.0},
    "the episode took longer than 1 s",
)
SAMPLE = Sample("p", "r", "t", 0.5, {"acc": 1.0}, 12, "stop", "x")


class Tracker:
    """Keeps the samples it gets."""

    samples: Sequence[Sample]

    def start(self, run: RunInfo) -> None:
        pass

    def log(self, step: int, metrics: object) -> None:
        pass

    def generations(self, step: int, samples: Sequence[Sample]) -> None:
        self.samples = samples

    def finish(self, state: str) -> None:
        pass


def test_transcript() -> None:
    assert transcript(EPISODE) == (
        "[assistant: trained, 7 tokens, reward 0.5, 0.25 s]\n12 * 12?\n\n"
        "[tool calculator: 0.125 s]\n144\n\n"
        "[assistant: trained, 5 tokens, 0.5 s]\n#### 144\n\n"
        "[timeout, 2 turns, calculator 2× (1 timeout), call 1× (1 malformed), 1.5 s]\n"
        "the episode took longer than 1 s"
    )


def test_samples_keep_episodes(tmp_path: Path) -> None:
    path = tmp_path / "generations" / "step_000001.jsonl"
    samples = [SAMPLE, replace(SAMPLE, episode=EPISODE)]
    write_samples(path, samples)
    assert read_generations(path) == samples
    broken = replace(
        EPISODE, score=float("nan"), messages=(Message("user", "", False, 0, 0, -1e999),)
    )
    write_samples(path, [replace(SAMPLE, episode=broken)])
    [found] = read_generations(path)
    assert found.episode is not None
    assert (found.episode.score, found.episode.messages[0].reward) == (None, None)


def test_samples_of_earlier_versions_are_read(tmp_path: Path) -> None:
    path = tmp_path / "step_000001.jsonl"
    old = (
        '"prompt": "p", "response": "r", "ground_truth": "t", "score": 0.5, '
        '"components": {"acc": 1.0}, "length": 12, "finish": "stop", "data_source": "x"'
    )
    path.write_text(f"{{{old}}}\n")
    assert read_generations(path) == [SAMPLE]
    path.write_text(f'{{{old}, "episode": {{"outcome": "done", "mood": 1}}}}\n')
    with pytest.raises(ConfigError, match=r"a line is not a sample: .*mood"):
        read_generations(path)


def test_trackers_get_transcripts_as_responses() -> None:
    tracker = Tracker()
    timeouts = TrackerTimeouts(10, 300, 300, 300)
    trackers = Trackers({"keeper": tracker}, lambda *_, **__: None, timeouts)
    trackers.start(RunInfo("id", "project", "name", Path(), 1, {}, num_samples=2))
    trackers.generations(1, [SAMPLE, replace(SAMPLE, episode=EPISODE)])
    trackers.finish("finished")
    assert [each.response for each in tracker.samples] == ["r", transcript(EPISODE)]


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
