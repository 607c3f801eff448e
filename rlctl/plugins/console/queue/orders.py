"""Orders from command lines: `rlctl train`, `sweep` or `resume`, checked before they wait."""

from __future__ import annotations

import io
import math
import os
import sys
from collections.abc import Collection, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import typer
from typer.main import get_group

from rlctl.cli import app
from rlctl.cli.commands.train import common_settings, loggers, starting_recipe
from rlctl.cli.train_variants import from_name
from rlctl.cores import allowed_cores
from rlctl.errors import UsageError
from rlctl.plugins.console.queue.queue_file import Order, secrets
from rlctl.recipes import schema
from rlctl.redaction import redact_word
from rlctl.runs.run import Run
from rlctl.suggest import hydra_text

_KINDS = ("train", "sweep", "resume")
_LIMITS = ("max_time", "save_by", "retries")  # given again to a resumed run
_OF_SEARCH = ("sampler", "trials", "metric", "mode", "pruner", "parallel", "seeds")
_ELSEWHERE = ("address", "detach", "slurm", "dry_run")
_NOT_PASSED = (*_ELSEWHERE, "as_json")

Search = tuple[str, str, Sequence[str]]  # verb, recipe and overrides of a sweep


@dataclass(frozen=True)
class Line:
    """Checked command: its words, the folder of its run, its configuration, the number of runs.

    `parallel` is that of runs at the same time, None if it is not limited. `search`
    is that of a new sweep.
    """

    words: Sequence[str]
    again: Sequence[str]
    folder: Path
    config: schema.Config
    inline: bool = False
    parallel: int | None = 1
    search: Search | None = None

    def order(self, cores: int | None = None, now: bool = False) -> Order:
        """Return the order for this machine: GPUs as configured, or `cores`, by default all."""
        kind, number = self._devices()
        if kind == "core" and cores is not None and cores > (present := allowed_cores()):
            hint = f"--cores {present}, or leave it out for all"
            raise UsageError(f"this machine has {present} cores, not {cores}", hint=hint)
        named: list[str] = []
        if kind == "GPU":
            visible = os.environ.get("CUDA_VISIBLE_DEVICES") or ""
            named = [f"GPU {name}" for name in visible.split(",") if name]
        mine = secrets(os.environ)
        return Order(
            self.folder.name,
            self.words,
            self.again,
            str(self.folder),
            os.getcwd(),
            sys.executable,
            {name: value for name, value in os.environ.items() if name not in mine},
            kind,
            cores if kind == "core" else number,
            named or None,
            now,
        )

    def _devices(self) -> tuple[str, int | None]:
        from rlctl.runtime.cluster.ray_access import address_of
        from rlctl.runtime.planning.devices import Devices
        from rlctl.runtime.planning.run_resources import run_resources

        trainer = self.config.trainer
        if trainer.nnodes > 1 or (not self.inline and address_of(self.config.ray_kwargs.ray_init)):
            hint = "--address runs it as a job of a cluster"
            raise UsageError("the queue is for runs on this machine alone", hint=hint)
        if self.inline:
            return ("GPU" if Devices.from_config(trainer).kind == "cuda" else "core"), 1
        gpus = run_resources(self.config).get("GPU")
        if not gpus:
            return "core", None
        if self.parallel is None:
            return "GPU", None
        return "GPU", math.ceil(gpus * self.parallel - 1e-6)


def context_of(words: Sequence[str]) -> typer.Context:
    """Return the context of `rlctl WORDS`. Raises UsageError unless a queue can run it."""
    rest = list(words)
    if rest[:1] == ["rlctl"]:
        del rest[0]
    verb = rest[0] if rest else "nothing"
    if verb not in _KINDS:
        hint = "rlctl queue add train ppo --recipe mine.yaml"
        raise UsageError(f"the queue runs {', '.join(_KINDS)}, not {verb}", hint=hint)
    command: Any = get_group(app)
    context: Any = command.make_context("rlctl", rest)
    while hasattr(command, "resolve_command"):
        name, command, rest = command.resolve_command(
            context, [*context._protected_args, *context.args]
        )
        context = command.make_context(name, rest, parent=context)
    for name in _ELSEWHERE:
        if context.params.get(name):
            option = f"--{name.replace('_', '-')}"
            raise UsageError(f"an entry of the queue cannot have {option}", hint="leave it out")
    return context


def words_of(context: Any, only: Collection[str] | None = None) -> list[str]:
    """Return the command line of a context; `only` limits it to options of these names."""
    options: list[str] = []
    arguments: list[str] = []
    for parameter in context.command.params:
        value = context.params.get(parameter.name)
        if parameter.name in _NOT_PASSED or (only is not None and parameter.name not in only):
            continue
        if value is None or value == parameter.default:
            continue
        values = value if isinstance(value, list | tuple) else [value]
        if parameter.param_type_name == "argument":
            arguments += map(str, values)
        elif isinstance(value, bool):
            options.append((parameter.opts if value else parameter.secondary_opts)[0])
        else:
            options += [word for each in values for word in (parameter.opts[0], str(each))]
    if only is not None:
        return [*options, *arguments]
    return [*context.command_path.split()[1:], *options, *arguments]


