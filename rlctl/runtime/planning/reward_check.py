"""Check of the reward functions before a run starts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from rlctl.data_prep.rows import PromptRow
from rlctl.errors import ConfigError, Problem, raise_problems
from rlctl.recipes import schema
from rlctl.runtime.algorithms.base import Needs
from rlctl.runtime.rewards.functions import TIMEOUT_HINT
from rlctl.runtime.rewards.loading import ask_plugin
from rlctl.runtime.rewards.request_limits import RequestSettings
from rlctl.runtime.rewards.reward_pool import RewardPool
from rlctl.runtime.rewards.specs import scored_sources

NUM_REWARD_ROWS = 10  # rows of each data source that the reward functions are tried on


def check_reward(
    config: schema.Config, files: Mapping[str, Sequence[PromptRow]], needs: Needs
) -> None:
    """Call the reward functions on ten rows of each data source, with the truth as response.

    `files` has the first rows of each file, which is checked by itself: beside the rows of a good
    one, a file whose rows all fail would not be noticed. Raises `ConfigError` if no call for a data
    source of a file succeeds; a single failure scores 0 and is no config error. One row is scored
    first, so that a function that hangs costs one timeout. Also raises `ConfigError` if the scores
    have no components and `needs` contains them, and if a function compares responses of which
    there is one to a prompt.
    """
    every = (row.data_source for rows in files.values() for row in rows)
    sources = scored_sources(config, dict.fromkeys(every))
    components: set[str] = set()
    requests = RequestSettings.from_config(config.reward, None)
    with RewardPool.from_config(config.reward, sources, 1, requests=requests) as pool:
        if any(traits.compares for traits in pool.traits.values()):
            raise_problems(_single_responses(config, needs))
        if any(ask_plugin(spec, "uses_engine") for spec in pool.functions):
            _require_engine(config)
            return  # it starts with the run
        for file, rows in files.items():
            for source in dict.fromkeys(row.data_source for row in rows):
                if source in sources:
                    of_source = [row for row in rows if row.data_source == source]
                    components |= _try_reward(pool, file, of_source[:NUM_REWARD_ROWS])
    if sources and not components and Needs.COMPONENTS in needs:
        raise ConfigError(
            f"algorithm.adv_estimator={config.algorithm.adv_estimator} compares the components of "
            "the reward, and the reward has none",
            where="reward.functions",
            hint="name several functions, or one that returns a dict of numbers beside `score`; "
            "algorithm.adv_estimator_params.reward_keys (verl: gdpo_reward_keys) selects some",
        )


def _single_responses(config: schema.Config, needs: Needs) -> Iterator[Problem]:
    """Yield a problem for each setting that gives a single response to a prompt."""
    names = "reward.functions"
    rollout = config.actor_rollout_ref.rollout
    why = f"{names} compares the responses to a prompt, and there is only one"
    section = "actor_rollout_ref.rollout"
    if Needs.GROUPS in needs and rollout.n < 2:
        yield Problem(f"{section}.n=1: {why}", names, f"{section}.n=4")
    if Needs.GREEDY_BASELINE in needs:
        yield Problem(
            f"algorithm.adv_estimator={config.algorithm.adv_estimator} scores a greedy "
            f"response: {why}",
            names,
            "algorithm.adv_estimator=rloo",
        )
    if config.data.val_files and rollout.val_kwargs.n < 2:
        hint = " ".join(
            f"{section}.val_kwargs.{setting}"
            for setting in ("n=4", "do_sample=true", "temperature=1.0")
        )
        yield Problem(f"{section}.val_kwargs.n=1: {why}", names, hint)


def _require_engine(config: schema.Config) -> None:
    if config.reward.judge.model.path is None:
        raise ConfigError(
            "the judge has no server: reward.judge.model.path is null, and base_url of its "
            "settings is, too",
            where="reward.params",
            hint="reward.judge.model.path=MODEL lets the run serve one",
        )


def _try_reward(pool: RewardPool, file: str, rows: Sequence[PromptRow]) -> set[str]:
    """Return the names of the components. Raises `ConfigError` if all calls on `rows` fail.

    They are rows of one data source.
    """
    first_error = None
    asks = any(traits.limits_requests for traits in pool.traits.values())
    hint = "start the server that it asks, or change its address in reward.params; " if asks else ""
    # Functions that score groups compare two responses.
    times = 2 if any(traits.scores_groups for traits in pool.traits.values()) else 1
    for part in (rows[:1], rows[1:]):
        calls = [(group, row) for group, row in enumerate(part) for _ in range(times)]
        truths = [str(row.ground_truth) for _, row in calls]
        report = pool.score([row for _, row in calls], truths, groups=[group for group, _ in calls])
        first_error = first_error or report.first_error
        if report.first_timed_out:
            hint = f"{TIMEOUT_HINT}; "
        if report.num_timeouts == len(calls) > 0:
            break
        if any(result.error is None for result in report.results):
            return set(report.components())
    raise ConfigError(
        f"the reward function fails on all of the first {len(rows)} rows of "
        f"{rows[0].data_source!r}: {first_error}",
        where=file,
        hint=f"{hint}try it on responses of your own: rlctl reward test --data DATA --responses "
        f"RESPONSES --reward {pool.functions[0].function}",
    )
