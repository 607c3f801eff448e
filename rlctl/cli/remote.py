"""`--address`: the same command on a Ray cluster elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rlctl.recipes.compose import Recipe

Address = Annotated[
    str | None,
    typer.Option(
        "--address",
        metavar="ADDRESS",
        help="Run on this Ray cluster, as a Ray job: auto, ray://HOST:10001 or http://HOST:8265.",
    ),
]
Detach = Annotated[
    bool,
    typer.Option(
        "--detach",
        help="With --address: do not wait for the end; `rlctl logs NAME -f --address …` follows it.",
    ),
]


def submit(address: str, detach: bool, words: Sequence[str], recipe: Recipe) -> None:
    """Run `rlctl WORDS` on the cluster, in the run folder of `recipe` as an absolute path, under a name that is known at once."""
    from rlctl.runs.run_dir import fresh_name

    trainer = recipe.config.trainer
    name = trainer.experiment_name or fresh_name(recipe.name.removesuffix("_trainer"))
    own = [
        f"trainer.run_dir={Path(trainer.run_dir).absolute()}",
        f"trainer.experiment_name={name}",
        "ray_kwargs.ray_init.address=auto",
    ]
    run(address, detach, name, [*words, *own])


def run(address: str, detach: bool, name: str, words: Sequence[str]) -> None:
    """Start the job `name` and follow it; the command's exit code is the job's."""
    from rlctl.cli.console import notice
    from rlctl.runtime.cluster import jobs

    jobs.submit(address, name, words, Path.cwd())
    notice(
        f"job {name} on {address}; `rlctl logs {name} -f --address {address}` follows it, `ray job stop {name}` ends it"
    )
    if not detach:
        follow(address, name)


def follow(address: str, name: str) -> None:
    """Print what the job prints until it ends, and end with its exit code."""
    import sys

    from rlctl.cli.console import notice
    from rlctl.runtime.cluster import jobs

    try:
        code = jobs.follow(address, name, sys.stderr.write)
    except KeyboardInterrupt:
        notice(f"the job {name} goes on")
        raise
    raise typer.Exit(code)
