"""Scores of a reward model for stored responses, without a run: in this process."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from rlctl.data_prep.rows import PromptRow
from rlctl.errors import ConfigError, raise_problems
from rlctl.recipes import schema
from rlctl.recipes.roles import REWARD_MODEL
from rlctl.runtime.algorithms.pair_metrics import pair_metrics
from rlctl.runtime.batch import Prompts, Ragged
from rlctl.runtime.data.conversations import Conversations
from rlctl.runtime.data.fields import text_field
from rlctl.runtime.evaluate import reward_model
from rlctl.runtime.planning.preflight import check_model
from rlctl.runtime.rewards.report import RewardReport, RewardResult
from rlctl.tracking.metrics import to_floats

_CHUNK = 256  # responses between two reports of progress


def model_report(
    config: schema.Config,
    rows: Sequence[PromptRow],
    texts: Sequence[str],
    on_progress: Callable[[int], None],
) -> RewardReport:
    """Score one response to each of `rows` with the reward model alone; scores are raw.

    A conversation that the chat template rejects is an error with score 0, as in training. One that
    is too long has the component `truncated`. Raises ConfigError for a model that cannot be loaded.
    """
    settings = config.reward.reward_model
    raise_problems(check_model(config, REWARD_MODEL))
    conversations = Conversations.from_config(settings)
    encoded: list[list[int]] = []
    errors: dict[int, str] = {}
    for index, (row, text) in enumerate(zip(rows, texts, strict=True)):
        try:
            ids = conversations.encode([*row.prompt, {"role": "assistant", "content": text}])
        except ConfigError as error:
            errors[index], ids = error.problems[0].message, []
        encoded.append(ids)
    usable = [index for index in range(len(rows)) if index not in errors]
    scores = dict.fromkeys(range(len(rows)), 0.0)
    with reward_model(config) as model:
        for start in range(0, len(usable), _CHUNK):
            part = usable[start : start + _CHUNK]
            owner = Prompts(
                prompt_ids=Ragged.from_rows([[]] * len(part), dtype=torch.int64),
                group=torch.arange(len(part)),
                rows=[rows[index] for index in part],
            )
            batch = conversations.to_rollouts(owner, [encoded[index] for index in part])
            values = model.compute_rewards(batch).values.float().tolist()
            scores |= dict(zip(part, values, strict=True))
            on_progress(start + len(part))
    results = [
        RewardResult(
            scores[index],
            {"truncated": 1.0} if conversations.is_too_long(ids) else {},
            errors.get(index),
            None,
        )
        for index, ids in enumerate(encoded)
    ]
    return RewardReport(results, len(errors), 0, next(iter(errors.values()), None))


def pair_texts(data: schema.Data, rows: Sequence[PromptRow]) -> list[str]:
    """Return the chosen and the rejected response of each row in turn.

    Raises ConfigError for a row without one of them.
    """
    keys = {"data.chosen_key": data.chosen_key, "data.rejected_key": data.rejected_key}
    return [text_field(row, dotted, key) for row in rows for key, dotted in keys.items()]


def pair_summary(report: RewardReport) -> dict[str, float]:
    """Return accuracy, margin and calibration error of pairs without errors.

    The results of a pair are adjacent, the chosen response first.
    """
    pairs = zip(report.results[::2], report.results[1::2], strict=True)
    scores = [(one.score, two.score) for one, two in pairs if not (one.error or two.error)]
    flat = torch.tensor(scores, dtype=torch.float64).flatten()
    found = to_floats(pair_metrics(flat, torch.zeros(len(scores)), "pairs"))
    return {name: found.get(f"pairs/{name}", 0.0) for name in ("accuracy", "margin", "ece")}
