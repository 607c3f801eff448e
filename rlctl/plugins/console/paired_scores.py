"""Scores of models on the same rows: figures of each with intervals, and paired tests of two."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from rlctl.errors import ConfigError
from rlctl.plugins.console.group_statistics import Sample as Statistics
from rlctl.runtime.training.repeated import draws, majority_mean, pass_at
from rlctl.tracking.tracker import Sample

_Z = 1.959964  # quantile of the normal distribution for 95 %


@dataclass(frozen=True)
class Scores:
    """Scores of a model: values of the prompts by data source and figure, and their truths."""

    name: str
    truths: Sequence[tuple[str, str]]
    values: dict[tuple[str, str], list[float]]

    @classmethod
    def of(cls, name: str, samples: Sequence[Sample], num: int) -> Scores:
        """Return the figures of `samples`, of which `num` adjacent ones belong to a prompt."""
        truths: list[tuple[str, str]] = []
        values: dict[tuple[str, str], list[float]] = defaultdict(list)
        drawn = draws(num, num)
        for start in range(0, len(samples), num):
            group = list(samples[start : start + num])
            source, scores = group[0].data_source, [float(sample.score) for sample in group]
            truths.append((source, repr(group[0].ground_truth)))
            row = torch.tensor([scores], dtype=torch.float64)
            values[source, f"mean@{num}"].append(math.fsum(scores) / num)
            if num > 1:
                values[source, f"maj@{num}"].append(majority_mean([group], row, drawn))
                if set(scores) <= {0.0, 1.0}:
                    values[source, f"pass@{num}"].append(pass_at(num, row))
        return cls(name, truths, values)


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Return the 95 % interval of the mean: Wilson's of a share, else Student's t."""
    mean, n = math.fsum(values) / len(values), len(values)
    if set(values) <= {0.0, 1.0}:
        centre, scale = mean + _Z**2 / (2 * n), 1 + _Z**2 / n
        half = _Z * math.sqrt(mean * (1 - mean) / n + (_Z / (2 * n)) ** 2)
        return max(0.0, (centre - half) / scale), min(1.0, (centre + half) / scale)
    half = Statistics(values).half
    return (math.nan, math.nan) if half is None else (mean - half, mean + half)


@dataclass(frozen=True)
class Comparison:
    """Scores of one model, or of two on the same rows."""

    models: Sequence[Scores]

    def __post_init__(self) -> None:
        first, *others = self.models
        for other in others:
            if other.truths != first.truths:
                raise ConfigError(
                    f"{first.name} and {other.name} were evaluated on other rows",
                    hint="name the rows: data.val_files=FILE data.max_prompt_length=N",
                )

    def as_json(self) -> dict[str, Any]:
        """Return figures and tests as plain data."""
        figures = [
            {"model": model.name, "data_source": source, "metric": metric, **_figure(values)}
            for model in self.models
            for (source, metric), values in model.values.items()
        ]
        return {"figures": figures, "paired": list(self._tests())}

    def _tests(self) -> Iterator[dict[str, Any]]:
        """Yield the paired test of each figure that two models have."""
        if len(self.models) < 2:
            return
        one, two = (model.values for model in self.models)
        for (source, metric), values in one.items():
            other = two.get((source, metric), [])
            if len(other) == len(values):
                pairs = Statistics([b - a for a, b in zip(values, other, strict=True)])
                better = sum(value > 0 for value in pairs.values)
                worse = sum(value < 0 for value in pairs.values)
                figure = {key: value for key, value in pairs.as_json().items() if key != "values"}
                test = {"p": pairs.p_value(), "better": better, "worse": worse}
                yield {"data_source": source, "metric": metric, "difference": figure, **test}

    def tables(self) -> Iterator[tuple[list[str], list[list[str]]]]:
        """Yield names of columns and rows: of the figures, then of the tests if there are any."""
        found = self.as_json()
        yield (
            ["model", "metric", "mean", "95 % interval", "prompts"],
            [
                [row["model"], f"{row['data_source']} {row['metric']}", *_shown(row)]
                for row in found["figures"]
            ],
        )
        if len(self.models) > 1:
            yield (
                ["comparison", "metric", "difference", "95 % interval", "prompts", "better", "p"],
                [
                    [
                        f"{self.models[1].name} − {self.models[0].name}",
                        f"{row['data_source']} {row['metric']}",
                        *_shown(row["difference"]),
                        f"{row['better']} : {row['worse']}",
                        "-" if row["p"] is None else f"{row['p']:.3g}",
                    ]
                    for row in found["paired"]
                ],
            )


def _figure(values: Sequence[float]) -> dict[str, Any]:
    low, high = interval(values)
    ends = {"low": None, "high": None} if math.isnan(low) else {"low": low, "high": high}
    return {"n": len(values), "mean": math.fsum(values) / len(values), **ends}


def _shown(figure: dict[str, Any]) -> list[str]:
    ends = f"{figure['low']:.3g} to {figure['high']:.3g}" if figure["low"] is not None else "-"
    return [f"{figure['mean']:.3g}", ends, str(figure["n"])]
