"""Validation samples of a page, alone or beside the response of another run to the same prompt."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlctl.plugins.console.report.content import plain_sample, thumbnails_of
from rlctl.runs import details
from rlctl.runs.run import Run
from rlctl.tracking.tracker import Sample

PAGE = 20
VERDICTS = ("", "right", "wrong", "differ")


@dataclass(frozen=True)
class SampleQuery:
    """Choice of samples: step (None: the last), verdict, text that they contain, and offset.

    `beside` is the other run, `beside_step` its step (None: the same one, else its last). The
    verdict `differ` keeps prompts of which one response is right and the other is wrong.
    """

    step: int | None = None
    verdict: str = ""
    text: str | None = None
    offset: int = 0
    beside: str | None = None
    beside_step: int | None = None


def page_of_samples(run: Run, query: SampleQuery, other: Run | None) -> dict[str, Any]:
    """Return the step, the number of matching samples, and `PAGE` of them from the offset on."""
    step, found = details.samples(run, query.step, None)
    pairs = [(sample, None) for sample in found]
    beside_step = None
    if other is not None:
        beside_step, others = _samples_beside(other, query.beside_step, step)
        pairs = list(zip(found, partners(found, others), strict=True))
    chosen = [pair for pair in pairs if _matches(pair, query)]
    shown = [
        plain_sample(place, sample) | {"beside": partner and plain_sample(place, partner)}
        for place, (sample, partner) in enumerate(
            chosen[query.offset : query.offset + PAGE], query.offset
        )
    ]
    return {
        "step": step,
        "beside_step": beside_step,
        "matching": len(chosen),
        "samples": shown,
        "thumbnails": list(thumbnails_of(run, shown)),
    }


def _samples_beside(run: Run, step: int | None, same: int) -> tuple[int, list[Sample]]:
    if step is None and same in details.generation_steps(run.path):
        step = same
    return details.samples(run, step, None)


def partners(samples: Sequence[Sample], others: Sequence[Sample]) -> list[Sample | None]:
    """Return for each sample the one of `others` with the same prompt and images.

    Of several responses to one prompt the first belongs to the first, and so on; None without one.
    """
    waiting: Mapping[Any, deque[Sample]] = defaultdict(deque)
    for other in others:
        waiting[_prompt(other)].append(other)
    return [
        waiting[key].popleft() if waiting.get(key := _prompt(sample)) else None
        for sample in samples
    ]


def _prompt(sample: Sample) -> tuple[Any, ...]:
    return sample.prompt, *sample.images


def _matches(pair: tuple[Sample, Sample | None], query: SampleQuery) -> bool:
    sample, partner = pair
    if query.verdict == "differ":
        by_verdict = partner is not None and partner.right != sample.right
    else:
        by_verdict = not query.verdict or sample.right == (query.verdict == "right")
    if not query.text or not by_verdict:
        return by_verdict
    return any(details.contains(each, query.text) for each in pair if each is not None)
