"""The reward functions of a run, from the config section `reward` and the data sources of its rows.

A reward plug-in may declare data sources, names or patterns such as `aime*`: with the attribute
`data_sources`, or as names of entry points of `rlctl.reward_sources` with its value. Unless
`reward.functions` names functions, each row is scored by the plug-in that declares its data source.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path

from rlctl import plugins
from rlctl.errors import ConfigError, Problem, RlctlError, raise_problems
from rlctl.recipes import schema
from rlctl.runtime.rewards.functions import RewardSpec, is_user_code

LOG = logging.getLogger(__name__)


def reward_specs(reward: schema.Reward, sources: Iterable[str]) -> list[RewardSpec]:
    """Return the reward functions for rows of the data `sources`.

    They are the custom function if `custom_reward_function.path` is set, else `reward.functions`,
    else one per scorer of the data sources. Raises ConfigError for a wrong number of weights or
    for a data source without a scorer.
    """
    custom = reward.custom_reward_function
    if custom.path is not None:
        path = Path(custom.path).expanduser()
        return [RewardSpec(f"{path}:{custom.name}", 1.0, custom.reward_kwargs)]
    if reward.functions is None:
        return _by_source(reward, dict.fromkeys(sources))
    weights = reward.weights or (1.0,) * len(reward.functions)
    if len(weights) != len(reward.functions):
        raise ConfigError(
            f"{len(weights)} weights for {len(reward.functions)} reward functions",
            where="reward.weights",
            hint=f"one number per function: {', '.join(reward.functions)}",
        )
    return [
        _with_settings(RewardSpec(function, weight), reward)
        for function, weight in zip(reward.functions, weights, strict=True)
    ]


def scored_sources(config: schema.Config, sources: Iterable[str]) -> list[str]:
    """Return the data sources that reward functions score.

    Those are all, but with episodes, or with a reward model that scores alone, only the known ones.
    """
    unique = list(dict.fromkeys(sources))
    reward = config.reward
    named = reward.functions is not None or reward.custom_reward_function.path is not None
    optional = config.actor_rollout_ref.rollout.multi_turn.enable
    optional |= reward.reward_model.enable and reward.reward_model.rule_weight == 0
    if named or not optional:
        return unique
    declared = declared_sources()
    return [source for source in unique if _scorers(source, declared)]


def check_sources(specs: Sequence[RewardSpec], sources: Iterable[str]) -> None:
    """Raise ConfigError for a data source that none of `specs` scores."""
    unknown = [
        source
        for source in dict.fromkeys(sources)
        if not any(spec.scores(source) for spec in specs)
    ]
    raise_problems([unknown_source(source) for source in unknown])


def unknown_source(source: str) -> Problem:
    """Return the problem of a data source without a scorer."""
    known = ", ".join(pattern for patterns in declared_sources().values() for pattern in patterns)
    forced = " or ".join(f"'reward.functions=[{name}]'" for name in declared_sources())
    return Problem(
        f"no scorer for the data source {source!r}; known: {known}",
        hint="reward.custom_reward_function.path=FILE.py scores it with a function of your own; "
        f"{forced} scores all rows as those data sources",
    )


def declared_sources() -> dict[str, Sequence[str]]:
    """Return the data sources that each installed reward plug-in declares, if it declares any.

    A package that names them as entry points is not imported. A plug-in that cannot be loaded is a
    warning.
    """
    listed = plugins.entry_points_of("reward_sources")
    packages = {point.dist.name for point in listed if point.dist}
    declared: dict[str, Sequence[str]] = {}
    for reward in sorted(plugins.entry_points_of("rewards"), key=lambda point: point.name):
        if reward.dist and reward.dist.name in packages:
            patterns = [point.name for point in listed if point.value == reward.value]
        else:
            patterns = _sources_of_plugin(reward.name)
        if patterns:
            declared[reward.name] = patterns
    return declared


def _sources_of_plugin(name: str) -> Sequence[str]:
    """Return the data sources in the attribute of a plug-in."""
    try:
        return getattr(plugins.load("rewards", name), "data_sources", ())
    except (RlctlError, ImportError) as error:
        LOG.warning("the reward plug-in %r is left out: %s", name, error)
        return ()


def _by_source(reward: schema.Reward, sources: Iterable[str]) -> list[RewardSpec]:
    """Return one spec for each scorer that the data sources need."""
    declared = declared_sources()
    chosen: dict[str, list[str]] = {}
    problems: list[Problem] = []
    for source in sources:
        names = _scorers(source, declared)
        if len(names) == 1:
            chosen.setdefault(names[0], []).append(source)
        elif names:
            options = " or ".join(f"'reward.functions=[{name}]'" for name in names)
            message = f"{' and '.join(names)} both score the data source {source!r}"
            problems.append(Problem(message, hint=options))
        else:
            problems.append(unknown_source(source))
    raise_problems(problems)
    return [
        _with_settings(RewardSpec(name, 1.0, sources=frozenset(scored)), reward)
        for name, scored in chosen.items()
    ]


def _scorers(source: str, declared: Mapping[str, Sequence[str]]) -> list[str]:
    """Return the plug-ins that name `source`, or else those with a pattern that matches it."""
    exact = [name for name, patterns in declared.items() if source in patterns]
    return exact or [
        name
        for name, patterns in declared.items()
        if any(fnmatchcase(source, pattern) for pattern in patterns)
    ]


def _with_settings(spec: RewardSpec, reward: schema.Reward) -> RewardSpec:
    return RewardSpec(spec.function, spec.weight, reward.params.get(spec.name, {}), spec.sources)


def code_hashes(reward: schema.Reward) -> dict[str, str]:
    """Return the SHA-256 of the file of each reward function that is the user's code.

    The keys are paths and modules as given. Leaves out functions that are not in a file: loading
    reports them.
    """
    custom = reward.custom_reward_function
    functions = [f"{custom.path}:"] if custom.path is not None else reward.functions or ()
    hashes: dict[str, str] = {}
    for code in (function.rpartition(":")[0] for function in functions if is_user_code(function)):
        from rlctl.plugins.user_code import module_file

        path = Path(code).expanduser() if code.endswith(".py") else module_file(code)
        if path is not None and path.is_file():
            hashes[code] = hashlib.sha256(path.read_bytes()).hexdigest()
    return hashes
