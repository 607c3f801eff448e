"""`rlctl env test`: episodes of an environment or a program, with scripted turns or a model."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rlctl import plugins
from rlctl.cli import complete
from rlctl.cli.console import print_json
from rlctl.cli.options import Json, Trust, set_option
from rlctl.errors import UsageError

if TYPE_CHECKING:
    from rlctl.data_prep.rows import PromptRow
    from rlctl.episodes import Episode
    from rlctl.plugins.agents.environments.scripted import Parse, Transcript

app = typer.Typer()

_EXAMPLES = """
Examples:

  rlctl env test gridworld size=4 --scripted moves.txt --episodes 2

  rlctl env test tools 'tools=\\[calculator]' --model @last --data test.parquet

  rlctl env test --program agent.py:run --model quickstart --data test.parquet
"""

Name = Annotated[
    str, typer.Argument(metavar="ENV", help="Environment: name, module:Class or path.py:Class.")
]
Settings = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[KEY=VALUE]...",
        help="Settings of the environment, such as size=4 or 'tools=\\[calculator]'.",
    ),
]
Script = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="Turns of the policy, one a line; a blank line starts the next episode's. A line "
        'may be JSON: {"text": "", "calls": [{"name": "f", "arguments": {}}]}.',
    ),
]
OptionalName = Annotated[
    str | None,
    typer.Argument(metavar="[ENV]", help="Environment: name, module:Class or path.py:Class."),
]
Program = Annotated[
    str | None,
    typer.Option(
        metavar="FUNCTION",
        help="Agent program in place of ENV: module:function or path.py:function; needs --model.",
    ),
]
Policy = Annotated[
    str | None,
    typer.Option(
        metavar="RUN|DIR",
        help="Policy that writes the turns: a run, a model folder, or `quickstart`.",
        autocompletion=complete.run_or_quickstart,
    ),
]
Data = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="Rows of the episodes; by default rows with a seed."),
]
Episodes = Annotated[int, typer.Option(min=1, help="Number of episodes.")]
Format = Annotated[
    str | None, typer.Option("--format", metavar="NAME", help="Parser of tool calls.")
]
Timeout = Annotated[
    float,
    typer.Option(
        min=0.001, help="Time limit of a call and of a turn, or of a program, in seconds."
    ),
]
Overrides = Annotated[
    list[str] | None,
    set_option(
        "With --model: override a setting of the recipe or run, such as "
        "data.max_response_length=512; repeat for several."
    ),
]


@app.command("test", epilog=_EXAMPLES)
def try_environment(
    name: OptionalName = None,
    settings: Settings = None,
    program: Program = None,
    scripted: Script = None,
    model: Policy = None,
    data: Data = None,
    episodes: Episodes = 1,
    parser: Format = None,
    timeout: Timeout = 60.0,
    config: Overrides = None,
    trust: Trust = False,  # noqa: ARG001
    as_json: Json = False,
) -> None:
    """Play episodes with scripted turns or a model; print what is said, rewards and seconds.

    Exit with code 1 if an environment or a program fails.
    """

    _check(name, program, scripted, model, config)
    rows = _rows(data, episodes)
    if model is not None:
        from rlctl.cli.views.samples import print_episodes

        limits = ("episode_s",) if program else ("call_s", "turn_s")
        overrides = [f"agent.timeouts.{limit}={timeout}" for limit in limits]
        if parser is not None:
            overrides.append(f"multi_turn.format={parser}")
        chosen = {"agent.environment": name, "agent.program": program}
        overrides += [f"{key}={json.dumps(value)}" for key, value in chosen.items()]
        overrides = [f"actor_rollout_ref.rollout.{override}" for override in overrides]
        values = parse_settings(settings)
        played = _play_with(model, values, rows, [*overrides, *(config or [])])
        if as_json:
            print_json([{"prompt": prompt, **asdict(episode)} for prompt, episode in played])
        else:
            print_episodes(played)
        failed = any(episode.failed for _, episode in played)
    else:
        from rlctl.plugins.agents.commands.transcripts import print_transcripts

        assert name is not None, "checked: without it there is a program, which has a model"
        values = parse_settings(settings)
        transcripts = _play_script(name, values, rows, scripted, parser, timeout)
        if as_json:
            print_json(transcripts)
        else:
            print_transcripts(transcripts)
        failed = any(transcript.error for transcript in transcripts)
    if failed:
        raise typer.Exit(1)


def _check(
    name: str | None,
    program: str | None,
    scripted: Path | None,
    model: str | None,
    config: Sequence[str] | None,
) -> None:
    """Raise UsageError for arguments that exclude or need each other."""

    if (name is None) == (program is None):
        given = "ENV and --program exclude each other" if name else "nothing to test was given"
        hint = "rlctl env test gridworld, or rlctl env test --program agent.py:run --model RUN"
        raise UsageError(given, hint=hint)
    if program is not None and model is None:
        raise UsageError("--program needs a model", hint="add --model quickstart")
    if config and model is None:
        raise UsageError("--set has no effect without --model", hint="add --model quickstart")
    if model is not None and scripted is not None:
        raise UsageError("--model and --scripted exclude each other", hint="leave out one")


def _play_script(
    name: str,
    values: dict[str, Any],
    rows: Sequence[PromptRow],
    scripted: Path | None,
    parser: str | None,
    timeout: float,
) -> list[Transcript]:
    """Play an episode of each row with scripted turns."""
    import asyncio

    from rlctl.plugins.agents.environments.environment_pool import EnvironmentPool, Timeouts
    from rlctl.plugins.agents.environments.scripted import play, read_script

    scripts = read_script(scripted.expanduser()) if scripted else [[]]
    parse = _parser(parser)
    limits = Timeouts(timeout, timeout)

    async def run() -> list[Transcript]:
        return await asyncio.gather(
            *(
                play(pool, asdict(row), str(index), scripts[index % len(scripts)], parse)
                for index, row in enumerate(rows)
            )
        )

    with EnvironmentPool(name, values, timeouts=limits) as pool:
        return asyncio.run(run())


def _play_with(
    model: str, values: dict[str, Any], rows: Sequence[PromptRow], overrides: Sequence[str]
) -> list[tuple[str, Episode]]:
    """Play an episode of each row with a model; return the prompts and the episodes."""
    from rlctl.cli.startup import announce

    announce("loading the model")
    from rlctl.runtime.evaluate import play
    from rlctl.runtime.planning.evaluation import target_config

    fixed = ["multi_turn.enable=true", "agent.num_workers=1", "agent.max_failed_share=1"]
    settings = [f"actor_rollout_ref.rollout.{text}" for text in [*fixed, "val_kwargs.n=1"]]
    config = target_config(model, [*settings, *overrides], "grpo")
    agent = config.actor_rollout_ref.rollout.agent
    agent.params.clear()  # those of the run
    agent.params.update(values)
    return play(config, rows, seed=0)


def parse_settings(settings: Sequence[str] | None) -> dict[str, Any]:
    """Return settings by name; values are YAML. Raises UsageError for one without `=`."""
    import yaml

    values: dict[str, Any] = {}
    for setting in settings or ():
        key, mark, value = setting.partition("=")
        if not mark:
            raise UsageError(f"the setting {setting!r} has no value", hint=f"{setting}=VALUE")
        try:
            values[key] = yaml.safe_load(value)
        except yaml.YAMLError as error:
            raise UsageError(f"the value of {key} is no YAML: {value}") from error
    return values


def _rows(data: Path | None, number: int) -> list[PromptRow]:
    """Return the rows of the episodes: the first of a file, or rows with a seed only."""
    from rlctl.data_prep.rows import PromptRow, read_rows

    if data is None:
        seeds = [{"index": i, "seed": i} for i in range(number)]
        return [PromptRow("env", [], None, extra_info=extra) for extra in seeds]
    rows = read_rows(data)
    return [rows[index % len(rows)] for index in range(number)]


def _parser(name: str | None) -> Parse:
    """Return the parser of tool calls: `name`, or that of the recipes."""
    from rlctl.recipes.compose import compose

    rollout = compose("ppo").config.actor_rollout_ref.rollout
    return plugins.load("tool_parsers", name or rollout.multi_turn.format)().parse
