"""Stored responses of runs, each with the row of its prompt: `rlctl data from-runs`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from rlctl.data_prep.rows import PromptRow
from rlctl.errors import NotFoundError
from rlctl.files import by_step, step_name
from rlctl.runs.details import generation_steps
from rlctl.runs.query import Query, Term
from rlctl.runs.run import Run
from rlctl.suggest import did_you_mean
from rlctl.tracking.jsonl import (
    RESPONSES,
    TRAINED,
    VALIDATED,
    generations_file,
    read_generations,
)
from rlctl.tracking.tracker import Sample

_FIELDS = (
    *("score", "right", "failed", "finish", "length", "pred", "ground_truth", "data_source"),
    *("step", "run", "kind", "mean", "count"),
)


@dataclass(frozen=True, eq=False)
class Response:
    """Stored response of a run, generated at `step`; `kind` is training or validation."""

    sample: Sample
    run: Run
    step: int
    kind: str
    mean: float = 0.0  # score of all responses of the run to the prompt
    count: int = 0  # their number

    @property
    def is_single_turn(self) -> bool:
        """True unless the response is an episode with several turns, or with replies."""
        return self.sample.episode is None or len(self.sample.episode.messages) <= 1

    @property
    def checkpoint(self) -> str | None:
        """Name of the checkpoint whose weights wrote the response, if the run has kept it."""
        left_by = self.step if self.kind == "validation" else self.step - 1
        if left_by not in by_step(self.run.path / "checkpoints"):
            return None
        return step_name(left_by)

    def provenance(self) -> dict[str, Any]:
        """Return where the response is from, for `extra_info` of its row."""
        record = self.run.record
        return {
            "from_run": self.run.key,
            "from_run_id": record and record.id,
            "from_step": self.step,
            "from_checkpoint": self.checkpoint,
            "from_kind": self.kind,
            "score": self.sample.score,
        }

    def value(self, term: Term) -> Any:
        """Return the value of a field, or of a component of the score."""
        if term.name in ("step", "kind", "mean", "count"):
            return getattr(self, term.name)
        if term.name == "run":
            return self.run.name
        if term.name in _FIELDS:
            return getattr(self.sample, term.name)
        return self.sample.components.get(term.name)


@dataclass
class Responses:
    """Responses of runs that match a query.

    `left_out` counts the others by reason. Responses to validation prompts need `validation`.
    """

    runs: Sequence[Run]
    where: Query | None
    validation: bool
    left_out: Counter[str] = field(default_factory=Counter[str])

    @cached_property
    def matching(self) -> list[Response]:
        """Return the responses that match, without repetitions. Raises NotFoundError for none."""
        needs_scores = not {"mean", "count"}.isdisjoint(term.name for term in self._terms)
        components: set[str] = set()
        found: dict[tuple[str, str], Response] = {}
        for run in self.runs:
            scores = self._scores(run) if needs_scores else {}
            for response in self._stored(run):
                sample = response.sample
                components |= set(sample.components)
                if sample.prompt in scores:
                    total, count = scores[sample.prompt]
                    response = replace(response, mean=total / count, count=count)
                if (reason := self._reason(response)) is not None:
                    self.left_out[reason] += 1
                elif found.setdefault((sample.prompt, sample.response), response) is not response:
                    self.left_out["repeated"] += 1
        self._check_names(components)
        if not found:
            raise NotFoundError(
                f"no response is left ({counts(self.left_out) or 'none is stored'})",
                hint="a run keeps all training responses with trainer.rollout_data_dir=DIR; "
                "--validation adds those to validation prompts",
            )
        return list(found.values())

    def _reason(self, response: Response) -> str | None:
        if response.sample.failed:
            return "with a failed reward"
        if self.where is not None and not self.where.evaluate(response.value):
            return "not matching"
        return None

    def _check_names(self, components: set[str]) -> None:
        """Raise UsageError for a name in the query that is no field and no component."""
        known = [*_FIELDS, *sorted(components)]
        for term in self._terms:
            if term.name not in known:
                assert self.where is not None
                hints = (did_you_mean(term.name, known), f"fields: {', '.join(known)}")
                raise self.where.unknown(term, "; ".join(filter(None, hints)), "response")

    @property
    def _terms(self) -> Sequence[Term]:
        return () if self.where is None else self.where.terms

    def _stored(self, run: Run) -> Iterator[Response]:
        # The complete responses of a step include those that are kept for `rlctl show`.
        complete = set(generation_steps(run.path, RESPONSES))
        kinds = [(RESPONSES, "training", complete)]
        kinds.append((TRAINED, "training", set(generation_steps(run.path, TRAINED)) - complete))
        if self.validation:
            kinds.append((VALIDATED, "validation", set(generation_steps(run.path))))
        for folder, kind, steps in kinds:
            for step in sorted(steps):
                for sample in read_generations(generations_file(run.path, step, folder)):
                    yield Response(sample, run, step, kind)

    def _scores(self, run: Run) -> Mapping[str, tuple[float, int]]:
        """Return sum and number of the scores of all responses to a prompt."""
        scores: dict[str, tuple[float, int]] = {}
        for response in self._stored(run):
            total, count = scores.get(response.sample.prompt, (0.0, 0))
            scores[response.sample.prompt] = total + response.sample.score, count + 1
        return scores


def counts(left_out: Mapping[str, int]) -> str:
    """Return the numbers of responses by reason as text."""
    return ", ".join(f"{count} {reason}" for reason, count in left_out.items())


def prompt_rows(run: Run) -> dict[str, PromptRow]:
    """Return the rows of a run's data by the text of their prompt in its chat template.

    Raises the errors of a missing model or data file.
    """
    from rlctl.runs.trust import recompose_run
    from rlctl.runtime.data import bundled
    from rlctl.runtime.data.loader import PromptSet
    from rlctl.runtime.planning.draft import Draft
    from rlctl.runtime.planning.model_paths import with_models
    from rlctl.runtime.training.validation import Validator

    recipe = recompose_run(run.path)
    config = with_models(recipe.config)
    with bundled.readable(config) as existing:
        draft = Draft(recipe, config, existing.data, inline=True, run=run.path)
        sets: list[PromptSet] = [draft.prompts]
        if isinstance(draft.validator, Validator):
            sets.append(draft.validator.prompts)
        return {
            str(draft.tokenizer.decode(prompts.encode(row))): row
            for prompts in reversed(sets)
            for row in prompts.rows
        }
