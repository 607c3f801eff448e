"""Scores of reward functions for `rlctl reward test`; few of the responses are in memory."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice, repeat
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from rlctl.cli.console import notice, stderr
from rlctl.cli.views.reward import print_scores
from rlctl.data_prep.rows import PromptRow, stream_rows
from rlctl.errors import ConfigError, RlctlError, UsageError
from rlctl.monitoring.text import plural

if TYPE_CHECKING:
    from rlctl.recipes.schema import Config
    from rlctl.runtime.rewards.pool import RewardPool
    from rlctl.runtime.rewards.report import RewardReport

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
        self.count += len(report.results)
        self.score += sum(report.scores)
        self.num_errors += report.num_errors
        self.num_timeouts += report.num_timeouts
        self.num_failed += sum(result.error is not None for result in report.results)
        self.first_error = self.first_error or report.first_error

    def check(self, max_failed_share: float) -> None:
        """Raise RlctlError if all responses failed, or more than would end a run."""
        from rlctl.runtime.rewards.report import exceeds

        if self.num_failed == self.count or exceeds(self.num_failed, self.count, max_failed_share):
            raise RlctlError(
                f"the reward of {self.num_failed} of {self.count} responses failed; the first: "
                f"{self.first_error}"
            )


def score_with_functions(config: Config, data: Path, responses: Path, as_json: bool) -> None:
    """Score responses with the reward functions, with progress on a terminal, and print scores.

    Raises ConfigError if the first calls, at least one per process, all time out.
    """
    rows = partial(
        stream_rows,
        data,
        prompt_key=config.data.prompt_key,
        reward_fn_key=config.data.reward_fn_key,
    )
    num_rows, sources = 0, dict[str, None]()
    for row in rows():
        sources[row.data_source] = None
        num_rows += 1
    num_responses = sum(1 for _ in read_texts(responses))
    size = responses_per_row(num_rows, num_responses, responses)
    repeated = chain.from_iterable(repeat(row, size) for row in rows())
    pairs = zip(repeated, read_texts(responses), strict=True)
    with tempfile.TemporaryFile("w+") as scores:
        totals = _score(config, list(sources), pairs, (num_responses, size), (scores, as_json))
        scores.seek(0)
        if as_json:
            _print_json(totals, scores)
            totals.check(config.reward.max_failed_share)
            return
        while part := [json.loads(line) for line in islice(scores, _PART)]:
            print_scores(part)
    notice(
        f"{plural(totals.count, 'response')}, mean score {totals.score / totals.count:.4g}, "
        f"{totals.num_errors} errors, {totals.num_timeouts} timeouts"
    )
    totals.check(config.reward.max_failed_share)


def read_texts(path: Path) -> Iterator[str]:
    """Yield the responses of a file; a record is a text or has one under `response`."""
    from rlctl.data_prep.records import raise_capped, read_records
    from rlctl.errors import Problem

    if path.suffix not in (".jsonl", ".json", ".parquet"):
        with path.open(encoding="utf-8") as file:
            yield from (line.removesuffix("\n") for line in file)
        return
    problems: list[Problem] = []
    for where, record in read_records(path):
        text = record.get("response") if isinstance(record, dict) else record
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


def _score(
    config: Config,
    sources: Sequence[str],
    pairs: Iterator[tuple[PromptRow, str]],
    sizes: tuple[int, int],
    output: tuple[TextIO, bool],
) -> _Totals:
    """Score rows with responses, of which there are `sizes`: in all, and for a row.

    Writes a line of JSON for each response to a file; the flag forbids NaN.
    """
    from rlctl.runtime.rank_info import available_cores

    (num_responses, group_size), (scores, strict), totals = sizes, output, _Totals()
    num_processes = min(num_responses, config.reward.num_processes or available_cores())
    first = min(num_responses, -(-num_processes // group_size) * group_size)
    usual = max(1, _PART // group_size) * group_size
    with (
        stderr().status("loading the reward functions") as status,
        _pool(config, sources, num_processes) as pool,
    ):
        status.update(f"scoring {plural(num_responses, 'response')}")
        while part := list(islice(pairs, usual if totals.count else first)):
            rows, texts = [row for row, _ in part], [text for _, text in part]
            report = pool.score(
                rows,
                texts,
                lambda done, total, before=totals.count, size=len(part): status.update(
                    f"scored {before + done * size // max(total, 1)} of {num_responses} responses"
                ),
                [number // group_size for number in range(len(part))],
            )
            if not totals.count and report.num_timeouts >= first:
                raise ConfigError(
                    f"the reward function exceeds its time limit on the first {first} "
                    f"responses: {report.first_error}",
                    hint="reward.timeout_s=N allows more time",
                )
            for number, (row, text) in enumerate(part):
                entry = response_entry(totals.count + number, row, text, report, number)
                scores.write(json.dumps(entry, allow_nan=not strict, default=str) + "\n")
            totals.add(report)
    return totals


def _pool(
    config: Config, sources: Sequence[str], num_processes: int
) -> AbstractContextManager[RewardPool]:
    """Return the pool of the reward functions; the engine of the run's own judge needs torch."""
    from rlctl.runtime.rewards.pool import RewardPool
    from rlctl.runtime.rewards.request_limits import RequestSettings

    if config.reward.judge.model.path is None:
        requests = RequestSettings.from_config(config.reward, None)
        return RewardPool.from_config(config.reward, sources, num_processes, requests=requests)
    from rlctl.runtime.evaluate import judged_pool

    return judged_pool(config, sources, num_processes)


def response_entry(
    index: int, row: PromptRow, text: str, report: RewardReport, place: int
) -> dict[str, Any]:
    """Return what is printed of a response, whose result is at `place` in the report."""
    result = report.results[place]
    return {
        "answer": index,
        "score": result.score,
        "components": result.components,
        "pred": result.pred,
        "error": result.error,
        "ground_truth": row.ground_truth,
        "response": text,
    }


def _print_json(totals: _Totals, scores: TextIO) -> None:
    """Print one document, in the layout of `print_json`, from lines of JSON."""
    head = {
        "mean": totals.score / totals.count,
        "num_errors": totals.num_errors,
        "num_timeouts": totals.num_timeouts,
    }
    dumps = partial(json.dumps, indent=2, ensure_ascii=False, allow_nan=False)
    sys.stdout.write(dumps(head).removesuffix("\n}") + ',\n  "answers": [')
    for number, line in enumerate(scores):
        entry = dumps(json.loads(line)).replace("\n", "\n    ")
        sys.stdout.write(("," if number else "") + "\n    " + entry)
    sys.stdout.write("\n  ]\n}\n")
