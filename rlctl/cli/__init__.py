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

from rlctl import __version__, plugins
from rlctl.cli.shells import replace_completion_scripts


class LazyCommand(TyperCommand):
    """Name and help of a command in the Typer `app` of `module`, which is imported later."""

    def __init__(self, name: str, module: str, help: str, panel: str | None) -> None:
        super().__init__(name, help=help, rich_help_panel=panel)
        self.module = module

    def load(self) -> Any:
        """Import the module; return its command of this name, or its app as a command group."""
        group = get_group(import_module(self.module).app)
        found = group.commands.get(self.name or "", group)
        if found is group:
            group.name = self.name
            group.help = self.help
            group.no_args_is_help = True
        for options in plugins.names("command_options"):
            if options.partition(".")[0] == self.name:
                from rlctl.cli.more_options import add_options

                add_options(found, plugins.load("command_options", options))
        return found


# Commands by panel, with their help. Command groups take it from here.
_PANELS = {
    "Data and rewards": {
        "prep": "Write data as parquet files: GSM8K, evaluation sets, pairs or your own.",
        "data": "Show rows of a data file as the model will see them.",
        "reward": "Test a reward function or model on stored responses.",
    },
    "Recipes": {
        "recipes": "List, show, copy and check recipes.",
        "config": "Show a composed configuration and the origin of each value.",
        "explain": "Explain the code of an error, a metric, an alarm or a config key.",
    },
    "Training": {
        "train": "Train a model: ppo, grpo, sft, dpo, ...",
        "resume": "Resume from the latest complete checkpoint.",
        "stop": "Stop runs or sweeps after the current step, save, and wait until they end.",
        "engines": "List, add and drain the rollout engines of a running run.",
        "eval": "Generate and score responses to validation prompts of a run or a model folder.",
        "generate": "Generate responses to prompts with the model's chat template.",
        "sweep": "Search settings with many runs on one cluster.",
    },
    "Runs": {
        "sweeps": "List the sweeps, newest first.",
        "runs": "List runs, or remove, prune, restore and tag them.",
        "export": "Write a run's policy or reward model as a folder for transformers and vLLM.",
        "show": "Show the curves, settings and validation samples of a run.",
        "watch": "Watch a run, a sweep or one of its trials until it ends, from any shell.",
        "logs": "Print the output of a run's worker processes.",
        "debug": "List the processes of a running run, or print their stacks.",
        "loggers": "List the trackers, the mode each would choose, and problems with its settings.",
        "doctor": "Check the installation and suggest a fix for each problem.",
        "completion": "Print a shell's completion script; `rlctl --install-completion` adds it.",
        "version": "Show the versions of rlctl and its dependencies.",
    },
}
# Modules of commands, if they have another name.
_MODULES = {
    **dict.fromkeys(("eval", "generate"), "evaluate"),
    **dict.fromkeys(("show", "sweeps"), "runs"),
    **dict.fromkeys(("logs", "stop", "debug"), "watch"),
    **dict.fromkeys(("loggers", "version", "completion"), "doctor"),
}
_COMMANDS = tuple(
    LazyCommand(name, f"rlctl.cli.commands.{_MODULES.get(name, name)}", help, panel)
    for panel, commands in _PANELS.items()
    for name, help in commands.items()
)


class PluginCommand(LazyCommand):
    """Command of a plug-in: a `typer.Typer` that is an entry point of the kind `module`."""

    def load(self) -> Any:
        """Import the package; return the app's command of this name, its only one, or the group."""
        from rlctl.plugins.faults import check_app

        app = plugins.load(self.module, self.name or "")
        check_app(self.name, app)
        group: Any = get_group(app)
        found = group.commands.get(self.name, group)
        if found is group and len(group.commands) == 1 and not app.registered_callback:
            (found,) = group.commands.values()
        found.name = self.name
        return found


class PluginGroup(TyperGroup):
    """Group with commands of plug-ins, which cannot replace those of rlctl.

    Only the command that runs is imported. `kind` is the kind of the plug-ins.
    """

    kind = "commands"

    def list_commands(self, ctx: Any) -> list[str]:
        """Return the names of all commands."""
        found = super().list_commands(ctx)
        for name, shown in self._plugins().items():
            if name not in found:
                place = len(found)
                if shown.before in found:
                    place = found.index(shown.before)
                found.insert(place, name)
        return found

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return a command; None if neither rlctl nor another package has it."""
        command = super().get_command(ctx, cmd_name)
        if command is None and (shown := self._plugins().get(cmd_name)) is not None:
            return PluginCommand(cmd_name, self.kind, shown.help, shown.panel)
        return command

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:
        """Find the command in `args` and import it."""
        name, command, rest = super().resolve_command(ctx, args)
        if isinstance(command, LazyCommand):
            command = command.load()
        return name, command, rest

    def _plugins(self) -> dict[str, plugins.CommandHelp]:
        """Return the commands of plug-ins with their help, in the order of lists."""
        installed = plugins.packages(self.kind)
        group = self.kind.partition(".")[2]
        tables = [
            plugins.load("command_help", table)
            for table in plugins.names("command_help")
            if table.partition(".")[2] == group
        ]
        described = {
            name: shown
            for table in tables
            for key, shown in table.items()
            if (name := key.removeprefix(f"{self.kind}.")) in installed
        }
        others = {
            name: plugins.CommandHelp(f"A command of the package {package}.", "Plug-ins")
            for name, package in installed.items()
        }
        return described | {name: others[name] for name in others if name not in described}


class RootGroup(PluginGroup):
    """Top-level command group."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        for command in _COMMANDS:
            self.add_command(command)


def all_commands() -> list[LazyCommand]:
    """Return the commands below `rlctl`, also those of plug-ins, without importing them."""
    group: Any = get_group(app)
    return [group.get_command(None, name) for name in group.list_commands(None)]


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
            "--version", callback=_print_version, is_eager=True, help="Show the version and exit."
        ),
    ] = False,
    debug: Annotated[
        bool, typer.Option("--debug", help="Show tracebacks of errors (or set RLCTL_DEBUG=1).")
    ] = False,
) -> None:
    """Train language models with reinforcement learning and record every experiment."""
    if debug:
        os.environ["RLCTL_DEBUG"] = "1"
