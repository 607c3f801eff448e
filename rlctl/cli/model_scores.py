"""Scores of a reward model for `rlctl reward test`: of responses, and of preference pairs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rlctl.cli.console import notice, print_json, stderr
from rlctl.cli.function_scores import response_entry
from rlctl.cli.views.reward import print_pairs, print_scores
from rlctl.errors import ConfigError, NotFoundError, UsageError
from rlctl.monitoring.text import plural

if TYPE_CHECKING:
    from rlctl.data_prep.rows import PromptRow
    from rlctl.recipes.schema import Config
    from rlctl.runtime.rewards.report import RewardReport


def score_pairs(config: Config, rows: Sequence[PromptRow], data: Path, as_json: bool) -> None:
    """Score both responses of each pair with the reward model, and print the scores."""
    if not config.reward.reward_model.enable:
        raise UsageError(
            "the responses are missing",
            hint="--responses FILE; only a reward model (--model RUN|DIR) scores the pairs of rows",
        )
    from rlctl.runtime.data.fields import pair_texts
    from rlctl.runtime.evaluate import pair_summary

    try:
        texts = [text for row in rows for text in pair_texts(row, config.data)]
    except ConfigError as error:
        raise UsageError(
            f"no responses are given, and {error.problems[0].message}",
            where=str(data),
            hint="--responses FILE, or rows of `rlctl prep preferences`",
        ) from error
    report = score_responses(config, [row for row in rows for _ in range(2)], texts)
    pairs = [
        {
            "pair": index,
            "chosen": chosen.score,
            "rejected": rejected.score,
            "error": chosen.error or rejected.error,
            "chosen_response": texts[2 * index],
            "rejected_response": texts[2 * index + 1],
        }
        for index, (chosen, rejected) in enumerate(
            zip(report.results[::2], report.results[1::2], strict=True)
        )
    ]
    summary = pair_summary(report)
    if as_json:
        print_json({**summary, "num_errors": report.num_errors, "pairs": pairs})
        return
    print_pairs(pairs)
    notice(
        f"{len(pairs)} pairs, accuracy {summary['accuracy']:.1%}, margin {summary['margin']:.4g}, "
        f"calibration error {summary['ece']:.4g}, {report.num_errors} errors"
    )


def print_model_scores(
    config: Config, rows: list[PromptRow], texts: list[str], as_json: bool
) -> None:
    """Score a response to each of `rows` with the reward model, and print the scores."""
    report = score_responses(config, rows, texts)
    scored = [response_entry(i, row, texts[i], report, i) for i, row in enumerate(rows)]
    mean = sum(report.scores) / len(report.scores)
    if as_json:
        errors = {"num_errors": report.num_errors, "num_timeouts": report.num_timeouts}
        print_json({"mean": mean, **errors, "answers": scored})
        return
    print_scores(scored)
    notice(
        f"{plural(len(scored), 'response')}, mean score {mean:.4g}, "
        f"{report.num_errors} errors, {report.num_timeouts} timeouts"
    )


def score_responses(config: Config, rows: list[PromptRow], texts: list[str]) -> RewardReport:
    """Score all responses with the reward model, with progress on a terminal."""
    from rlctl.runtime.evaluate import model_report
    from rlctl.runtime.planning.evaluation import with_models  # imports torch

    config = with_models(config)
    path = config.reward.reward_model.model.path
    if "/" not in path and not Path(path).expanduser().is_dir():
        raise NotFoundError(
            f"no run is named {path!r}, and no folder either",
            where=str(Path(config.trainer.run_dir).resolve()),
            hint="`rlctl runs` lists runs; a model on the hub is owner/name",
        )
    with stderr().status("loading the reward model") as status:
        return model_report(
            config,
            rows,
            texts,
            lambda done: status.update(f"scored {done} of {len(rows)} responses"),
        )
