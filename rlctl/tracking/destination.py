"""Destination of a tracker's data, and the lines that tell people where to look for it."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from rlctl.redaction import redact
from rlctl.tracking.tracker import Event, Tracker

log = logging.getLogger(__name__)

STARTED = "tracker_started"  # kind of event, with the fields of a `Destination`
_OFF = ("tracker_off", "tracker_missed")


@dataclass(frozen=True)
class Destination:
    """Mode of a tracker, the reason for it, and the URL or folder with its data.

    `look` is a command that shows the data, `send` one that sends offline files later. `choices`
    are commands that select other modes, for a user who has not chosen one.
    """

    mode: str
    reason: str = ""
    place: str = ""
    look: str = ""
    send: str = ""
    choices: tuple[str, ...] = ()

    def as_event(self) -> dict[str, Any]:
        """Return the fields of an event, without secrets and choices."""
        fields = asdict(self)
        del fields["choices"]
        return {name: redact(text) for name, text in fields.items()}


@runtime_checkable
class Locates(Protocol):
    """Tracker that says where its data are, once it has started."""

    def destination(self) -> Destination:
        """Return mode, reason, place and commands; called from the run's thread."""
        ...


def no_key(name: str, local: str | None = None) -> str:
    """Return the reason of offline mode without a key, and the choices of the user.

    `local` says how runs of the mode `local` are shown, if there is such a mode.
    """
    variable = f"{name.upper()}_MODE"
    choices = [f"`{name} login`"]
    if local:
        choices.append(f"{variable}=local ({local})")
    return f"no key; {', '.join(choices)}, or {variable}=offline (`{name} sync` sends files later)"


def choices(name: str, reason: str, modes: Iterable[str]) -> tuple[str, ...]:
    """Return the commands that give a tracker without a key another mode."""
    if not reason.startswith("no key"):
        return ()
    return (f"{name} login", *(f"export {name.upper()}_MODE={mode}" for mode in modes))


def line(destination: Mapping[str, Any]) -> str:
    """Return `MODE (REASON): PLACE` of an event; folders are relative to the current one."""
    reason = str(destination.get("reason", "")).partition(";")[0]
    place = destination.get("place")
    text = str(destination.get("mode"))
    if reason:
        text += f" ({reason})"
    if place:
        text += f": {place}"
    return relative(text)


def commands(destination: Mapping[str, Any]) -> list[str]:
    """Return the commands of an event: to look at the data, and to send them."""
    given = [destination.get("look"), destination.get("send")]
    return [relative(str(command)) for command in given if command]


def commands_of(trackers: Mapping[str, Mapping[str, Any]], run: str) -> list[str]:
    """Return the commands that show what trackers received, send it, or send what they missed."""
    found: list[str] = []
    for name, place in trackers.items():
        found += commands(place)
        if place["off"] is not None:
            found.append(f"rlctl runs sync {run} --logger {name}")
    return found


def announce(trackers: Mapping[str, Tracker], record: Event) -> None:
    """Record and log where the data of trackers go that know it, and on a terminal the choices.

    Nothing is ever asked: a job would wait for the answer.
    """
    for name, tracker in trackers.items():
        if not isinstance(tracker, Locates):
            continue
        try:
            found = tracker.destination()
        except Exception as error:  # a line that is missing must not stop the run
            log.warning("no destination of logger %s: %s", name, error)
            continue
        event = found.as_event()
        record(STARTED, tracker=name, **event)
        log.info("%s", "; ".join([f"{name}: {line(event)}", *commands(event)]))
        if sys.stderr.isatty():
            for choice in found.choices:
                log.info("  for the next run: %s", choice)


def destinations(events: Iterable[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return the latest destination of every tracker; `off` is the reason if it was disabled."""
    found: dict[str, dict[str, Any]] = {}
    for event in events:
        name = str(event.get("tracker"))
        if event.get("kind") == STARTED:
            found[name] = {
                key: value for key, value in event.items() if key not in ("kind", "time", "tracker")
            } | {"off": None}
        elif event.get("kind") in _OFF and name in found:
            found[name]["off"] = event.get("why")
    return found


def relative(text: str) -> str:
    """Shorten paths below the current folder."""
    try:
        return text.replace(f"{os.getcwd()}/", "")
    except OSError:  # the folder no longer exists
        return text


def folder(path: Path | str) -> str:
    """Return the place of a folder or file."""
    return str(Path(path).absolute())
