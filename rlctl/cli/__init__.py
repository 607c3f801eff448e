"""The `rlctl` command: a frame that knows every command's name and one line of help, and imports a command's module only when it runs.

So `rlctl --help`, completion and a mistyped command cost no more than Typer itself, however many families there are.
"""

from __future__ import annotations

import os
from importlib import import_module
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_group

from rlctl import __version__
from rlctl.cli.shells import use_our_scripts


class Command(TyperCommand):
    """A line of the help that stands for a command of `module`, a module with a Typer `app`."""

    def __init__(self, name: str, module: str, help: str, panel: str) -> None:
        super().__init__(name, help=help, rich_help_panel=panel)
        self.module = module

    def load(self) -> Any:
        """The real thing: the command of this name in the module's app, or else the app itself as a family."""
        family = get_group(import_module(self.module).app)
        found = family.commands.get(self.name or "", family)
        if found is family:
            family.name, family.no_args_is_help = self.name, True
        return found


COMMANDS = (
    Command(
        "prep",
        "rlctl.cli.commands.prep",
        "Write the parquet files that training reads: GSM8K, arithmetic, your own.",
        "Data and rewards",
    ),
    Command(
        "data",
        "rlctl.cli.commands.data",
        "Show rows of a data file as the model will see them.",
        "Data and rewards",
    ),
    Command(
        "reward",
        "rlctl.cli.commands.reward",
        "Test a reward function on stored responses.",
        "Data and rewards",
    ),
    Command(
        "recipes",
        "rlctl.cli.commands.recipes",
        "List, show, copy and check the recipes.",
        "Recipes",
    ),
    Command(
        "config",
        "rlctl.cli.commands.config",
        "Show a composed configuration, and where each value comes from.",
        "Recipes",
    ),
    Command("train", "rlctl.cli.commands.train", "Train a model: ppo, grpo or sft.", "Training"),
    Command(
        "resume",
        "rlctl.cli.commands.resume",
        "Resume a run from its latest complete checkpoint, or the unfinished trials of a sweep.",
        "Training",
    ),
    Command(
        "stop",
        "rlctl.cli.commands.stop",
        "Stop runs or sweeps after the current step, save, and wait until they end.",
        "Training",
    ),
    Command(
        "eval",
        "rlctl.cli.commands.evaluate",
        "Generate and score responses to the validation prompts of a run or a model folder.",
        "Training",
    ),
    Command(
        "generate",
        "rlctl.cli.commands.evaluate",
        "Generate responses to prompts with the model's chat template.",
        "Training",
    ),
    Command(
        "sweep",
        "rlctl.cli.commands.sweep",
        "Search settings with many runs on one cluster.",
        "Training",
    ),
    Command("sweeps", "rlctl.cli.commands.sweeps", "List the sweeps, newest first.", "Runs"),
    Command(
        "runs",
        "rlctl.cli.commands.runs",
        "List runs, or remove, restore and tag them.",
        "Runs",
    ),
    Command(
        "export",
        "rlctl.cli.commands.export",
        "Write a run's policy as a folder that transformers and vLLM load.",
        "Runs",
    ),
    Command(
        "compare",
        "rlctl.cli.commands.compare",
        "Compare the settings of runs, and their metrics at the same step.",
        "Runs",
    ),
    Command(
        "show",
        "rlctl.cli.commands.runs",
        "Show the curves, settings and validation samples of a run.",
        "Runs",
    ),
    Command(
        "watch",
        "rlctl.cli.commands.watch",
        "Watch a run until it ends, including one that another process started.",
        "Runs",
    ),
    Command(
        "logs",
        "rlctl.cli.commands.watch",
        "Print the output of a run's worker processes.",
        "Runs",
    ),
    Command(
        "report",
        "rlctl.cli.commands.report",
        "Write one self-contained HTML file about runs: curves, alarms, samples, settings.",
        "Runs",
    ),
    Command(
        "loggers",
        "rlctl.cli.commands.loggers",
        "List the trackers, the mode each would choose, and problems with its settings.",
        "Runs",
    ),
    Command(
        "doctor",
        "rlctl.cli.commands.doctor",
        "Check the installation and the machine, and show how to fix each fault.",
        "Runs",
    ),
    Command(
        "version",
        "rlctl.cli.commands.version",
        "Show the versions of rlctl and its dependencies.",
        "Runs",
    ),
)


class Frame(TyperGroup):
    """The top level. Listing shows the stand-ins above; only resolving a command that was typed imports it."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        for command in COMMANDS:
            self.add_command(command)

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:
        name, command, rest = super().resolve_command(ctx, args)
        return name, command.load() if isinstance(command, Command) else command, rest


use_our_scripts()
app = typer.Typer(
    cls=Frame,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="First steps: `rlctl train ppo` runs the embedded quickstart; `rlctl runs` shows what it left behind.",
)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"rlctl {__version__}")
        raise typer.Exit


@app.callback()
def frame(
    version: Annotated[  # noqa: ARG001
        bool,
        typer.Option(
            "--version",
            callback=_version,
            is_eager=True,
            help="Show the version of rlctl and stop.",
        ),
    ] = False,
    debug: Annotated[
        bool, typer.Option("--debug", help="Show tracebacks of errors (also RLCTL_DEBUG=1).")
    ] = False,
) -> None:
    """Reinforcement-tune a language model from a parquet file of prompts, and keep the record of every experiment."""
    if debug:
        os.environ["RLCTL_DEBUG"] = "1"
