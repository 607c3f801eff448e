"""The validation pass: answer the held-out prompts, score the answers, and keep samples to read."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass

import torch
from transformers import PreTrainedTokenizerBase

from rlctl.runtime.batch import Scored
from rlctl.runtime.data.loader import PromptSet
from rlctl.runtime.roles import Roles
from rlctl.tracking.tracker import Sample

_NUM_DRAWS, _DRAW_SEED = 1000, 42  # of the bootstrap for best@N and maj@N, as in verl


@dataclass(frozen=True)
class Validation:
    """What came of it: figures by name, and one sample an answer."""

    metrics: dict[str, float]
    samples: list[Sample]


@dataclass(frozen=True)
class Validator:
    """Answers all of `prompts`, `batch_size` at a time (None: all at once)."""

    prompts: PromptSet
    batch_size: int | None
    tokenizer: PreTrainedTokenizerBase
    seed: int

    def run(self, roles: Roles) -> Validation:
        """One pass. The random stream is the same each time, so that steps can be compared."""
        size = self.batch_size or len(self.prompts)
        scored: list[Scored] = []
        for start in range(0, len(self.prompts), size):
            batch = self.prompts.batch(range(start, min(start + size, len(self.prompts))))
            roles.actor.update_weights()
            rollouts = roles.actor.generate_sequences(batch, seed=self.seed + start, validate=True)
            scored.append(roles.reward.compute_scores(rollouts).to_scored(rollouts))
        samples = [sample for part in scored for sample in samples_of(part, self.tokenizer)]
        num_answers = len(samples) // len(self.prompts)
        return Validation(validation_metrics(samples, num_answers), samples)


def samples_of(scored: Scored, tokenizer: PreTrainedTokenizerBase) -> list[Sample]:
    """The answers of a batch as text, in its order."""
    prompts = tokenizer.batch_decode([ids.tolist() for ids in scored.prompt_ids.rows()])
    responses = tokenizer.batch_decode(
        [ids.tolist() for ids in scored.response_ids.rows()], skip_special_tokens=True
    )
    components = {name: values.tolist() for name, values in scored.components.items()}
    return [
        Sample(
            prompt=prompts[i],
            response=responses[i],
            ground_truth=row.ground_truth,
            score=score,
            components={name: values[i] for name, values in components.items()},
            length=length,
            finish=scored.finish[i],
            data_source=row.data_source,
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


def validation_metrics(samples: list[Sample], num_answers: int) -> dict[str, float]:
    """`val-core/<data_source>/<acc|reward>/mean@N`, and best@N and maj@N where a prompt has several answers.

    `samples` holds `num_answers` answers of each prompt side by side. `acc` is a component of that name, or the score itself where every
    score is 0 or 1; otherwise the figure is called `reward`.
    """
    by_source: dict[str, list[list[Sample]]] = defaultdict(list)
    for start in range(0, len(samples), num_answers):
        by_source[samples[start].data_source].append(samples[start : start + num_answers])
    metrics: dict[str, float] = {}
    for source, groups in by_source.items():
        name, value = _measure(groups)
        values = torch.tensor(
            [[value(sample) for sample in group] for group in groups], dtype=torch.float64
        )  # (prompts, N)
        core = f"val-core/{source}/{name}"
        metrics[f"{core}/mean@{num_answers}"] = float(values.mean())
        if num_answers > 1:
            generator = torch.Generator().manual_seed(_DRAW_SEED)
            draws = torch.randint(num_answers, (_NUM_DRAWS, num_answers), generator=generator)
            metrics[f"{core}/best@{num_answers}/mean"] = float(values[:, draws].amax(-1).mean())
            metrics[f"{core}/maj@{num_answers}/mean"] = _majority(groups, values, draws)
            metrics[f"val-aux/{source}/{name}/std@{num_answers}"] = float(values.std(-1).mean())
        lengths = torch.tensor([float(sample.length) for group in groups for sample in group])
        metrics[f"val-aux/{source}/response_length/mean"] = float(lengths.mean())
        stopped = [sample.finish == "stop" for group in groups for sample in group]
        metrics[f"val-aux/{source}/finished"] = sum(stopped) / len(stopped)
    return metrics


def _measure(groups: list[list[Sample]]) -> tuple[str, Callable[[Sample], float]]:
    samples = [sample for group in groups for sample in group]
    if all("acc" in sample.components for sample in samples):
        return "acc", lambda sample: float(sample.components["acc"])
    return (
        "acc" if all(sample.score in (0.0, 1.0) for sample in samples) else "reward"
    ), lambda sample: sample.score


def _majority(groups: list[list[Sample]], values: torch.Tensor, draws: torch.Tensor) -> float:
    """The value of the commonest answer among N drawn ones, averaged over draws and prompts. Answers are compared by their last line."""
    total = 0.0
    for group, row in zip(groups, values.tolist(), strict=True):
        answers = [sample.response.strip().rpartition("\n")[2] for sample in group]
        first = {answer: row[i] for i, answer in reversed(list(enumerate(answers)))}
        total += sum(
            first[Counter(answers[i] for i in draw).most_common(1)[0][0]] for draw in draws.tolist()
        ) / len(draws)
    return total / len(groups)
