"""Terminal views of sweeps: live table, plan and results."""

from __future__ import annotations

import logging
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from rich.live import Live
from rich.table import Table
from rich.text import Text

from rlctl.cli.console import print_json, print_table, stdout, table
from rlctl.cli.stderr import notice, stderr
from rlctl.text import format_resources, plural, sparkline

if TYPE_CHECKING:
    from rlctl.sweeps.child import Child
    from rlctl.sweeps.results import TrialResult
    from rlctl.sweeps.study import Study
    from rlctl.sweeps.sweep_launch import View
    from rlctl.sweeps.sweep_plan import SweepPlan
    from rlctl.sweeps.sweep_record import Outcome, SweepDir

log = logging.getLogger(__name__)

_TRIAL_COLUMNS = ("trial", "parameters", "value", "best", "curve", "step", "state", "runs")
_SAMPLED = re.compile(r"^-?\d+\.\d{5,}(e[+-]?\d+)?$")
_COLOURS = {
    "finished": "green",
    "running": "cyan",
    "pruned": "yellow",
    "failed": "red",
    "lost": "red",
    "stopped": "yellow",
}


@contextmanager
def live() -> Iterator[View]:
    """Show a live table of the sweep on a terminal, with log lines above it.

    Elsewhere log the step of each trial, at most ten times a trial.
    """
    if not stderr().is_terminal:
        lines = _ProgressLines()
        yield lambda _study, children: lines.update(children)
        return
    with Live(console=stderr(), refresh_per_second=2, transient=True) as panel:
        yield lambda study, children: panel.update(_follow(study, children))


class _ProgressLines:
    """Log of the steps of trials: a line whenever another tenth of the steps is done."""

    def __init__(self) -> None:
        self.tenths: dict[int, int] = {}  # by number of the trial

    def update(self, children: Sequence[Child]) -> None:
        for number, (step, total) in _progress(children).items():
            tenth = 0
            if total:
                tenth = 10 * step // total
            if tenth > self.tenths.get(number, 0) and step < total:
                log.info("trial %d: step %d of %d", number, step, total)
            self.tenths[number] = tenth


def _progress(children: Sequence[Child]) -> dict[int, tuple[int, int]]:
    """Return step and number of steps of each trial with a step: those of its slowest run."""
    steps: dict[int, tuple[int, int]] = {}
    for child in children:
        if child.rows:
            now = int(child.rows[-1]["step"]), child.total_steps
            steps[child.trial.number] = min(now, steps.get(child.trial.number, now))
    return steps


def _follow(study: Study, children: Sequence[Child]) -> Table:
    started = {child.trial.number for child in children if child.state != "waiting"}
    built = trials_table(study.outcomes(), _progress(children), started, study.settings.mode)
    ended = sum(outcome.state in ("finished", "pruned", "failed") for outcome in study.outcomes())
    built.title = f"{ended} of {plural(study.num_trials, 'trial')} ended"
    built.title_justify = "left"
    return built


def trials_table(
    outcomes: Sequence[Outcome],
    progress: Mapping[int, tuple[int, int]],
    started: Set[int],
    mode: str,
) -> Table:
    """Return the live table of trials.

    `progress` has step and number of steps by trial, `started` the trials with a run; `mode` is
    that of the sweep.
    """
    choose = min
    if mode == "max":
        choose = max
    rows: list[list[str | Text]] = []
    for outcome in outcomes:
        number = outcome.trial.number
        state = outcome.state
        if state == "running" and number not in started:
            state = "waiting"
        step = ""
        if number in progress:
            step = step_of(*progress[number])
        last = None
        if outcome.values:
            last = outcome.values[max(outcome.values)]
        best = outcome.value
        if best is None:
            best = choose(outcome.values.values(), default=None)
        overrides = short(outcome.trial.overrides)
        rows.append([str(number), overrides, step, _number(last), _number(best), _coloured(state)])
    columns = ("trial", "parameters", "step", "value", "best", "state")
    return table(columns, rows, right=("trial", "step", "value", "best"))


def step_of(step: int, total: int) -> str:
    """Return `k of n`, or only the step while the number of steps is not known."""
    if not total:
        return str(step)
    return f"{step} of {total}"


