"""Agent programs with the real client, engine and processes."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import torch

from rlctl.data_prep.rows import PromptRow
from rlctl.errors import ConfigError, MissingExtraError
from rlctl.plugins.agents.environments.environment_pool import PROGRAM
from rlctl.plugins.agents.episode_setup import check_episodes
from rlctl.quickstart import real_path
from rlctl.recipes.compose import compose
from rlctl.runtime.base.batch import Prompts, Rollouts
from rlctl.runtime.build import load_algorithm
from rlctl.runtime.data.tokenizer import load_tokenizer
from rlctl.runtime.training.collector import agent_metrics
from tests.plugins.agents.environments.episodes import load_here
from tests.plugins.agents.programs import TEMPLATE
from tests.plugins.agents.quiz import write_quiz
from tests.plugins.agents.test_episodes import ROLLOUT, N, assert_trained, episodes, generate

PROGRAMS = "tests.plugins.agents.programs"
PLAIN = ("chat", "stream", "fork_at_once", "refused", "fails", "silent", "choices", "texts")
WITH_TOOLS = (
    *("tools", "streamed_call", "messages_api", "responses_api", "stops", "documented"),
    "gives_up",
)


def program(name: str) -> list[str]:
    return [
        f"{ROLLOUT}.agent.environment=null",
        f"{ROLLOUT}.agent.program={PROGRAMS}:{name}",
    ]


def write_rows_of(folder: Path, programs: tuple[str, ...]) -> Path:
    """Write a row for each program."""
    return write_quiz(folder, len(programs), num_problems=3, programs=programs)


def indices_of(batch: Prompts, name: str) -> torch.Tensor:
    return torch.tensor(
        [i for i, row in enumerate(batch.rows) if row.extra_info["program"] == name]
    )


def played_by(batch: Rollouts, name: str) -> Rollouts:
    return batch.select(indices_of(batch, name))


def outcomes(batch: Rollouts) -> set[tuple[str, str | None]]:
    return {(episode.outcome, episode.error) for episode in batch.episodes}


def num_retokenized(batch: Rollouts) -> int:
    return sum(episode.num_retokenized for episode in batch.episodes)


def test_programs_of_a_batch(tmp_path: Path) -> None:
    file = write_rows_of(tmp_path, PLAIN)
    with episodes(file, *program("by_row"), f"{ROLLOUT}.agent.max_failed_share=1") as (
        roles,
        asked,
    ):
        batch = generate(roles, asked)
        again = generate(roles, asked)
        chat, fork = played_by(batch, "chat"), played_by(batch, "fork_at_once")
        trained = roles.actor.compute_log_probs(chat).log_probs
        validated = generate(roles, asked.select(indices_of(asked, "fork_at_once")), validate=True)
    assert torch.equal(batch.response_ids.values, again.response_ids.values)
    assert torch.equal(batch.rollout_log_probs.values, again.rollout_log_probs.values)
    check_chat(chat, trained.values)
    check_environment(file, batch)
    check_fork(fork)
    check_choices(played_by(batch, "choices"))
    check_texts(played_by(batch, "texts"))
    assert len(validated) == 1, "validation has one row an episode"
    assert outcomes(played_by(batch, "refused")) == {("done", None)}
    for name, error in (
        (
            "fails",
            f"RuntimeError: the agent is broken ({Path(__file__).with_name('programs.py')}:379)",
        ),
        ("silent", "the program ended without a response of the policy"),
    ):
        failed = played_by(batch, name)
        assert outcomes(failed) == {("environment_error", error)}
        assert all(episode.failed for episode in failed.episodes)


def check_chat(chat: Rollouts, trained: torch.Tensor) -> None:
    """Check that what a program sees is trained on."""
    assert len(chat) == N, "one row for an episode that only grows"
    assert outcomes(chat) == {("done", None)}
    assert {episode.num_turns for episode in chat.episodes} == {3}
    assert num_retokenized(chat) == 0
    assert all({"num_right"} == set(episode.components) for episode in chat.episodes)
    written = chat.response_mask.values.bool()
    assert 0 < written.float().mean() < 1
    assert_trained(chat, trained)
    assert all(turns.unique().tolist() == [0, 1, 2] for turns in chat.turn.rows())


def check_environment(file: Path, batch: Rollouts) -> None:
    """Check that a program and an environment that ask the same see the same ids."""
    with episodes(file) as (roles, asked):
        played = generate(roles, asked.select(torch.arange(2)))
    for name in ("chat", "stream"):
        left, right = played_by(batch, name), played_by(played, name)
        assert torch.equal(left.prompt_ids.values, right.prompt_ids.values)
        assert torch.equal(left.response_ids.values, right.response_ids.values)
        assert torch.equal(left.response_mask.values, right.response_mask.values)


def check_fork(fork: Rollouts) -> None:
    """Check that forks are rows with the episode's score."""
    assert Counter(fork.group.tolist()) == dict.fromkeys(fork.group.unique().tolist(), 3 * N)
    assert len(fork) == 3 * N
    assert all(episode.score == 0.5 for episode in fork.episodes)
    assert [int(turns[-1]) + 1 for turns in fork.turn.rows()] == [2, 2, 1] * N
    assert num_retokenized(fork) == 0
    metrics = agent_metrics(fork)
    assert metrics["agent/turns/mean"] == 5
    assert metrics["agent/outcome/done"] == 1


