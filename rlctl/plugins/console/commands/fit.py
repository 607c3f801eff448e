"""`rlctl fit`: the fewest devices and the largest micro-batch for a model."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rlctl.cli import complete
from rlctl.cli.console import print_json, print_table, stdout
from rlctl.cli.options import Json, Root, Trust, overrides_argument, recipe_option
from rlctl.cli.startup import announce
from rlctl.cli.stderr import notice
from rlctl.errors import ResourceError, UsageError
from rlctl.runs.store import RunStore
from rlctl.suggest import did_you_mean, hydra_text

if TYPE_CHECKING:
    from rlctl.plugins.console.fit.fit_search import Search
    from rlctl.plugins.console.fit.fits import Fit, Trial
    from rlctl.recipes.layers import Recipe


app = typer.Typer()

_MODEL = "actor_rollout_ref.model.path"
_RETRIES = 3
_GIB = 2**30
_EXAMPLES = """
Examples:

  rlctl fit grpo --model Qwen/Qwen3-8B --device H100 --devices 8

  rlctl fit ppo --model DIR --memory 24GB data.max_response_length=2048

  rlctl fit ppo --model quickstart --device cpu --try

  rlctl fit --run @failed          after a run is out of memory
"""


Verb = Annotated[
    str, typer.Argument(metavar="[ALGORITHM]", help="As in `rlctl train`: ppo, grpo, sft, …")
]
Overrides = Annotated[
    list[str] | None,
    overrides_argument("Settings to keep, such as data.max_response_length=4096."),
]
ModelName = Annotated[
    str | None,
    typer.Option("--model", "-m", metavar="NAME|DIR", help="Model; only its config.json is read."),
]
RecipeName = Annotated[str | None, recipe_option("Recipe.", "NAME|PATH")]
OfRun = Annotated[
    str | None,
    typer.Option(
        "--run",
        metavar="RUN",
        help="Use the settings of this run, such as @failed.",
        autocompletion=complete.run,
    ),
]
DeviceName = Annotated[
    str, typer.Option("--device", help="GPU by name, such as H100; cpu; auto: this machine's.")
]
Memory = Annotated[
    str | None, typer.Option("--memory", metavar="SIZE", help="Memory of a device, such as 80GB.")
]
PerNode = Annotated[
    int | None, typer.Option("--devices", min=1, help="Devices of a node, at most.")
]
Nodes = Annotated[int, typer.Option("--nodes", min=1, help="Nodes, at most.")]
Try = Annotated[
    bool, typer.Option("--try", help="Check the result by one real step on this machine.")
]


@app.command(epilog=_EXAMPLES)
def fit(
    verb: Verb = "ppo",
    overrides: Overrides = None,
    model: ModelName = None,
    recipe: RecipeName = None,
    run: OfRun = None,
    device: DeviceName = "auto",
    memory: Memory = None,
    devices: PerNode = None,
    nodes: Nodes = 1,
    trial: Try = False,
    trust: Trust = False,
    as_json: Json = False,
    root: Root = None,
) -> None:
    """Find the fewest devices and the largest micro-batch that the memory allows.

    Prints the overrides to paste. Exits with code 7 if nothing fits.
    """
    announce("reading the model's configuration")
    words = list(overrides or [])
    if "=" in verb:
        words.insert(0, verb)
        verb = "ppo"
    if run is not None:
        composed, command = _of_run(run, words, root)
    else:
        composed, command = _of_recipe(verb, words, model, recipe)
    from rlctl.plugins.console.fit.fit_search import Search
    from rlctl.plugins.console.fit.fits import meshes
    from rlctl.runtime.data import bundled
    from rlctl.runtime.planning.known_gpus import find_device

    target = find_device(device, memory)
    per_node = devices or (8 if target.kind == "cuda" else 1)
    config = bundled.resolve(composed.config, Path(composed.config.trainer.run_dir))
    search = Search.of(composed, config, target)
    fits = [search.best(mesh) for mesh in meshes(per_node, nodes)]
    chosen = next((fit for fit in fits if fit.rows), None)
    tried: Trial | None = None
    if trial and chosen is not None:
        chosen, tried = _try(search, chosen, command)
        fits = [chosen if fit.mesh.devices == chosen.mesh.devices else fit for fit in fits]
    _print(search, fits, chosen, tried, command, as_json)
    if chosen is None:
        raise _nothing_fits(search, fits, target.name)


def _print(
    search: Search,
    fits: list[Fit],
    chosen: Fit | None,
    tried: Trial | None,
    command: list[str],
    as_json: bool,
) -> None:
    if not as_json:
        show_fits(fits, chosen, search.usable, search.device.name, shlex.join(command))
        if tried is not None and chosen is not None:
            show_trial(tried, chosen, search.device.memory)
        return
    print_json(
        {
            "device": search.device,
            "fits": fits,
            "cheapest": fits.index(chosen) if chosen is not None else None,
            "trial": tried,
            "command": shlex.join([*command, *chosen.overrides]) if chosen else None,
        }
    )


def _of_recipe(
    verb: str, words: list[str], model: str | None, recipe: str | None
) -> tuple[Recipe, list[str]]:
    """Compose the settings of `rlctl train`; return them and that command."""
    from rlctl.cli.commands.train import check_algorithm, starting_recipe
    from rlctl.recipes.compose import compose
    from rlctl.recipes.search_path import verbs

    if verb not in verbs():
        raise UsageError(
            f"no algorithm is named {verb!r}",
            hint=did_you_mean(verb, verbs())
            or f"one of {', '.join(verbs())}; --run RUN uses the settings of a run",
        )
    given = list(words)
    if model is not None:
        is_plain = re.fullmatch(r"[\w./:-]+", model, re.ASCII)
        given.append(f"{_MODEL}={model}" if is_plain else hydra_text(_MODEL, model))
    source = starting_recipe(verb, given, recipe)
    # The search reads no data, and a recipe without data cannot be composed.
    needs_data = not any(word.startswith("data.train_files=") for word in given)
    data = ["data.train_files=[quickstart]"] if needs_data and source.endswith("_trainer") else []
    command = ["rlctl", "train", verb]
    if recipe:
        command += ["--recipe", recipe]
    command += given
    composed = compose(source, [*data, *given])
    check_algorithm(verb, recipe, composed)
    return composed, command


def _of_run(name: str, words: list[str], root: Path | None) -> tuple[Recipe, list[str]]:
    """Compose the settings of a run; return them and the command that resumes it."""
    from rlctl.runs.trust import recompose_run

    found = RunStore(root).find(name)
    return recompose_run(found.path, words), ["rlctl", "resume", str(found.path), *words]


def _try(search: Search, chosen: Fit, command: list[str]) -> tuple[Fit, Trial]:
    """Try the settings for one step, with half of the rows after each lack of memory."""
    from rlctl.plugins.console.fit.fits import try_step

    if command[1] != "train":
        raise UsageError("--try needs a recipe, not a run", hint="rlctl fit ppo --model M --try")
    cuda = search.device.kind == "cuda"
    _check_present(search, chosen)
    given = any(word.startswith("data.train_files=") for word in command)
    data = [] if given else ["data.train_files=[quickstart]"]
    tokenizer = search.trial_tokenizer()
    for _ in range(_RETRIES + 1):
        announce(f"trying one step with micro-batches of {chosen.rows:,} rows")
        words = [*command[1:], *data, *tokenizer, *search.for_trial(chosen), *chosen.overrides]
        tried = try_step(words, cuda=cuda)
        if tried.peak is not None:
            return chosen, tried
        notice(f"out of memory with {chosen.rows:,} rows")
        if chosen.rows == 1:
            break
        chosen = search.with_rows(chosen, chosen.rows // 2)
    raise ResourceError(
        f"one step is out of memory with micro-batches of {chosen.rows:,} rows",
        hint="a shorter data.max_response_length, more devices, or lora_rank=32",
    )


def _check_present(search: Search, chosen: Fit) -> None:
    """Raise ResourceError where this machine does not have the devices of a trial."""
    import torch

    wanted = chosen.mesh.devices
    found = torch.cuda.device_count() if search.device.kind == "cuda" else 1
    if wanted > found:
        hint = "leave out --try for the estimate"
        if found:
            hint += f", or --devices {found}"
        message = f"a trial needs {wanted} devices ({search.device.name})"
        raise ResourceError(f"{message}, and this machine has {found}", hint=hint)


def _nothing_fits(search: Search, fits: list[Fit], device: str) -> ResourceError:
    """Describe by how much the largest mesh is too small, and what would fit."""
    last = fits[-1]
    if last.reason:
        return ResourceError(last.reason, hint="see `rlctl train … --dry-run`")
    hint = "more --devices or --nodes, a larger --device, a smaller model or shorter responses"
    if proposed := search.propose(last.mesh):
        hint = f"fits, but trains otherwise: {proposed}"
    return ResourceError(
        f"nothing fits: a row of {search.longest:,} tokens needs {last.peak / _GIB:.1f} GiB on "
        f"each of {last.mesh.devices} devices ({device}), and {search.usable / _GIB:.1f} GiB are "
        "usable",
        hint=hint,
    )


def show_fits(
    fits: Sequence[Fit], chosen: Fit | None, usable: int, device: str, command: str
) -> None:
    """Print a row per mesh, and the command with the overrides of the chosen one."""
    columns = ["devices", "nodes", "saving memory", "rows", "tokens", "peak", "fits"]
    rows: list[list[str]] = []
    for fit in fits:
        settings = ["-", "-", "-"]
        verdict = fit.reason or "no"
        if fit.rows:
            settings = [fit.savings, f"{fit.rows:,}", f"{fit.tokens:,}"]
            verdict = "← cheapest" if fit is chosen else "yes"
        peak = f"{fit.peak / _GIB:.1f} GiB" if fit.peak else "-"
        rows.append([str(fit.mesh.devices), str(fit.mesh.nodes), *settings, peak, verdict])
    print_table(columns, rows, right=columns[:2] + columns[3:6])
    stdout().print(
        f"\nestimated, per device; {usable / _GIB:.1f} GiB of {device} are used, the rest is left "
        "for the framework",
    )
    if chosen is not None:
        stdout().print(f"\n{command} \\\n  " + " \\\n  ".join(map(shlex.quote, chosen.overrides)))


def show_trial(trial: Trial, fit: Fit, memory: int) -> None:
    """Print the result of a trial beside the estimate."""
    assert trial.peak is not None, "the trial succeeded"
    stdout().print(
        f"\ntried: one step with micro-batches of {fit.rows:,} rows took {trial.seconds:.0f} s and "
        f"{trial.peak / _GIB:.2f} GiB at its peak, of {memory / _GIB:.1f} GiB "
        f"(estimated: {fit.peak / _GIB:.2f} GiB without the framework)",
    )
