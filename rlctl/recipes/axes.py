"""Axes of a sweep: overrides with several values, in Hydra's sweep grammar.

The grammar has `a=1,2`, `choice`, `range`, `interval` and `glob`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Glob, IntervalSweep, Override, RangeSweep, Sweep
from hydra.errors import HydraException

from rlctl.errors import ConfigError, Problem, raise_problems
from rlctl.recipes.dialects import present_name
from rlctl.recipes.search_path import find_recipe, search_folders
from rlctl.recipes.yaml_sources import read
from rlctl.suggest import written


@dataclass(frozen=True)
class Interval:
    """Numbers from `low` to `high`, both included; `log` = uniform in the logarithm."""

    low: float
    high: float
    log: bool
    step: float | None = None

    @property
    def whole(self) -> bool:
        """True if the interval has whole numbers only."""
        return all(isinstance(number, int) for number in (self.low, self.high, self.step or 1))


@dataclass(frozen=True)
class Axis:
    """One key and the values to try: `values` as overrides write them, or an `interval`.

    An evenly spaced `range` has both: a grid uses the values, an ordered sampler the interval.
    """

    key: str
    text: str  # as typed
    values: tuple[str, ...] = ()
    interval: Interval | None = None

    @property
    def bounds(self) -> tuple[str, str]:
        """Ends of the interval, as overrides write them."""
        assert self.interval is not None, "an axis has values or an interval"
        return str(self.interval.low), str(self.interval.high)

    @property
    def first(self) -> str:
        """First value, or the lower end of the interval."""
        return (self.values or self.bounds)[0]


def split_axes(overrides: Sequence[str], recipe: str | Path) -> tuple[list[str], list[Axis]]:
    """Split overrides into those with one value and axes.

    Overrides that cannot be parsed are returned with the first; `compose` reports them. Raises
    ConfigError with all invalid axes.
    """
    fixed: list[str] = []
    axes: list[Axis] = []
    problems: list[Problem] = []
    parser = OverridesParser.create()
    for text in overrides:
        try:
            override = parser.parse_overrides([text])[0]
        except HydraException:
            fixed.append(text)
            continue
        if not override.is_sweep_override():
            fixed.append(text)
            continue
        try:
            axes.append(_axis(override, text, recipe))
        except ConfigError as error:
            problems += error.problems
    raise_problems(problems)
    return fixed, axes


def check_repeated(overrides: Sequence[str]) -> None:
    """Raise ConfigError if a value after an axis sets the same key, or a part of it.

    A value before an axis is replaced by it, as in a command without a sweep.
    """
    parser = OverridesParser.create()
    given: list[tuple[str, str, bool]] = []
    problems: list[Problem] = []
    for text in overrides:
        try:
            override = parser.parse_overrides([text])[0]
        except HydraException:
            continue
        key = _present_name(override)
        is_axis = override.is_sweep_override()
        axes = [before for before, name, is_one in given if is_one and _overlap(name, key)]
        kind = "one value"
        if is_axis:
            kind = "another axis"
        problems += [
            Problem(
                f"{axis} is an axis, and {text} gives the same key {kind}",
                f"override {text}",
                f"leave one out, or list all values once: {key}=A,B,C",
            )
            for axis in axes
        ]
        given.append((text, key, is_axis))
    raise_problems(problems)


def check_fixed(fixed: Sequence[str], axes: Sequence[Axis]) -> None:
    """Raise ConfigError if the command line gives one value to an axis of `sweep.params`."""
    parser = OverridesParser.create()
    problems: list[Problem] = []
    for text in fixed:
        try:
            key = _present_name(parser.parse_overrides([text])[0])
        except HydraException:
            continue
        problems += [
            Problem(
                f"sweep.params searches {axis.text}, and {text} gives the same key one value",
                f"override {text}",
                f"leave it out; {key}=A,B on the command line replaces the recipe's axis",
            )
            for axis in axes
            if _overlap(axis.key, key)
        ]
    raise_problems(problems)


def _present_name(override: Override) -> str:
    """Return the key of an override, without `+` or `~`, under rlctl's name."""
    name = override.key_or_group
    if override.package:
        name += f"@{override.package}"
    return present_name(name)


