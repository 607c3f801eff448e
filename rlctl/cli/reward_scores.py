"""Scores of stored responses for `rlctl reward test`; few of the responses are in memory.

They are those of reward functions, or of a reward model alone, which also scores preference pairs.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice, repeat
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from rlctl.cli.console import print_json
from rlctl.cli.stderr import notice, stderr
from rlctl.cli.views.samples import print_pairs, print_scores
from rlctl.data_prep.rows import PromptRow, stream_rows
from rlctl.errors import ConfigError, NotFoundError, Problem, RlctlError, UsageError
from rlctl.text import plural

if TYPE_CHECKING:
    from rlctl.recipes.schema import Config
    from rlctl.runtime.rewards.reward_pool import RewardPool
    from rlctl.runtime.rewards.reward_report import RewardReport

_PART = 8192  # responses that are scored, or are in a table, at a time


@dataclass
class _Totals:
    """Numbers of responses and failed calls, and the sum of the scores."""

    count: int = 0
    score: float = 0.0
    num_errors: int = 0
    num_timeouts: int = 0
    num_failed: int = 0
    first_error: str | None = None

    def add(self, report: RewardReport) -> None:
        self.score += sum(report.scores)
        self.num_errors += report.num_errors
        self.num_timeouts += report.num_timeouts
        self.num_failed += sum(result.error is not None for result in report.results)
        self.first_error = self.first_error or report.first_error

    def error(self, max_failed_share: float) -> RlctlError | None:
        """Return the error if all responses failed, or more than would end a run."""
        from rlctl.runtime.rewards.reward_report import exceeds

        failed = self.num_failed
        if failed < self.count and not exceeds(failed, self.count, max_failed_share):
            return None
        return RlctlError(
            f"the reward of {failed} of {self.count} responses failed; the first: "
            f"{self.first_error}"
        )


Scored = tuple[Sequence[PromptRow], Sequence[str], "RewardReport"]  # rows, their responses


def print_function_scores(config: Config, data: Path, responses: Path, as_json: bool) -> None:
    """Score responses with the reward functions, with progress on a terminal, and print scores.

    Raises ConfigError if the first calls, at least one per process, all time out, and RlctlError if
    more fail than a run accepts.
    """
    rows = partial(
        stream_rows,
        data,
        prompt_key=config.data.prompt_key,
        reward_fn_key=config.data.reward_fn_key,
        image_key=config.data.image_key,
    )
    num_rows = 0
    sources: dict[str, None] = {}
    for row in rows():
        sources[row.data_source] = None
        num_rows += 1
    num_responses = sum(1 for _ in read_texts(responses))
    size = responses_per_row(num_rows, num_responses, responses)
    repeated = chain.from_iterable(repeat(row, size) for row in rows())
    pairs = zip(repeated, read_texts(responses), strict=True)
    scored = _score_with_functions(config, list(sources), pairs, num_responses, size)
    _print_scores(scored, as_json, config.reward.max_failed_share)


def print_model_scores(
    config: Config, rows: list[PromptRow], texts: list[str], as_json: bool
) -> None:
    """Score a response to each of `rows` with the reward model, and print the scores."""
    _print_scores([(rows, texts, _score_with_model(config, rows, texts))], as_json)


def _print_scores(
    parts: Iterable[Scored], as_json: bool, max_failed_share: float | None = None
) -> None:
    """Print what `parts` have, after the last one.

    Raises RlctlError if all responses failed, or more than the share that is given.
    """
    totals = _Totals()
    with tempfile.TemporaryFile("w+", encoding="utf-8") as entries:
        for rows, texts, report in parts:
            for row, text, result in zip(rows, texts, report.results, strict=True):
                entry = {
                    "answer": totals.count,
                    "score": result.score,
                    "components": result.components,
                    "pred": result.pred,
                    "error": result.error,
                    "ground_truth": row.ground_truth,
                    "response": text,
                }
                entries.write(json.dumps(entry, allow_nan=not as_json, default=str) + "\n")
                totals.count += 1
            totals.add(report)
        entries.seek(0)
        error = None
        if max_failed_share is not None:
            error = totals.error(max_failed_share)
        if as_json:
            _print_json(totals, entries, error)
        else:
            _print_table(totals, entries)
    if error is not None:
        raise error


def _print_table(totals: _Totals, scores: TextIO) -> None:
    """Print a table of scores from lines of JSON, and the totals."""
    while part := [json.loads(line) for line in islice(scores, _PART)]:
        print_scores(part)
    notice(
        f"{plural(totals.count, 'response')}, mean score {totals.score / totals.count:.4g}, "
        f"{totals.num_errors} errors, {totals.num_timeouts} timeouts"
    )


def print_pair_scores(config: Config, rows: Sequence[PromptRow], data: Path, as_json: bool) -> None:
    """Score both responses of each pair with the reward model, and print the scores."""
    if not config.reward.reward_model.enable:
        raise UsageError(
            "the responses are missing",
            hint="--responses FILE; only a reward model (--model RUN|DIR) scores the pairs of rows",
        )
    from rlctl.runtime.data.conversations import pair_texts
    from rlctl.runtime.evaluate import pair_summary

    try:
        texts = [text for row in rows for text in pair_texts(row, config.data)]
    except ConfigError as error:
        raise UsageError(
            f"no responses are given, and {error.problems[0].message}",
            where=str(data),
            hint="--responses FILE, or rows of `rlctl prep preferences`",
        ) from error
    report = _score_with_model(config, [row for row in rows for _ in range(2)], texts)
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


def read_texts(path: Path) -> Iterator[str]:
    """Yield the responses of a file; a record is a text or has one under `response`."""
    from rlctl.data_prep.contract import raise_capped
    from rlctl.data_prep.records import read_records

    if path.suffix not in (".jsonl", ".json", ".parquet"):
        with path.open(encoding="utf-8") as file:
            yield from (line.removesuffix("\n") for line in file)
        return
    problems: list[Problem] = []
    for where, record in read_records(path):
        text = record
        if isinstance(record, dict):
            text = record.get("response")
        if isinstance(text, str):
            yield text
        else:
            message = "not a response: expected a text, or an object with a text under 'response'"
            problems.append(Problem(message, where))
    raise_capped(problems, path)


def responses_per_row(num_rows: int, num_responses: int, file: Path) -> int:
    """Return the number of responses to each row. Raises UsageError if the numbers do not match."""
    if not num_responses or num_responses % num_rows:
        raise UsageError(
            f"{plural(num_responses, 'response')} for {plural(num_rows, 'row')}",
            where=str(file),
            hint="give one response per row, or the same number for each row, consecutively",
        )
    return num_responses // num_rows


def _score_with_functions(
    config: Config,
    sources: Sequence[str],
    pairs: Iterator[tuple[PromptRow, str]],
    num_responses: int,
    group_size: int,
) -> Iterator[Scored]:
    """Score rows with responses, `group_size` of each row, and yield them in parts."""
    from rlctl.cores import available_cores

    num_processes = min(num_responses, config.reward.num_processes or available_cores())
    first = min(num_responses, -(-num_processes // group_size) * group_size)
    size = first
    count = 0
    with (
        stderr().status("loading the reward functions") as status,
        _pool(config, sources, num_processes) as pool,
    ):
        status.update(f"scoring {plural(num_responses, 'response')}")
        while part := list(islice(pairs, size)):
            rows = [row for row, _ in part]
            texts = [text for _, text in part]
            report = pool.score(
                rows,
                texts,
                lambda done, total, before=count, size=len(part): status.update(
                    f"scored {before + done * size // max(total, 1)} of {num_responses} responses"
                ),
                [number // group_size for number in range(len(part))],
            )
            if not count and report.num_timeouts >= first:
                raise ConfigError(
                    f"the reward function exceeds its time limit on the first {first} "
                    f"responses: {report.first_error}",
                    hint="reward.timeout_s=N allows more time",
                )
            count += len(part)
            size = max(1, _PART // group_size) * group_size
            yield rows, texts, report


def _pool(
    config: Config, sources: Sequence[str], num_processes: int
) -> AbstractContextManager[RewardPool]:
    """Return the pool of the reward functions; the engine of the run's judge needs torch."""
    from rlctl.runtime.rewards.request_limits import RequestSettings
    from rlctl.runtime.rewards.reward_pool import RewardPool

    if config.reward.judge.model.path is None:
        requests = RequestSettings.from_config(config.reward, None)
        return RewardPool.from_config(config.reward, sources, num_processes, requests=requests)
    from rlctl.runtime.evaluate import judged_pool

    return judged_pool(config, sources, num_processes)


def _score_with_model(config: Config, rows: list[PromptRow], texts: list[str]) -> RewardReport:
    """Score all responses with the reward model, with progress on a terminal."""
    from rlctl.runtime.evaluate import model_report
    from rlctl.runtime.planning.model_paths import with_models  # imports torch

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


def _print_json(totals: _Totals, scores: TextIO, error: RlctlError | None) -> None:
    """Print one document, in the layout of `print_json`, from lines of JSON."""
    from rlctl.cli.json_errors import document_with_error

    head = {
        "mean": totals.score / totals.count,
        "num_errors": totals.num_errors,
        "num_timeouts": totals.num_timeouts,
    }
    dumps = partial(json.dumps, indent=2, ensure_ascii=False, allow_nan=False)
    sys.stdout.write(dumps(head).removesuffix("\n}") + ',\n  "answers": [')
    separator = ""
    for line in scores:
        entry = dumps(json.loads(line)).replace("\n", "\n    ")
        sys.stdout.write(f"{separator}\n    {entry}")
        separator = ","
    end = "\n}"
    if error is not None:
        end = dumps(document_with_error({}, error)).replace("{", ",", 1)
    sys.stdout.write(f"\n  ]{end}\n")
