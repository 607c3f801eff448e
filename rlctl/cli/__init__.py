"""The `rlctl` command: a table of commands whose modules are imported only when they run.

This keeps `rlctl --help` and completion fast.
"""

from __future__ import annotations

import os
from importlib import import_module
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_group

from rlctl import __version__
from rlctl.cli.shells import replace_completion_scripts


class LazyCommand(TyperCommand):
    """Name and help of a command in the Typer `app` of `module`, which is imported later."""

    def __init__(self, name: str, module: str, help: str, panel: str) -> None:
        super().__init__(name, help=help, rich_help_panel=panel)
        self.module = module

    def load(self) -> Any:
        """Import the module; return its command of this name, or its app as a command group."""
        group = get_group(import_module(self.module).app)
        found = group.commands.get(self.name or "", group)
        if found is group:
            group.name, group.no_args_is_help = self.name, True
        return found


COMMANDS = (
    LazyCommand(
        "new",
        "rlctl.cli.commands.new",
        "Write a recipe and a reward function for your own data, and check them.",
        "Data and rewards",
    ),
    LazyCommand(
        "prep",
        "rlctl.cli.commands.prep",
        "Write training data as parquet files: GSM8K, arithmetic, pairs or your own.",
        "Data and rewards",
    ),
    LazyCommand(
        "data",
        "rlctl.cli.commands.data",
        "Show rows of a data file as the model will see them.",
        "Data and rewards",
    ),
    LazyCommand(
        "reward",
        "rlctl.cli.commands.reward",
        "Test a reward function or model on stored responses.",
        "Data and rewards",
    ),
    LazyCommand(
        "env",
        "rlctl.cli.commands.env",
        "List, show and test environments and tools.",
        "Data and rewards",
    ),
    LazyCommand(
        "recipes",
        "rlctl.cli.commands.recipes",
        "List, show, copy and check recipes.",
        "Recipes",
    ),
    LazyCommand(
        "import",
        "rlctl.cli.commands.import_verl",
        "Turn a script of verl into a recipe.",
        "Recipes",
    ),
    LazyCommand(
        "config",
        "rlctl.cli.commands.config",
        "Show a composed configuration and the origin of each value.",
        "Recipes",
    ),
    LazyCommand(
        "explain",
        "rlctl.cli.commands.explain",
        "Explain the code of an error, a metric, an alarm or a config key.",
        "Recipes",
    ),
    LazyCommand(
        "train", "rlctl.cli.commands.train", "Train a model: ppo, grpo, sft, dpo, ...", "Training"
    ),
    LazyCommand(
        "fit",
        "rlctl.cli.commands.fit",
        "Find the fewest devices and the largest micro-batch that the memory allows.",
        "Training",
    ),
    LazyCommand(
        "resume",
        "rlctl.cli.commands.resume",
        "Resume from the latest complete checkpoint.",
        "Training",
    ),
    LazyCommand(
        "stop",
        "rlctl.cli.commands.stop",
        "Stop runs or sweeps after the current step, save, and wait until they end.",
        "Training",
    ),
    LazyCommand(
        "engines",
        "rlctl.cli.commands.engines",
        "List, add and drain the rollout engines of a running run.",
        "Training",
    ),
    LazyCommand(
        "eval",
        "rlctl.cli.commands.evaluate",
        "Generate and score responses to the validation prompts of a run or a model folder.",
        "Training",
    ),
    LazyCommand(
        "generate",
        "rlctl.cli.commands.evaluate",
        "Generate responses to prompts with the model's chat template.",
        "Training",
    ),
    LazyCommand(
        "sweep",
        "rlctl.cli.commands.sweep",
        "Search settings with many runs on one cluster.",
        "Training",
    ),
    LazyCommand("sweeps", "rlctl.cli.commands.sweeps", "List the sweeps, newest first.", "Runs"),
    LazyCommand(
        "runs",
        "rlctl.cli.commands.runs",
        "List runs, or remove, restore and tag them.",
        "Runs",
    ),
    LazyCommand(
        "export",
        "rlctl.cli.commands.export",
        "Write a run's policy or reward model as a folder that transformers and vLLM load.",
        "Runs",
    ),
    LazyCommand(
        "compare",
        "rlctl.cli.commands.compare",
        "Compare the settings of runs, and their metrics at the same step.",
        "Runs",
    ),
    LazyCommand(
        "show",
        "rlctl.cli.commands.runs",
        "Show the curves, settings and validation samples of a run.",
        "Runs",
    ),
    LazyCommand(
        "watch",
        "rlctl.cli.commands.watch",
        "Watch a run until it ends, including one that another process started.",
        "Runs",
    ),
    LazyCommand(
        "logs",
        "rlctl.cli.commands.watch",
        "Print the output of a run's worker processes.",
        "Runs",
    ),
    LazyCommand(
        "debug",
        "rlctl.cli.commands.debug",
        "List the processes of a running run, or print their stacks.",
        "Runs",
    ),
    LazyCommand(
        "board",
        "rlctl.cli.commands.board",
        "Show all runs in the browser: live curves, comparisons, sweeps, samples, logs.",
        "Runs",
    ),
    LazyCommand(
        "report",
        "rlctl.cli.commands.report",
        "Write one self-contained HTML file about runs: curves, alarms, samples, settings.",
        "Runs",
    ),
    LazyCommand(
        "loggers",
        "rlctl.cli.commands.loggers",
        "List the trackers, the mode each would choose, and problems with its settings.",
        "Runs",
    ),
    LazyCommand(
        "doctor",
        "rlctl.cli.commands.doctor",
        "Check the installation and suggest a fix for each problem.",
        "Runs",
    ),
    LazyCommand(
        "completion",
        "rlctl.cli.commands.completion",
        "Print the completion script of a shell; `rlctl --install-completion` installs it.",
        "Runs",
    ),
    LazyCommand(
        "version",
        "rlctl.cli.commands.version",
        "Show the versions of rlctl and its dependencies.",
        "Runs",
    ),
)


class RootGroup(TyperGroup):
    """Top-level command group; only the command that runs is imported."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        for command in COMMANDS:
            self.add_command(command)

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:
        """Find the command in `args` and import it."""
        name, command, rest = super().resolve_command(ctx, args)
        return name, command.load() if isinstance(command, LazyCommand) else command, rest


replace_completion_scripts()
app = typer.Typer(
    cls=RootGroup,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Start with `rlctl train ppo`, which runs the built-in quickstart, and `rlctl runs`.",
)


def _print_version(requested: bool) -> None:
    if requested:
        typer.echo(f"rlctl {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[  # noqa: ARG001
        bool,
        typer.Option(
            "--version",
            callback=_print_version,
            is_eager=True,
            help="Show the version and exit.",
        ),
    ] = False,
    debug: Annotated[
        bool, typer.Option("--debug", help="Show tracebacks of errors (or set RLCTL_DEBUG=1).")
    ] = False,
) -> None:
    """Train language models with reinforcement learning and record every experiment."""
    if debug:
        os.environ["RLCTL_DEBUG"] = "1"
