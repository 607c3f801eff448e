"""`rlctl data from-runs`: data files from the stored responses of runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from rlctl.cli.console import print_json
from rlctl.cli.options import Json, Root, RunNames
from rlctl.cli.stderr import notice
from rlctl.errors import NotFoundError, UsageError
from rlctl.text import plural

if TYPE_CHECKING:
    from rlctl.data_prep.rows import PromptRow
    from rlctl.plugins.console.run_samples import Response, Responses

app = typer.Typer(add_completion=False)

Form = Literal["sft", "pairs", "prompts"]

_EXAMPLES = """
Examples:

  rlctl data from-runs sampled --where 'score == 1' --best 2 --out a.parquet

  rlctl data from-runs @last --as pairs --margin 0.5 --out pairs.parquet

  rlctl data from-runs a b --as prompts --out hard.parquet \\
    --where 'mean > 0.1 and mean < 0.9'

  rlctl data from-runs @last --out short.parquet \\
    --where 'finish == "stop" and length < 200'
"""
_NEXT = {
    "sft": "rlctl train sft data.train_files={file} data.val_files=null",
    "pairs": "rlctl train dpo data.train_files={file} data.val_files=null",
    "prompts": "rlctl train grpo data.train_files={file}",
}


Out = Annotated[
    Path, typer.Option("--out", metavar="FILE", help="Parquet file to write or replace.")
]
As = Annotated[
    Form,
    typer.Option(
        "--as",
        help="Responses to learn from (sft, in extra_info.answer), pairs of a better and a worse "
        "response (pairs), or only the rows of the prompts.",
    ),
]
Where = Annotated[
    str | None,
    typer.Option(
        "--where",
        metavar="EXPR",
        help="Take only responses that match, in the language of `rlctl runs --where`. Names: "
        "score, right, finish, length, pred, ground_truth, data_source, step, run, kind, the "
        "components of the score, and mean and count of all responses to the prompt.",
    ),
]
Best = Annotated[
    int | None,
    typer.Option("--best", min=1, metavar="N", help="Take at most N responses or pairs a prompt."),
]
Margin = Annotated[
    float, typer.Option(min=0, help="Pairs: how much better the score of the better one must be.")
]
Validation = Annotated[
    bool,
    typer.Option(
        "--validation", help="Take responses to validation prompts, too: do not validate there."
    ),
]


@app.command("from-runs", epilog=_EXAMPLES)
def from_runs(
    runs: RunNames,
    out: Out,
    form: As = "sft",
    where: Where = None,
    best: Best = None,
    margin: Margin = 0.0,
    validation: Validation = False,
    root: Root = None,
    as_json: Json = False,
) -> None:
    """Write training data from the stored responses of runs.

    Equal responses to a prompt are taken once. Each row says which run, step and checkpoint it is
    from. Runs keep all training responses with trainer.rollout_data_dir=DIR, and else those to a
    few prompts.
    """
    from rlctl.api import open_run
    from rlctl.cli.startup import announce
    from rlctl.plugins.console.run_samples import Responses, counts
    from rlctl.runs.query import Query

    if margin and form != "pairs":
        raise UsageError("--margin is for pairs", hint="add --as pairs")
    announce("reading the responses and the data of the runs")
    opened = [open_run(name, root) for name in dict.fromkeys(runs)]
    responses = Responses(opened, Query(where) if where else None, validation)
    by_row = _by_row(responses, several_turns=form == "prompts")
    rows = [
        new
        for row, members in by_row.values()
        for new in _rows(form, row, _ranked(members), best, margin)
    ]
    left_out = responses.left_out
    if not rows:
        what = "pair" if form == "pairs" else "row"
        raise NotFoundError(f"no {what} is left ({counts(left_out) or 'no two scores differ'})")
    _write(out, rows, by_row, left_out, as_json, form)


def _by_row(
    responses: Responses, several_turns: bool
) -> dict[str, tuple[PromptRow, list[Response]]]:
    """Return row and responses by prompt; count those without a row, and other episodes."""
    from rlctl.plugins.console.run_samples import prompt_rows

    matching = responses.matching
    of_runs = {run.key: prompt_rows(run) for run in responses.runs}
    by_row: dict[str, tuple[PromptRow, list[Response]]] = {}
    for response in matching:
        row = of_runs[response.run.key].get(response.sample.prompt)
        if row is None:
            responses.left_out["without a row of the run's data"] += 1
        elif not (response.is_single_turn or several_turns):
            responses.left_out["of several turns"] += 1
        else:
            by_row.setdefault(response.sample.prompt, (row, []))[1].append(response)
    return by_row


def _write(
    out: Path,
    rows: Sequence[PromptRow],
    by_row: Mapping[str, object],
    left_out: Counter[str],
    as_json: bool,
    form: Form,
) -> None:
    """Write the file, and print what it has."""
    from rlctl.data_prep.rows import write_rows
    from rlctl.plugins.console.run_samples import counts

    write_rows(out, rows)
    if as_json:
        print_json(
            {"file": out, "rows": len(rows), "prompts": len(by_row), "left_out": dict(left_out)}
        )
        return
    notice(f"{out}: {plural(len(rows), 'row')} of {plural(len(by_row), 'prompt')}")
    if left_out:
        notice(f"left out: {counts(left_out)}")
    notice(f"next: {_NEXT[form].format(file=out)}")


def _ranked(responses: Sequence[Response]) -> list[Response]:
    """Return the responses to a prompt: best score first, then the shorter, then the newer."""

    def rank(response: Response) -> tuple[float, int, int]:
        return -response.sample.score, response.sample.length, -response.step

    return sorted(responses, key=rank)


def _rows(
    form: Form, row: PromptRow, ranked: Sequence[Response], best: int | None, margin: float
) -> Iterator[PromptRow]:
    """Yield the new rows of one prompt."""
    if form == "prompts":
        scores = [response.sample.score for response in ranked]
        info = {"mean_score": sum(scores) / len(scores), "num_responses": len(scores)}
        yield replace(row, extra_info=row.extra_info | ranked[0].provenance() | info)
    elif form == "sft":
        for response in ranked[:best]:
            info = {"answer": response.sample.response} | response.provenance()
            yield replace(row, extra_info=row.extra_info | info)
    else:
        pairs = zip(ranked, reversed(ranked), strict=True)
        for better, worse in list(pairs)[: min(best or len(ranked), len(ranked) // 2)]:
            difference = better.sample.score - worse.sample.score
            if difference > 0 and difference >= margin:
                info = {
                    "chosen": better.sample.response,
                    "rejected": worse.sample.response,
                    "margin": difference,
                    "rejected_from_run": worse.run.key,
                    "rejected_from_step": worse.step,
                }
                yield replace(row, extra_info=row.extra_info | better.provenance() | info)
