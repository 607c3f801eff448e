"""`rlctl train`: one verb an algorithm family, all of them the same command with another recipe."""

from __future__ import annotations

from typing import Annotated

import typer

app = typer.Typer(no_args_is_help=True, help="Train a model: ppo, grpo or sft.")

Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="[KEY=VALUE]...", help="Overrides in Hydra's grammar, such as actor_rollout_ref.actor.optim.lr=1e-6."),
]
RecipeOption = Annotated[
    str | None, typer.Option("--recipe", "-r", metavar="NAME|PATH", help="A recipe by name or file, in place of the embedded quickstart.")
]
Name = Annotated[str | None, typer.Option("--name", help="Name of the run; by default recipe, date and three letters.")]
Logger = Annotated[list[str] | None, typer.Option("--logger", "-l", help="A tracker beside the console; repeat for several.")]
Inline = Annotated[
    bool, typer.Option("--inline", help="Run in this one process, without Ray: for breakpoints and profilers.")
]

_EXAMPLES = """
Examples:

  rlctl train {verb}                                  the embedded quickstart, on a CPU

  rlctl train {verb} --recipe gsm8k_ppo trainer.total_epochs=1

  rlctl train {verb} data.train_files=train.parquet data.val_files=test.parquet actor_rollout_ref.model.path=DIR
"""


@app.command(epilog=_EXAMPLES.format(verb="ppo"))
def ppo(overrides: Overrides = None, recipe: RecipeOption = None, name: Name = None, logger: Logger = None, inline: Inline = False) -> None:
    """PPO: actor, critic and reference, generalised advantage estimation."""
    _train(recipe or "ppo", overrides, name, logger, inline)


@app.command(epilog=_EXAMPLES.format(verb="grpo"))
def grpo(
    overrides: Overrides = None, recipe: RecipeOption = None, name: Name = None, logger: Logger = None, inline: Inline = False
) -> None:
    """GRPO: no critic; several answers a prompt are compared with each other."""
    _train(recipe or "grpo", overrides, name, logger, inline)


@app.command(epilog=_EXAMPLES.format(verb="sft"))
def sft(overrides: Overrides = None, recipe: RecipeOption = None, name: Name = None, logger: Logger = None, inline: Inline = False) -> None:
    """Supervised fine-tuning on the worked solutions of the data."""
    _train(recipe or "sft", overrides, name, logger, inline)


def _train(recipe: str, overrides: list[str] | None, name: str | None, logger: list[str] | None, inline: bool) -> None:
    from rlctl.cli.console import notice
    from rlctl.recipes.compose import compose

    extra = [f"trainer.experiment_name={name}"] if name else []
    if logger:
        names = dict.fromkeys(["console", *(part for each in logger for part in each.split(","))])
        extra.append(f"trainer.logger=[{','.join(names)}]")
    composed = compose(recipe, [*(overrides or []), *extra])
    for line in composed.notices:
        notice(line)
    from rlctl.runtime.launch import make_plan, train

    train(make_plan(composed, inline))
