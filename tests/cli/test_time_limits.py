"""`--max-time` and `--save-by`: valid and invalid times."""

from __future__ import annotations

import time
from datetime import datetime, timedelta, tzinfo
from pathlib import Path

import pytest
import typer

from rlctl.__main__ import main
from rlctl.cli import time_limits
from rlctl.cli.time_limits import Limits
from rlctl.errors import UsageError
from rlctl.runs.run_dir import RunDir


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("45s", 45),
        ("90m", 5400),
        ("3h50m", 13800),
        ("2d", 172800),
        ("3:50:00", 13800),
        ("1-12:00:00", 129600),
    ],
)
def test_valid_durations(text: str, seconds: int) -> None:
    assert Limits(text, None, 0).end_by() == pytest.approx(time.monotonic() + seconds, abs=5)


@pytest.mark.parametrize(("day", "until"), [("2026-03-28", 9.0), ("2026-10-24", 11.0)])
def test_a_time_of_day_after_a_change_of_the_clocks_is_that_of_its_day(
    day: str, until: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Evening(datetime):
        @classmethod
        def now(cls, tz: tzinfo | None = None) -> Evening:  # noqa: ARG003
            return cls.fromisoformat(f"{day}T20:00")

    monkeypatch.setenv("TZ", "Europe/Berlin")
    time.tzset()
    monkeypatch.setattr(time_limits, "datetime", Evening)
    try:
        left = time_limits._moment("06:00") - Evening.now().astimezone()
        words = Limits(None, "06:00", 2).words
        assert words == ["--save-by", time_limits._moment("06:00").isoformat(), "--retries", "2"]
        assert words[1].endswith(("+02:00", "+01:00"))  # the same moment in another time zone
    finally:
        monkeypatch.undo()
        time.tzset()
    assert left.total_seconds() == until * 3600


@pytest.mark.parametrize("text", ["", "90", "0s", "3h50", "m", "-5m", "1:5:00"])
def test_invalid_durations(text: str) -> None:
    if not text:
        assert Limits(text, None, 0).end_by() is None
        return
    with pytest.raises(UsageError, match="not a duration"):
        Limits(text, None, 0).end_by()


def test_a_time_of_day_is_its_next_occurrence_and_a_date_is_that_date() -> None:
    now = datetime.now().astimezone().replace(microsecond=0)
    later, earlier = now + timedelta(minutes=2), now - timedelta(minutes=2)

    def left(until: datetime) -> float:
        return (until - datetime.now().astimezone()).total_seconds()

    for text, until, within in (
        (f"{later:%H:%M:%S}", later, 5),
        (f"{earlier:%H:%M:%S}", earlier + timedelta(days=1), 3605),
        (later.isoformat(), later, 5),
    ):
        end = Limits(None, text, 0).end_by()
        assert end == pytest.approx(time.monotonic() + left(until), abs=within)
    both = Limits("1h", later.isoformat(), 0).end_by()
    assert both == pytest.approx(time.monotonic() + left(later), abs=5)  # the earlier of both


@pytest.mark.parametrize(
    ("text", "message"),
    [("25:00", "not a valid"), ("tomorrow", "not a valid"), ("2001-01-01T00:00", "in the past")],
)
def test_invalid_and_past_times(text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Limits(None, text, 0).end_by()


def test_secrets_are_given_again_to_each_retry(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    calls: list[list[str]] = []

    def supervise(words: list[str], again: list[str], *_: object) -> int:
        calls.extend([words, again])
        return 0

    monkeypatch.setattr("rlctl.runs.stop.supervise", supervise)
    overrides = ["+x.api_key=planted", "trainer.seed=2"]
    with pytest.raises(typer.Exit):
        Limits(None, None, 1).supervise(["train", *overrides], tmp_path, False, overrides)
    assert calls == [["train", *overrides], ["resume", str(tmp_path), "+x.api_key=planted"]]


def test_a_run_resumes_with_retries_from_within_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders: list[Path] = []

    def supervise(_: Limits, words: list[str], folder: Path, *_rest: object) -> None:
        assert words[:2] == ["resume", "."]
        folders.append(folder)
        raise typer.Exit(0)

    run = RunDir.create(tmp_path, "p", "r", "ppo").path
    monkeypatch.chdir(run)
    monkeypatch.setattr(Limits, "supervise", supervise)
    main(["resume", ".", "--retries", "1"])
    main(["resume", ".", "--retries", "1", "--fork", "other"])
    assert folders == [run, run.with_name("other")]
