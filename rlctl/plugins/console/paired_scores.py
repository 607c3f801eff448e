"""Scores of models on the same rows: figures with 95 % intervals, and paired tests of two."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from rlctl.errors import ConfigError
from rlctl.plugins.console.group_statistics import Sample as Statistics
from rlctl.runtime.training.repeated import draws, majority_mean, pass_at
from rlctl.tracking.tracker import Sample

_Z = 1.959964  # quantile of the normal distribution for 95 %

Figures = dict[tuple[str, str], list[float]]  # values of the prompts, by data source and metric


def figures(samples: Sequence[Sample], num: int) -> Figures:
    """Return the figures of `samples`, of which `num` adjacent ones belong to a prompt."""
    values: Figures = defaultdict(list)
    drawn = draws(num, num)
    for start in range(0, len(samples), num):
        group = list(samples[start : start + num])
        source = group[0].data_source
        scores = [float(sample.score) for sample in group]
        row = torch.tensor([scores], dtype=torch.float64)
        values[source, f"mean@{num}"].append(math.fsum(scores) / num)
        if num > 1:
            values[source, f"maj@{num}"].append(majority_mean([group], row, drawn))
            if set(scores) <= {0.0, 1.0}:
                values[source, f"pass@{num}"].append(pass_at(num, row))
    return values


def check_rows(names: Sequence[str], samples: Sequence[Sequence[Sample]]) -> None:
    """Raise ConfigError if models were evaluated on different rows."""
    truths = [[(each.data_source, repr(each.ground_truth)) for each in rows] for rows in samples]
    if any(other != truths[0] for other in truths):
        raise ConfigError(
            f"{' and '.join(names)} were evaluated on other rows",
            hint="name the rows: data.val_files=FILE data.max_prompt_length=N",
        )


def interval(values: Sequence[float]) -> tuple[float | None, float | None]:
    """Return the 95 % interval of the mean: Wilson's of a share, else Student's t."""
    mean = math.fsum(values) / len(values)
    n = len(values)
    if set(values) <= {0.0, 1.0}:
        centre = mean + _Z**2 / (2 * n)
        scale = 1 + _Z**2 / n
        half = _Z * math.sqrt(mean * (1 - mean) / n + (_Z / (2 * n)) ** 2)
        return max(0.0, (centre - half) / scale), min(1.0, (centre + half) / scale)
    return Statistics(values).ends


def rows(names: Sequence[str], found: Sequence[Figures]) -> Iterator[dict[str, Any]]:
    """Yield the figures of each model, then those of the differences of the second to the first."""
    for name, scores in zip(names, found, strict=True):
        for (source, metric), values in scores.items():
            low, high = interval(values)
            mean = Statistics(values).mean
            key = {"data_source": source, "metric": metric}
            yield {"model": name, **key, "n": len(values), "mean": mean, "low": low, "high": high}
    if len(found) == 1:
        return
    for (source, metric), values in found[0].items():
        others = found[1].get((source, metric), [])
        if len(others) == len(values):
            pairs = Statistics([b - a for a, b in zip(values, others, strict=True)])
            key = {"data_source": source, "metric": metric}
            signs = {
                "better": sum(value > 0 for value in pairs.values),
                "worse": sum(value < 0 for value in pairs.values),
            }
            figure = {name: value for name, value in pairs.as_json().items() if name != "values"}
            model = f"{names[1]} − {names[0]}"
            yield {"model": model, **key, **figure, "p": pairs.p_value(), **signs}


def shown(row: dict[str, Any]) -> list[str]:
    """Return a row of the table."""
    ends = "-" if row["low"] is None else f"{row['low']:.3g} to {row['high']:.3g}"
    signs = f"{row['better']} : {row['worse']}" if "better" in row else ""
    p = "" if row.get("p") is None else f"{row['p']:.3g}"
    metric = f"{row['data_source']} {row['metric']}"
    return [row["model"], metric, f"{row['mean']:.3g}", ends, str(row["n"]), signs, p]