def _overlap(key: str, other: str) -> bool:
    return key == other or key.startswith(f"{other}.") or other.startswith(f"{key}.")


def with_first_values(fixed: Sequence[str], axes: Sequence[Axis]) -> list[str]:
    """Return the overrides of a first trial, in which every required key is set."""
    return [*fixed, *(f"{axis.key}={axis.first}" for axis in axes)]


def axes_of(params: Mapping[str, Any], recipe: str | Path) -> list[Axis]:
    """Return the axes of a recipe's section `sweep.params`: key -> sweep grammar or list.

    Raises ConfigError if a key has only one value or cannot be parsed.
    """
    texts: list[str] = []
    for key, value in params.items():
        text = value
        if isinstance(value, list):
            text = ",".join(map(_written, value))
        texts.append(f"{key}={text}")
    fixed, axes = split_axes(texts, recipe)
    hint = (
        "give two or more values: [1e-6, 1e-5], 'choice(a,b)', 'range(1,4)', 'interval(0,1)', "
        "'tag(log,interval(1e-7,1e-5))', 'glob(*)'"
    )
    raise_problems([Problem(f"{text} is not an axis", "sweep.params", hint) for text in fixed])
    return axes


def _axis(override: Override, text: str, recipe: str | Path) -> Axis:
    key = override.get_key_element()
    value = override.value()
    where = f"override {text}"
    if isinstance(value, IntervalSweep):
        low = value.start
        high = value.end
        if low is None or high is None or not low < high:
            raise ConfigError(
                "an interval goes from a smaller to a larger number",
                where=where,
                hint=f"{key}='interval(0,1)'",
            )
        log = "log" in value.tags
        if log and low <= 0:
            raise ConfigError(
                f"a logarithmic interval cannot begin at {low}",
                where=where,
                hint=f"{key}='tag(log,interval(1e-7,1e-5))'",
            )
        return Axis(key, text, interval=Interval(low, high, log))
    if isinstance(value, Sweep) and getattr(value, "shuffle", False):
        raise ConfigError(
            "shuffle has no seed",
            where=where,
            hint="leave it out; --sampler random draws in a random order that has one",
        )
    if isinstance(value, Glob):
        values = tuple(value.filter(_parts(override.key_or_group, recipe)))
    else:
        values = tuple(dict.fromkeys(override.sweep_string_iterator()))
    if len(values) == 0:
        hint = f"the parts of {override.key_or_group}/: `rlctl recipes ls`"
        if isinstance(value, RangeSweep):
            hint = (
                f"a range goes up to a larger number, which is not part of it: {key}='range(1,5)'"
            )
        raise ConfigError("this axis has no values", where=where, hint=hint)
    interval = None
    if isinstance(value, RangeSweep):
        interval = _interval(value)
    return Axis(key, text, values, interval)


def _interval(value: RangeSweep) -> Interval | None:
    """Return an ascending range as an interval, or None. The end of a range is exclusive."""
    start = value.start
    stop = value.stop
    step = value.step
    if start is None or stop is None or step <= 0 or stop <= start:
        return None
    last = start
    while last + step < stop:
        last += step
    if last == start:
        return None
    return Interval(start, last, False, step)


def _parts(group: str, recipe: str | Path) -> list[str]:
    folders = search_folders(read(find_recipe(recipe)), [])
    return sorted({entry.stem for folder in folders for entry in (folder / group).glob("*.yaml")})


def _written(value: Any) -> str:
    """Return a value of a YAML list as an override writes it."""
    if isinstance(value, dict):
        inner = (f"{name}:{_written(element)}" for name, element in value.items())
        return f"{{{','.join(inner)}}}"
    if isinstance(value, list):
        return f"[{','.join(map(_written, value))}]"
    return written(value)
