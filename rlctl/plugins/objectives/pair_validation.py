"""Validation of a reward model: scores of the responses of pairs."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rlctl.runtime.algorithms.pair_metrics import pair_metrics
from rlctl.runtime.base.batch import Rollouts
from rlctl.runtime.base.metrics import to_floats
from rlctl.runtime.base.roles import RewardModel, Roles
from rlctl.runtime.data.conversations import Pairs, pair_texts
from rlctl.runtime.data.loader import PromptSet
from rlctl.runtime.training.validation import Validation, by_digest, prompts_of
from rlctl.tracking.tracker import Sample


@dataclass(frozen=True)
class PairValidator:
    """Scores of all pairs of `prompts`, `batch_size` pairs at a time (None: all at once)."""

    prompts: PromptSet
    batch_size: int | None
    pairs: Pairs

    def run(self, roles: Roles) -> Validation:
        """Score the pairs with the model that is trained; see `score`."""
        return self.score(roles.reward_learner)

    def score(self, model: RewardModel) -> Validation:
        """Run one pass: metrics by data source, and two samples per pair."""
        size = self.batch_size or len(self.prompts)
        scores: list[Tensor] = []
        samples: list[Sample] = []
        images = dict[str, bytes]()
        for start in range(0, len(self.prompts), size):
            batch = self.prompts.batch(range(start, min(start + size, len(self.prompts))))
            rows = self.pairs.rollouts(batch)
            scores.append(model.compute_rewards(rows).values)
            samples += self._samples(rows, scores[-1])
            images |= by_digest([rows])
        return Validation(self._metrics(torch.cat(scores)), samples, images)

    def _metrics(self, scores: Tensor) -> dict[str, float]:
        """Return `val-core/<data_source>/acc/mean@1` and `val-aux/<data_source>/*`."""
        metrics: dict[str, float] = {}
        sources = [row.data_source for row in self.prompts.rows]
        for source in dict.fromkeys(sources):
            pairs = scores.view(-1, 2)[torch.tensor([name == source for name in sources])]
            losses = -torch.nn.functional.logsigmoid(pairs[:, 0] - pairs[:, 1])
            found = to_floats(pair_metrics(pairs.flatten(), losses, f"val-aux/{source}"))
            metrics[f"val-core/{source}/acc/mean@1"] = found.pop(f"val-aux/{source}/accuracy")
            metrics |= found
        return metrics

    def _samples(self, rows: Rollouts, scores: Tensor) -> list[Sample]:
        prompts = prompts_of(rows, self.pairs.conversations.tokenizer)
        return [
            Sample(
                prompt=prompts[i][0],
                response=text,
                ground_truth=name,
                score=float(scores[i]),
                components={},
                length=int(rows.response_ids.lengths[i]),
                finish=rows.finish[i],
                data_source=row.data_source,
                pred=None,
                episode=None,
                images=prompts[i][1],
            )
            for i, (row, name, text) in enumerate(
                (row, name, text)
                for row in rows.rows[::2]
                for name, text in zip(
                    ("chosen", "rejected"), pair_texts(row, self.pairs.data), strict=True
                )
            )
        ]