def print_plan(plan: SweepPlan, as_json: bool) -> None:
    """Print the trials of a sweep and the resources that a run of each needs."""
    settings = plan.settings
    if as_json:
        trials = [
            {"overrides": list(overrides), "needs": dict(need)} for overrides, need in plan.needs
        ]
        shown = {
            "recipe": plan.source,
            "fixed": list(plan.fixed),
            "axes": [axis.text for axis in plan.axes],
            "runs": plan.num_runs,
        }
        print_json(
            shown | {"steps": plan.total_steps, "settings": settings.model_dump(), "trials": trials}
        )
        return
    head = (
        f"{plural(plan.num_runs, 'run')} of {plural(plan.total_steps, 'step')}: {plan.source}, "
        f"sampler {settings.sampler}, pruner {settings.pruner}"
    )
    stdout().print(Text(f"{head}, {plural(settings.seeds, 'seed')} a trial"))
    rows = [
        [str(number), shlex.join(overrides), format_resources(need)]
        for number, (overrides, need) in enumerate(plan.needs)
    ]
    if settings.sampler == "grid":
        print_table(("trial", "overrides", "a run needs"), rows)
    else:
        print_table(("tried", "overrides", "a run needs"), rows)
        notice("values are sampled while the sweep runs; the table shows the ends of each axis")


def print_sweep(sweep: SweepDir) -> None:
    """Print the trials of a sweep, best first, and the importance of each parameter."""
    from rlctl.sweeps.results import results
    from rlctl.sweeps.trackers import lines as tracker_lines

    found = results(sweep)
    record = sweep.record
    verb = f"  {record.verb} --recipe {record.recipe}  "
    stdout().print(Text.assemble((record.name, "bold"), verb, _coloured(sweep.state)))
    metric = record.settings["metric"] or "first validation metric"
    stdout().print(Text(f"  {metric}, {record.settings['mode']}"))
    _print_trials(found.trials)
    if found.importances:
        stdout().print(
            Text(
                "importance  "
                + "  ".join(
                    f"{key.rpartition('.')[2]} {share:.0%}"
                    for key, share in found.importances.items()
                )
            )
        )
    lines = list(tracker_lines(sweep))
    if any(trial.state == "finished" for trial in found.trials):
        lines.append(f"next  rlctl sweep best {record.name} --export best.yaml")
    for line in lines:
        style = ""
        if line.startswith("next"):
            style = "dim"
        stdout().print(Text(line, style=style), soft_wrap=True)


def _print_trials(trials: Sequence[TrialResult]) -> None:
    """Print a row per trial, what ± means, and why trials have no result."""
    print_table(_TRIAL_COLUMNS, map(_result_row, trials), right=("trial", "value", "best", "step"))
    if seeds := max((trial.n for trial in trials if trial.low is not None), default=0):
        about = f"value ± half of the 95 % interval of the mean (Student's t), n = {seeds} seeds"
        stdout().print(Text(about, style="dim"))
    for trial in trials:
        if trial.reason:
            reason = "\n  ".join(trial.reason.strip().splitlines())
            stdout().print(Text(f"trial {trial.number} {trial.state}: {reason}"))


def show_sweep(sweep: SweepDir, as_json: bool) -> None:
    """Print a sweep as `rlctl show` does."""
    from rlctl.sweeps.results import results
    from rlctl.sweeps.trackers import places

    if as_json:
        print_json(results(sweep).as_json() | {"trackers": places(sweep)})
    else:
        print_sweep(sweep)


def print_best(sweep: SweepDir, trial: TrialResult) -> None:
    """Print one trial and its overrides."""
    _print_trials([trial])
    stdout().print(Text(f"  {shlex.join(trial.overrides)}  ({sweep.record.name})"))


def print_sweeps(found: Sequence[dict[str, Any]]) -> None:
    """Print one line per sweep."""
    if not found:
        notice("no sweeps yet; `rlctl sweep --help` shows how to start one")
        return
    rows = [
        [
            row["name"],
            row["project"],
            _coloured(row["state"]),
            ", ".join(f"{count} {state}" for state, count in row["trials"].items()),
            _number(row["best"]),
            short(row["axes"]),
        ]
        for row in found
    ]
    print_table(("sweep", "project", "state", "trials", "best", "axes"), rows, right=("best",))


def short(overrides: Sequence[str]) -> str:
    """Shorten overrides for a table: last part of each key, four digits of a sampled number."""
    pairs = [text.partition("=") for text in overrides]
    return "  ".join(
        f"{key.rpartition('.')[2]}={_SAMPLED.sub(lambda found: f'{float(found[0]):.4g}', value)}"
        for key, _, value in pairs
    )


def _result_row(trial: TrialResult) -> list[str | Text]:
    value = _number(trial.value)
    if trial.low is not None and trial.high is not None:
        value += f" ± {(trial.high - trial.low) / 2:.2g}"
    step = ""
    if trial.step is not None:
        step = str(trial.step)
    return [
        str(trial.number),
        short(trial.overrides),
        value,
        _number(trial.best),
        sparkline(trial.curve, 20),
        step,
        _coloured(trial.state),
        " ".join(trial.runs),
    ]


def _number(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:.4g}"


def _coloured(state: str) -> Text:
    return Text(state, style=_COLOURS.get(state, ""))
