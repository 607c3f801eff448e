"""Episodes as text, in samples files and in what trackers get."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from rlctl.errors import ConfigError
from rlctl.tracking.episodes import Episode, Message, Use
from rlctl.tracking.history import sample_call
from rlctl.tracking.jsonl import read_generations, write_samples
from rlctl.tracking.tracker import RunInfo, Sample
from rlctl.tracking.transcripts import transcript

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
    sample_call(1, [SAMPLE, replace(SAMPLE, episode=EPISODE)]).apply(tracker)
    assert [each.response for each in tracker.samples] == ["r", transcript(EPISODE)]
