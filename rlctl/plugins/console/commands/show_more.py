"""`rlctl show --advice`, `--tokens` and `--components`: why a run is slow, and what it learns."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import typer
from rich.color import Color
from rich.style import Style
from rich.text import Text

from rlctl.cli.console import paged, print_json, print_table, stdout
from rlctl.cli.options import Json, Root, RunName
from rlctl.cli.stderr import notice
from rlctl.errors import NotFoundError, UsageError
from rlctl.runs.run import Run
from rlctl.terminal import visible

app = typer.Typer()

Colouring = Literal["diff", "advantage", "entropy", "clip", "mask"]
_TEN = 10
_STEPS = 20  # whose responses are looked at, at most
_EXAMPLES = """
  rlctl show @last --advice                          what holds the run back

  rlctl show @last --samples --tokens advantage   coloured by advantages

  rlctl show @last --components   ten responses of the alarm reward_components
"""


@app.command(
    epilog=_EXAMPLES,
    help="With --advice, name the phase that holds the run back and a key to change. With "
    "--tokens, colour the tokens of training responses, or print their values into a pipe.",
)
def show_more(
    run: RunName,
    train: bool = False,
    step: int | None = None,
    number: int | None = None,
    tokens: Annotated[
        Colouring | None,
        typer.Option(
            "--tokens",
            help="Colour tokens by engine/trainer log-prob difference, advantage, entropy, clip or "
            "mask; needs a run with trainer.listeners=\\[token_values].",
        ),
    ] = None,
    components: Annotated[
        bool,
        typer.Option(
            "--components",
            help="Print ten training responses in which the component of the reward that rises is "
            "high and the one that falls is low.",
        ),
    ] = False,
    advice: Annotated[
        bool, typer.Option("--advice", help="Print the slowest phase and what to change.")
    ] = False,
    root: Root = None,
    as_json: Json = False,
) -> bool:
    """Show the chosen part; return False without one of the options."""
    del train
    if sum((tokens is not None, components, advice)) > 1:
        raise UsageError(
            "--advice, --tokens and --components exclude each other", hint="give one of them"
        )
    if not (tokens or components or advice):
        return False
    from rlctl.api import open_run

    found = open_run(run, root)
    if advice:
        _show_advice(found, as_json)
    elif components:
        _show_components(found, step, as_json)
    else:
        assert tokens is not None
        _show_tokens(found, step, tokens, number, as_json)
    return True


def _show_advice(run: Run, as_json: bool) -> None:
    from rlctl.plugins.console.advice import advice

    found = advice(run)
    if as_json:
        print_json(found)
        return
    first, last = found["steps"]
    seconds = found["seconds"]
    shares = found["shares"]
    stdout().print(f"steps {first} to {last}: {seconds['step']:.3g} s per step")
    rows = [
        [name, f"{seconds[name]:.3g}", f"{shares[name]:.0%}"] for name in seconds if name in shares
    ]
    print_table(["phase", "seconds", "share"], rows, right=["seconds", "share"])
    if (name := found["slowest"]) is not None:
        stdout().print(f"\n{name} holds the run back: {shares[name]:.0%} of its time")
    rows: list[list[str]] = []
    for hint in found["hints"]:
        gain = "unknown" if hint["gain"] is None else f"at most {hint['gain']:.0%}"
        rows.append([hint["phase"], hint["change"], gain, hint["why"]])
    if rows:
        stdout().print()
        print_table(["phase", "change", "gain", "derived from"], rows)
    else:
        notice("no known setting would save 2 % of the time")


def _show_components(run: Run, step: int | None, as_json: bool) -> None:
    from rlctl.cli.views.samples import print_sample
    from rlctl.runs.details import generation_steps
    from rlctl.tracking.alarm_rules import History, opposed
    from rlctl.tracking.jsonl import TRAINED, generations_file, read_generations

    history = History()
    for row in run.history():
        if step is None or row["step"] <= step:
            history.add(row)
    opposed(history)
    rising = history.words["rising"]
    falling = history.words["falling"]
    if not (rising and falling):
        raise NotFoundError(
            "this run has no two components of the reward that changed", where=str(run.path)
        )
    steps = [at for at in generation_steps(run.path, TRAINED) if step is None or at <= step]
    samples = [
        (at, sample)
        for at in steps[-_STEPS:]
        for sample in read_generations(generations_file(run.path, at, TRAINED))
        if rising in sample.components and falling in sample.components
    ]
    parts = [[sample.components[name] for _, sample in samples] for name in (rising, falling)]
    spans = [max(part, default=0.0) - min(part, default=0.0) or 1.0 for part in parts]

    def contrast(item: tuple[int, Any]) -> float:
        found = item[1].components
        return found[rising] / spans[0] - found[falling] / spans[1]

    chosen = sorted(samples, key=contrast, reverse=True)[:_TEN]
    if as_json:
        shown = [{"step": at, "sample": sample} for at, sample in chosen]
        print_json({"rising": rising, "falling": falling, "samples": shown})
        return
    for at, sample in chosen:
        stdout().print(Text(f"step {at}", "bold"))
        print_sample(sample)
    notice(
        f"{rising} rises while {falling} falls: {len(chosen)} of {len(samples)} stored responses "
        f"of the last {len(steps[-_STEPS:])} steps, the clearest first"
    )


def _show_tokens(run: Run, step: int | None, kind: str, number: int | None, as_json: bool) -> None:
    from rlctl.plugins.console.token_values import KINDS, coloured, plain, token_rows

    at, rows = token_rows(run, step)
    if as_json:
        print_json({"step": at, "responses": rows[:number]})
        return
    out = stdout()
    in_colour = out.color_system is not None and not out.no_color
    with paged():
        for row in rows[:number]:
            out.print(Text(f"score {row['score']:g}", "bold"))
            out.print(Text(visible(row["prompt"].strip()), "dim"))
            if in_colour:
                parts = [(visible(text), _style(x)) for text, _, x in coloured(row, kind)]
                out.print(Text.assemble(*parts))
            else:
                out.print(Text(plain(row, kind)))
            out.print()
    notice(
        f"{len(rows[:number])} of {len(rows)} responses of step {at}, by {kind}: "
        f"{KINDS[kind].means}; green is high, red is low or far off, relative to the response"
    )


def _style(strength: float) -> Style:
    """Return black on green for 1, on red for −1; no style near 0."""
    if abs(strength) < 0.05:
        return Style()
    faded = round(255 * (1 - abs(strength)))
    background = Color.from_rgb(255, faded, faded)
    if strength > 0:
        background = Color.from_rgb(faded, 255, faded)
    return Style(color="black", bgcolor=background)
