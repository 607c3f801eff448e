"""`rlctl debug --replay`: run a broken update again, and name the first value that broke it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from rlctl.cli.console import print_json, print_table, stdout
from rlctl.cli.options import Json, Root, Trust, run_argument
from rlctl.cli.stderr import notice, warn
from rlctl.terminal import visible

app = typer.Typer()

_EXAMPLES = """
  rlctl debug @failed --replay     the first update that broke

  rlctl debug runs/p/a/broken_updates/step_000007-actor-0 --replay
"""
_STATS = ("shape", "min", "max", "mean", "not_finite")


@app.command(
    epilog=_EXAMPLES,
    help="With --replay, run a skipped update again, from the weights of that moment, and print "
    "the first layer or input with a value that is not finite.",
)
def debug_replay(
    run: Annotated[str, run_argument("Run, or the folder of a broken update.", "RUN")],
    replay: Annotated[
        bool,
        typer.Option("--replay", help="Repeat the first broken update of the run, or a folder's."),
    ] = False,
    root: Root = None,
    trust: Trust = False,
    as_json: Json = False,
) -> bool:
    """Run a broken update again; return False without --replay."""
    if not replay:
        return False
    from rlctl.cli.startup import announce

    announce("loading the model")
    from rlctl.plugins.console.replay import Bundle
    from rlctl.plugins.console.replay import replay as repeat

    bundle = Bundle.find(run, root)
    repeated = repeat(bundle)
    if as_json:
        shown = {name: value for name, value in bundle.facts.items() if name != "images"}
        print_json({"bundle": bundle.path, "recorded": shown, "replay": repeated})
    else:
        _print(bundle.path, bundle.facts, repeated)
    return True


def _print(path: Path, facts: dict[str, Any], repeated: dict[str, Any]) -> None:
    found = repeated["found"]
    update = f"step {facts['step']}, {facts['role']}, after {facts['updates_before']} updates"
    stdout().print(visible(f"{path}\n{update}"))
    stdout().print(visible(f"in the run:    {_first(facts)}"))
    stdout().print(visible(f"in the replay: {_first(found)}, weights of {repeated['weights']}"))
    if not repeated["fits"]:
        warn("these are not the weights of the run at that moment, so the result may differ")
    shown = found or facts
    for title, rows in (
        ("layer", [(each["name"], each) for each in shown["layers"]]),
        ("batch", list(shown["batch"].items())),
    ):
        stdout().print()
        table = [[visible(name), *(_cell(stats[key]) for key in _STATS)] for name, stats in rows]
        print_table([title, *(name.replace("_", " ") for name in _STATS)], table)
    notice("not finite: number of values that are NaN or infinite; the others give min and max")


def _first(facts: dict[str, Any] | None) -> str:
    if facts is None:
        return "all values are finite"
    if (first := facts["first"]) is None:
        return "each value is finite, and the norm of the gradient is not"
    return "first not finite: {where} {name} ({not_finite} values of {shape})".format_map(first)


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    return value if isinstance(value, str) else f"{value:.4g}"