def checked(context: Any, *, here: bool = True) -> Line:
    """Return the command of a context after the checks of a dry run; starts and writes nothing.

    If it runs not `here`, devices and data are left out of the checks.
    """
    words = words_of(context)
    for word in words:
        if word != redact_word(word):
            hint = "KEY='${oc.env:NAME}' reads it from the environment"
            where = redact_word(word)
            raise UsageError("a command that waits is stored without secrets", where, hint=hint)
    kind = words[0]
    if kind == "resume":
        return _resumed(context.params, words)
    if here:
        with redirect_stdout(io.StringIO()):
            # With --json it says less on stderr.
            context.params |= {"dry_run": True, "as_json": True, "detach": False, "slurm": None}
            context.command.invoke(context)
    return _started(context, words, here)


def _started(context: Any, words: list[str], here: bool) -> Line:
    """Return the line of a new run or sweep, with a name."""
    from rlctl.cli.remote_checks import check_start
    from rlctl.recipes.axes import split_axes, with_first_values
    from rlctl.recipes.compose import compose
    from rlctl.runs.naming import fresh_name
    from rlctl.runtime.planning.early_checks import check_early

    params = context.params
    source, settings = _settings(context.info_name, params)
    is_sweep = words[0] == "sweep"
    first = settings
    if is_sweep:
        settings += [
            f"sweep.{name}={params[name]}" for name in _OF_SEARCH if params[name] is not None
        ]
        first = with_first_values(*split_axes(settings, source))
    recipe = compose(source, first)
    if not here:
        check_early(recipe)
    trainer = recipe.config.trainer
    name = trainer.experiment_name
    if name is None:
        start = recipe.name.removesuffix("_trainer")
        name = fresh_name(f"{start}-sweep" if is_sweep else start)
        words.append(hydra_text("trainer.experiment_name", name))
        settings.append(words[-1])
    check_start(recipe, name)
    folder = Path(trainer.run_dir).absolute() / trainer.project_name / name
    again = ["resume", str(folder), *words_of(context, _LIMITS)]
    line = Line(words, again, folder, recipe.config, bool(params.get("inline")))
    if not is_sweep:
        return line
    search = (context.info_name, source, settings)
    return replace(line, parallel=recipe.config.sweep.parallel, search=search)


def _settings(verb: str, params: Any) -> tuple[str, list[str]]:
    """Return recipe and overrides of a command, as it finds them; its notices are printed."""
    recipe: str | None = params["recipe"]
    overrides: list[str] = list(params["overrides"] or ())
    with redirect_stderr(io.StringIO()):  # the dry run has printed its notices
        path = params.get("config_path")
        name = params.get("config_name")
        if path is not None or name is not None:
            recipe, defaults = from_name(verb, recipe, path, name)
            overrides = [*defaults, *overrides]
        source = starting_recipe(verb, overrides, recipe)
    return source, [*common_settings(overrides, params["name"]), *loggers(params["logger"])]


def _resumed(params: Any, words: list[str]) -> Line:
    """Return the line of a run or sweep that is resumed."""
    from rlctl.api import find_run_or_sweep
    from rlctl.cli.remote_checks import check_resume
    from rlctl.recipes.axes import split_axes, with_first_values
    from rlctl.recipes.compose import compose
    from rlctl.runs.store import RunStore
    from rlctl.runtime.planning.early_resume import compose_resumed
    from rlctl.storage import is_url

    selector = params["run"]
    overrides = params["overrides"] or ()
    fork = params["fork"]
    if is_url(selector):
        hint = f"rlctl runs pull {selector}"
        raise UsageError("a remote copy cannot wait: download it first", hint=hint)
    root = RunStore(params["root"]).root
    check_resume(selector, overrides, params["from_step"], fork, root)
    found = find_run_or_sweep(selector, params["root"])
    path = found.path.absolute()
    if not isinstance(found, Run):
        record = found.record
        axes = split_axes(record.axes, record.recipe)[1]
        config = compose(record.recipe, with_first_values(record.fixed, axes)).config
        return Line(words, words, path, config, False, record.settings.get("parallel"))
    config = compose_resumed(path, overrides, fork).config
    inline = params["inline"]
    if inline is None:
        inline = "--inline" in found.readable_record().command
    if not fork:
        return Line(words, words, path, config, inline)
    folder = path.with_name(fork)
    return Line(words, ["resume", str(folder)], folder, config, inline)