def check_choices(played: Rollouts) -> None:
    """Check that each choice is a row, and that programs get the log-probs of the rows."""
    assert outcomes(played) == {("done", None)}
    assert num_retokenized(played) == 0
    num_turns = torch.tensor([int(turns[-1]) + 1 for turns in played.turn.rows()]).view(N, 6)
    # Equal texts of the first response are one conversation to the program.
    assert num_turns.sort(1).values.tolist() == [[1, 1, 1, 1, 1, 2]] * N
    assert num_turns[:, 2:].max() == 1
    sums = torch.stack([row.sum() for row in played.rollout_log_probs.rows()]).view(N, 6).sum(1)
    totals = [episode.components["total"] for episode in played.episodes[::6]]
    torch.testing.assert_close(sums, torch.tensor(totals))  # of the same numbers


def check_texts(played: Rollouts) -> None:
    """Check that ids which extend a row continue it, and that others begin rows."""
    assert outcomes(played) == {("done", None)}
    assert num_retokenized(played) == 0
    num_turns = torch.tensor([int(turns[-1]) + 1 for turns in played.turn.rows()]).view(N, 6)
    assert num_turns.tolist() == [[3, 1, 1, 1, 1, 1]] * N


def test_programs_with_tools(tmp_path: Path) -> None:
    (tmp_path / "tools.jinja").write_text(TEMPLATE)
    with episodes(
        write_rows_of(tmp_path, WITH_TOOLS),
        *program("by_row"),
        f"actor_rollout_ref.model.custom_chat_template={tmp_path / 'tools.jinja'}",
        f"{ROLLOUT}.multi_turn.format=tests.plugins.agents.programs:AnswerParser",
        "data.max_prompt_length=128",
        "data.max_response_length=1024",
    ) as (roles, asked):
        batch = generate(roles, asked)
    assert outcomes(batch) == {("done", None)}
    assert num_retokenized(batch) == 0
    for name, num_rows, least in (
        ("tools", 1, 1),
        ("streamed_call", 1, 1),
        ("messages_api", 2, 1),  # asks a first turn again
        ("responses_api", 2, 1),
        ("stops", 2, 1),  # a turn that a text ended is not continued
    ):
        played = played_by(batch, name)
        assert len(played) == num_rows * N, name
        assert sum(episode.score or 0 for episode in played.episodes) > least, name
    tokenizer = load_tokenizer(real_path("quickstart"))
    stopped = played_by(batch, "stops").response_ids.rows()[::2]
    texts = [tokenizer.decode(ids.tolist()) for ids in stopped]
    assert all("####" in text and "<|end|>" not in text for text in texts)
    assert max(episode.num_turns for episode in played_by(batch, "documented").episodes) > 1
    check_cancelled(played_by(batch, "gives_up"))


def check_cancelled(batch: Rollouts) -> None:
    """Check that a cancelled request leaves no tokens."""
    for turns, mask in zip(batch.turn.rows(), batch.response_mask.rows(), strict=True):
        assert turns.unique().tolist() in ([0], [0, 1])
        assert mask[-1] == 1, "a row ends with a turn of the policy"


def test_synchronous_program(tmp_path: Path) -> None:
    with episodes(write_quiz(tmp_path, 1, num_problems=3), *program("blocking")) as (roles, asked):
        batch = generate(roles, asked)
    assert outcomes(batch) == {("done", None)}


def test_plugins_have_settings_and_functions_have_none() -> None:
    with pytest.raises(MissingExtraError, match="verifiers with classic environments") as caught:
        load_here(PROGRAM, {"program": "verifiers", "params": {"environment": "wordle"}})
    assert "agent.python" in str(caught.value.problems[0].hint)
    with pytest.raises(ConfigError, match="verifiers needs a value for environment"):
        load_here(PROGRAM, {"program": "verifiers"})
    with pytest.raises(ConfigError, match="has no settings, given: speed"):
        load_here(PROGRAM, {"program": f"{PROGRAMS}:chat", "params": {"speed": 1}})


def test_a_program_beside_an_environment_is_refused() -> None:
    """The hint has overrides that work, also for settings that a recipe brings."""
    tokenizer = load_tokenizer(real_path("quickstart"))
    row = PromptRow("tests/quiz", [{"role": "user", "content": "1 + 1"}], "2")
    with pytest.raises(ConfigError, match="exclude each other") as caught:
        check_episodes(compose("tools", program("chat")).config, tokenizer, row)
    removals = str(caught.value.problems[0].hint).split()
    agent = compose("tools", [*program("chat"), *removals]).config.actor_rollout_ref.rollout.agent
    assert (agent.environment, agent.params) == (None, {})


def test_a_greedy_baseline_is_refused() -> None:
    config = compose("ppo", ["algorithm.adv_estimator=remax", *program("chat")]).config
    with pytest.raises(ConfigError, match="greedy baseline needs one row"):
        load_algorithm(config, 1)
