"""Validation pass: responses to held-out prompts, their scores, metrics and samples.

A reward model is validated on held-out pairs.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import chain
from math import isnan
from statistics import fmean
from typing import Protocol

import torch
from transformers import PreTrainedTokenizerBase

from rlctl.data_prep.message_parts import PLACEHOLDER
from rlctl.runtime.algorithms.base import generate
from rlctl.runtime.base.batch import Rollouts, Scored
from rlctl.runtime.base.roles import RewardModel, Roles
from rlctl.runtime.data.loader import PromptSet
from rlctl.runtime.rewards.role import RULE
from rlctl.tracking.tracker import Sample

_MAX_KEPT = 16  # rows of a prompt on average
_REPEATED = re.compile(r"(<[^<>\s]+>)( ?\1)+")  # tokens of an image in a prompt


@dataclass(frozen=True)
class Validation:
    """Result of a validation pass: metrics by name, one sample per response, images by SHA-256."""

    metrics: dict[str, float]
    samples: list[Sample] = field(repr=False)
    images: Mapping[str, bytes] = field(default_factory=dict, repr=False)


class ModelValidation(Protocol):
    """Validation of a role that no policy has part in."""

    prompts: PromptSet

    def run(self, roles: Roles) -> Validation:
        """Run one pass in training."""
        ...

    def score(self, model: RewardModel) -> Validation:
        """Run one pass with a model of the role."""
        ...


@dataclass(frozen=True)
class Validator:
    """Validation on all of `prompts`, `batch_size` at a time (None: all at once)."""

    prompts: PromptSet
    batch_size: int | None
    tokenizer: PreTrainedTokenizerBase
    seed: int

    def run(self, roles: Roles) -> Validation:
        """Run one pass. Each pass samples with the same seeds, so that steps can be compared."""
        size = self.batch_size or len(self.prompts)
        scored: list[Scored] = []
        for start in range(0, len(self.prompts), size):
            batch = self.prompts.batch(range(start, min(start + size, len(self.prompts))))
            rollouts = generate(batch, roles, self.seed + start, validate=True)
            scored.append(roles.reward.compute_scores(rollouts, validate=True).to_scored(rollouts))
        samples = [sample for part in scored for sample in to_samples(part, self.tokenizer)]
        num_responses = len(samples) // len(self.prompts)
        metrics = validation_metrics(samples, num_responses)
        return Validation(metrics, samples, by_digest(scored))


def by_digest(batches: Iterable[Rollouts]) -> dict[str, bytes]:
    """Return the images of batches by their SHA-256."""
    rows = (images for batch in batches for images in batch.images)
    distinct = dict.fromkeys(chain.from_iterable(rows))
    if not distinct:
        return {}
    from rlctl.data_prep.images import digest_of

    return {digest_of(image): image for image in distinct}


def prompts_of(
    rows: Rollouts, tokenizer: PreTrainedTokenizerBase
) -> list[tuple[str, tuple[str, ...]]]:
    """Return each prompt as text with `<image>` for an image, and the SHA-256 of its images."""
    texts = tokenizer.batch_decode([ids.tolist() for ids in rows.prompt_ids.rows()])
    images: list[tuple[str, ...]] = [()] * len(rows)
    if any(rows.images):
        from rlctl.data_prep.images import digest_of

        images = [tuple(map(digest_of, files)) for files in rows.images]
    return [
        (_REPEATED.sub(PLACEHOLDER, text) if digests else text, digests)
        for text, digests in zip(texts, images, strict=True)
    ]


def to_samples(scored: Scored, tokenizer: PreTrainedTokenizerBase) -> list[Sample]:
    """Decode the responses of a batch to samples, in its order, with `<image>` for an image."""
    prompts = prompts_of(scored, tokenizer)
    responses = tokenizer.batch_decode(
        [ids.tolist() for ids in scored.response_ids.rows()], skip_special_tokens=True
    )
    components = {name: values.tolist() for name, values in scored.components.items()}
    preds = scored.preds or [None] * len(scored)
    episodes = scored.episodes or [None] * len(scored)
    return [
        Sample(
            prompt=prompts[i][0],
            response=responses[i],
            ground_truth=row.ground_truth,
            score=score,
            components={
                name: values[i] for name, values in components.items() if not isnan(values[i])
            },
            length=length,
            finish=scored.finish[i],
            data_source=row.data_source,
            pred=preds[i],
            episode=episodes[i],
            images=prompts[i][1],
            failed=bool(scored.failed[i]),
        )
        for i, (row, score, length) in enumerate(
            zip(
                scored.rows,
                scored.scores.tolist(),
                scored.response_ids.lengths.tolist(),
                strict=True,
            )
        )
    ]


def first_samples(
    scored: Scored, num_prompts: int, tokenizer: PreTrainedTokenizerBase
) -> list[Sample]:
    """Decode the responses to the first prompts of a batch: see `to_samples`."""
    first = scored.group.unique_consecutive()[:num_prompts]
    rows = torch.isin(scored.group, first).nonzero().flatten()[: num_prompts * _MAX_KEPT]
    return to_samples(scored.select(rows), tokenizer)


def validation_metrics(samples: list[Sample], num_responses: int) -> dict[str, float]:
    """Return `val-core/<data_source>/<acc|reward>/*` and `val-aux/*`: mean@N; `repeated_metrics`.

    `samples` holds the N = `num_responses` responses of each prompt side by side. `acc` is the
    score component of that name, or the score itself if every score is 0 or 1; other scores are
    reported as `reward`. A row without the component that others of its source have counts as 1 if
    it is right, else 0. Beside a reward model, the score is that of the functions, and
    `val-aux/*/model_reward` is the mean of the weighted sum.
    """
    by_source: dict[str, list[list[Sample]]] = defaultdict(list)
    for start in range(0, len(samples), num_responses):
        by_source[samples[start].data_source].append(samples[start : start + num_responses])
    metrics: dict[str, float] = {}
    for source, groups in by_source.items():
        name, value = _measure(groups)
        values = torch.tensor(
            [[value(sample) for sample in group] for group in groups], dtype=torch.float64
        )  # (prompts, N)
        core = f"val-core/{source}/{name}"
        metrics[f"{core}/mean@{num_responses}"] = float(values.mean())
        if num_responses > 1:
            from rlctl.runtime.training.repeated import repeated_metrics

            metrics |= repeated_metrics(f"{source}/{name}", groups, values)
        if any(RULE in sample.components for group in groups for sample in group):
            scores = [sample.score for group in groups for sample in group]
            metrics[f"val-aux/{source}/model_reward/mean@{num_responses}"] = fmean(scores)
        lengths = torch.tensor([float(sample.length) for group in groups for sample in group])
        metrics[f"val-aux/{source}/response_length/mean"] = float(lengths.mean())
        stopped = [sample.is_finished for group in groups for sample in group]
        metrics[f"val-aux/{source}/finished"] = sum(stopped) / len(stopped)
    return metrics


def _score(sample: Sample) -> float:
    return sample.score


def _rule_score(sample: Sample) -> float:
    return float(sample.components[RULE])


def _measure(groups: list[list[Sample]]) -> tuple[str, Callable[[Sample], float]]:
    """Return the name of the metric, acc or reward, and the function that reads it."""
    samples = [sample for group in groups for sample in group]
    if any("acc" in sample.components for sample in samples):
        return "acc", lambda sample: float(sample.components.get("acc", sample.right))
    value = _score
    if all(RULE in sample.components for sample in samples):
        value = _rule_score
    is_binary = all(value(sample) in (0.0, 1.0) for sample in samples)
    return "acc" if is_binary else "reward", value
