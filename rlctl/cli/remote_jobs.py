"""Commands that run as Ray jobs on another cluster."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

import typer

from rlctl.cli.stderr import notice
from rlctl.errors import Terminated, UsageError
from rlctl.redaction import redact_word
from rlctl.suggest import hydra_text
from rlctl.terminal import visible

if TYPE_CHECKING:
    from rlctl.recipes.compose import Recipe


def submit(address: str, detach: bool, words: Sequence[str], recipe: Recipe) -> None:
    """Run `rlctl WORDS` on the cluster, with an absolute run folder and a name chosen here."""
    from rlctl.runs.naming import fresh_name

    trainer = recipe.config.trainer
    name = trainer.experiment_name or fresh_name(recipe.name.removesuffix("_trainer"))
    fixed = [
        hydra_text("trainer.run_dir", str(Path(trainer.run_dir).absolute())),
        hydra_text("trainer.experiment_name", name),
        "ray_kwargs.ray_init.address=auto",
    ]
    if words[0] == "train":
        from rlctl.cli.remote_checks import check_start

        check_start(recipe, name)
    replaced = ("trainer.run_dir=", "trainer.experiment_name=")
    rest = [word for word in words if not word.startswith(replaced)]
    run(address, detach, name, [*rest, *fixed])


def _check(address: str) -> None:
    if address != "auto" and "://" not in address:
        raise UsageError(
            f"{address!r} is not the address of a cluster",
            where="--address",
            hint="write auto, ray://HOST:10001 or http://HOST:8265",
        )


def run(address: str, detach: bool, name: str, words: Sequence[str]) -> None:
    """Submit the job `name` and, unless `detach`, follow it and exit with its exit code."""
    _check(address)
    from rlctl.runtime.cluster import jobs

    for word in words:
        if word != redact_word(word):
            raise UsageError(
                "Ray shows the command line of a job to everybody, so it must not contain secrets",
                where=redact_word(word),
                hint="KEY='${oc.env:NAME}' reads it from the environment of the cluster",
            )
    jobs.submit(address, name, words, Path.cwd())
    notice(
        f"job {name} on {address}; `rlctl logs {name} -f --address {address}` follows it, "
        f"`ray job stop {name}` stops it"
    )
    if not detach:
        follow(address, name)


def follow(address: str, name: str, stream: TextIO | None = None) -> None:
    """Write the job's output to `stream` (stderr) until it ends; exit with its exit code."""
    shown = stream or sys.stderr
    _check(address)
    from rlctl.runtime.cluster import jobs

    try:
        code = jobs.follow(address, name, lambda text: shown.write(visible(text)))
    except (KeyboardInterrupt, Terminated):
        notice(f"the job {name} is still running")
        raise
    raise typer.Exit(code)
