"""Contents that several trackers show alike: flat configuration, order of charts, sample tables."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from rlctl.files import read_record
from rlctl.tracking.tracker import RunInfo, Sample

# Names of the metrics that a user looks at first; other metrics follow.
IMPORTANT = (
    "val-core/*",
    "critic/score/mean",
    "critic/rewards/mean",
    "train/loss",
    "response_length/mean",
    "actor/kl_loss",
    "actor/reward_kl_penalty",
    "actor/ppo_kl",
    "actor/entropy",
    "actor/pg_loss",
    "actor/grad_norm",
    "actor/lr",
    "critic/vf_loss",
    "training/rollout_probs_diff_mean",
    "perf/throughput",
)
_HIGHER_IS_BETTER = ("val-core/*", "critic/score/mean", "critic/rewards/mean")
_LOWER_IS_BETTER = ("train/loss", "val/loss")
_BEFORE = ("step", "prompt", "response", "ground_truth", "pred", "score", "right")
_AFTER = ("length", "finish", "data_source")


def important_first(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return the metrics with `IMPORTANT` first: trackers make charts in the order of the log."""

    def rank(name: str) -> int:
        return next((i for i, pattern in enumerate(IMPORTANT) if fnmatchcase(name, pattern)), 99)

    return {name: metrics[name] for name in sorted(metrics, key=rank)}


def best_of(metric: str) -> str | None:
    """Return `max` or `min` if the best value of a metric is known to be that, else None."""
    if any(fnmatchcase(metric, pattern) for pattern in _HIGHER_IS_BETTER):
        return "max"
    if metric in _LOWER_IS_BETTER:
        return "min"
    return None


def flat_config(run: RunInfo) -> dict[str, Any]:
    """Return the configuration by dotted key; keys that differ from the base config come first.

    Lists and empty sections that a table would not show are JSON texts.
    """
    values = leaves(run.config)
    first = [key for key in changed_keys(run) if key in values]
    return {key: _cell(values[key]) for key in dict.fromkeys([*first, *values])}


def leaves(section: Mapping[str, Any], path: str = "") -> dict[str, Any]:
    """Return nested values by dotted key."""
    found: dict[str, Any] = {}
    for key, value in section.items():
        if isinstance(value, Mapping) and value:
            found |= leaves(value, f"{path}{key}.")
        else:
            found[f"{path}{key}"] = value
    return found


def changed_keys(run: RunInfo) -> list[str]:
    """Return the keys that a recipe or the command line changed, the latter first."""
    try:
        chains = json.loads(read_record(run.folder / "origins.json"))
        level = {key: chain[-1]["level"] for key, chain in chains.items() if _differs(chain)}
    except (OSError, ValueError, TypeError, LookupError, AttributeError):
        return []  # the run's record warns of a damaged file
    return sorted(level, key=lambda key: -level[key])


def _differs(chain: Sequence[Mapping[str, Any]]) -> bool:
    first = chain[0]
    last = chain[-1]
    return last["level"] > 1 and (first["level"] > 1 or last["value"] != first["value"])


def _cell(value: Any) -> Any:
    is_nested = isinstance(value, Mapping) or (
        isinstance(value, Sequence) and any(isinstance(item, Mapping) for item in value)
    )
    if is_nested:
        return json.dumps(value, default=str, ensure_ascii=False)
    return value


def job_type(run: RunInfo) -> str:
    """Return `trial` for a run of a sweep, else `train`."""
    if run.sweep:
        return "trial"
    return "train"


def link(run: RunInfo) -> str:
    """Return the command that shows the run's record."""
    return f"rlctl show {run.project}/{run.name}"


def notes(run: RunInfo) -> str:
    """Return the description of the run and `link`."""
    return "\n\n".join(filter(None, [run.description, f"Record: `{link(run)}`"]))


@dataclass(frozen=True)
class SampleTable:
    """Columns of a table of samples; each name in `components` has one.

    Components without a column are in `others`, as JSON, if `has_others`.
    """

    components: tuple[str, ...]
    has_others: bool = False

    @classmethod
    def of(cls, samples: Sequence[Sample], *, has_others: bool = False) -> SampleTable:
        """Return a table with all components of the samples."""
        names = dict.fromkeys(name for sample in samples for name in sample.components)
        return cls(tuple(names), has_others)

    @property
    def columns(self) -> list[str]:
        """Names of the columns."""
        taken = {*_BEFORE, *_AFTER, "others"}
        parts = list(self.components)
        for index, name in enumerate(parts):
            if name in taken:
                parts[index] = f"{name} (component)"
        if self.has_others:
            parts.append("others")
        return [*_BEFORE, *parts, *_AFTER]

    def row(self, step: int, sample: Sample) -> list[Any]:
        """Return the cells of a sample."""
        before = [
            step,
            sample.prompt,
            sample.response,
            str(sample.ground_truth),
            sample.pred,
            sample.score,
            sample.right,
        ]
        parts: list[Any] = [sample.components.get(name) for name in self.components]
        if self.has_others:
            names = [name for name in sample.components if name not in self.components]
            others = {name: sample.components[name] for name in names}
            text = None
            if others:
                text = json.dumps(others)
            parts.append(text)
        return [*before, *parts, sample.length, sample.finish, sample.data_source]

    def rows(self, step: int, samples: Sequence[Sample]) -> list[list[Any]]:
        """Return the cells of all samples."""
        return [self.row(step, sample) for sample in samples]
