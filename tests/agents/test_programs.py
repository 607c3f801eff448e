"""Agent programs with the real client, engine and processes."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path
from typing import Any, cast
from unittest.mock import MagicMock

import pytest
import torch

from rlctl.data_prep.rows import PromptRow
from rlctl.errors import ConfigError
from rlctl.quickstart import real_path
from rlctl.recipes.compose import compose
from rlctl.runtime.agents.build import check_episodes
from rlctl.runtime.agents.episode import State
from rlctl.runtime.agents.metrics import agent_metrics
from rlctl.runtime.agents.programs.program_run import ProgramRun
from rlctl.runtime.batch import Rollouts
from rlctl.runtime.build import load_algorithm
from rlctl.runtime.data.tokenizer import load_tokenizer
from tests.agents.programs import TEMPLATE
from tests.agents.quiz import write_quiz
from tests.agents.test_episodes import NUM_ROWS, ROLLOUT, N, episodes, generate
from tests.architecture.source import ROOT

EXAMPLE = ROOT / "docs/examples/agents/tool_loop.py"


@pytest.fixture(scope="module")
def quiz(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_quiz(tmp_path_factory.mktemp("quiz"), NUM_ROWS, num_problems=3)


def program(name: str) -> list[str]:
    return [
        f"{ROLLOUT}.agent.environment=null",
        f"{ROLLOUT}.agent.program=tests.agents.programs:{name}",
    ]


def play(quiz: Path, name: str, *overrides: str, **options: bool) -> Rollouts:
    with episodes(quiz, *program(name), *overrides) as (roles, prompts):
        return generate(roles, prompts, **options)


def test_what_a_program_sees_is_trained_on(quiz: Path) -> None:
    with episodes(quiz, *program("chat")) as (roles, prompts):
        found = generate(roles, prompts)
        again = generate(roles, prompts)
        trained = roles.actor.compute_log_probs(found).log_probs
    assert len(found) == NUM_ROWS * N, "one row for an episode that only grows"
    assert [(each.outcome, each.error, each.num_turns) for each in found.episodes] == [
        ("done", None, 3)
    ] * len(found)
    assert sum(each.num_retokenized for each in found.episodes) == 0
    assert all({"num_right"} == set(each.components) for each in found.episodes)
    written = found.response_mask.values.bool()
    assert 0 < written.float().mean() < 1
    difference = (trained.values - found.rollout_log_probs.values)[written].abs()
    assert difference.mean() < 5e-6
    assert found.turn is not None
    assert all(turns.unique().tolist() == [0, 1, 2] for turns in found.turn.rows())
    assert torch.equal(found.response_ids.values, again.response_ids.values)
    assert torch.equal(found.rollout_log_probs.values, again.rollout_log_probs.values)


def test_a_program_sees_the_ids_of_an_environment(quiz: Path) -> None:
    with episodes(quiz) as (roles, prompts):
        played = generate(roles, prompts)
    found, streamed = play(quiz, "chat"), play(quiz, "stream")
    for each in (found, streamed):
        assert torch.equal(each.prompt_ids.values, played.prompt_ids.values)
        assert torch.equal(each.response_ids.values, played.response_ids.values)
        assert torch.equal(each.response_mask.values, played.response_mask.values)


def test_forks_are_rows_with_the_episodes_score(quiz: Path) -> None:
    found = play(quiz, "fork")
    assert len(found) == 3 * NUM_ROWS * N
    assert found.group.tolist() == [i for i in range(NUM_ROWS) for _ in range(3 * N)]
    assert all(each.score == 0.5 for each in found.episodes)
    assert found.turn is not None
    assert [int(turns[-1]) + 1 for turns in found.turn.rows()] == [2, 2, 1] * NUM_ROWS * N
    assert sum(each.num_retokenized for each in found.episodes) == 0
    metrics = agent_metrics(found)
    assert metrics["agent/turns/mean"] == 5
    assert metrics["agent/outcome/done"] == 1
    assert len(play(quiz, "fork", validate=True)) == NUM_ROWS, "validation has one row an episode"


@pytest.fixture
def template(tmp_path: Path) -> str:
    (tmp_path / "tools.jinja").write_text(TEMPLATE)
    return f"actor_rollout_ref.model.custom_chat_template={tmp_path / 'tools.jinja'}"


@pytest.mark.parametrize(
    ("name", "rows"),
    [
        ("tools", 1),
        ("streamed_call", 1),
        ("messages_api", 2),
    ],  # the last one asks a first turn again
)
def test_tools_reach_the_program_as_calls(quiz: Path, name: str, rows: int, template: str) -> None:
    parser = f"{ROLLOUT}.multi_turn.format=tests.agents.programs:AnswerParser"
    found = play(quiz, name, template, parser)
    assert [each.error for each in found.episodes] == [None] * len(found)
    assert len(found) == rows * NUM_ROWS * N
    assert sum(each.score or 0 for each in found.episodes) > NUM_ROWS
    assert sum(each.num_retokenized for each in found.episodes) == 0


def test_stop_sequences_end_a_turn_and_its_row(quiz: Path, template: str) -> None:
    parser = f"{ROLLOUT}.multi_turn.format=tests.agents.programs:AnswerParser"
    found = play(quiz, "stops", template, parser, "data.max_prompt_length=128")
    assert [each.error for each in found.episodes] == [None] * len(found)
    assert len(found) == 2 * NUM_ROWS * N, "a turn that a text ended is not continued"
    assert sum(each.score or 0 for each in found.episodes) > NUM_ROWS
    assert sum(each.num_retokenized for each in found.episodes) == 0
    tokenizer = load_tokenizer(real_path("quickstart"))
    texts = [tokenizer.decode(ids.tolist()) for ids in found.response_ids.rows()]
    assert all("####" in text and "<|end|>" not in text for text in texts[::2])


def test_documented_program_plays(quiz: Path, template: str) -> None:
    found = play(
        quiz,
        "run",
        template,
        f'{ROLLOUT}.agent.program="{EXAMPLE}:run"',
        f"{ROLLOUT}.multi_turn.format=tests.agents.programs:AnswerParser",
        "data.max_response_length=1024",
    )
    assert [each.error for each in found.episodes] == [None] * len(found)
    assert max(each.num_turns for each in found.episodes) > 1


@pytest.mark.parametrize("name", ["blocking", "refused"])
def test_clients_get_replies_and_errors_of_the_protocol(quiz: Path, name: str) -> None:
    found = play(quiz, name)
    assert [each.error for each in found.episodes] == [None] * len(found)


def test_a_cancelled_request_leaves_no_tokens(quiz: Path) -> None:
    found = play(quiz, "gives_up")
    assert [(each.error, each.num_retokenized) for each in found.episodes] == [(None, 0)] * len(
        found
    )
    assert found.turn is not None
    for turns, mask in zip(found.turn.rows(), found.response_mask.rows(), strict=True):
        assert turns.unique().tolist() in ([0], [0, 1])
        assert mask[-1] == 1, "a row ends with a turn of the policy"


@pytest.mark.parametrize(
    ("name", "error", "outcome"),
    [
        ("fails", "RuntimeError: the agent is broken", "environment_error"),
        ("silent", "the program ended without a response of the policy", "environment_error"),
        ("sleeps", "the episode took longer than 3 s", "timeout"),
    ],
)
def test_failed_programs_are_outcomes(quiz: Path, name: str, error: str, outcome: str) -> None:
    episode_s = 3 if name == "sleeps" else 300
    limit = f"{ROLLOUT}.agent.timeouts.episode_s={episode_s}"
    found = play(quiz, name, f"{ROLLOUT}.agent.max_failed_share=1", limit)
    assert {(each.outcome, each.error) for each in found.episodes} == {(outcome, error)}
    assert all(each.failed for each in found.episodes)


def test_programs_that_do_not_load_are_refused(quiz: Path) -> None:
    with (
        pytest.raises(ConfigError, match="no_such_program"),
        episodes(quiz, *program("no_such_program")),
    ):
        pass


def test_a_program_beside_an_environment_is_refused() -> None:
    """The hint has overrides that work, also for settings that a recipe brings."""
    tokenizer = load_tokenizer(real_path("quickstart"))
    row = PromptRow("tests/quiz", [{"role": "user", "content": "1 + 1"}], "2")
    with pytest.raises(ConfigError, match="exclude each other") as caught:
        check_episodes(compose("tools", program("chat")).config, tokenizer, (1,), row)
    removals = str(caught.value.problems[0].hint).split()
    agent = compose("tools", [*program("chat"), *removals]).config.actor_rollout_ref.rollout.agent
    assert (agent.environment, agent.params) == (None, {})


def test_a_greedy_baseline_is_refused() -> None:
    config = compose("ppo", ["algorithm.adv_estimator=remax", *program("chat")]).config
    with pytest.raises(ConfigError, match="greedy baseline needs one row"):
        load_algorithm(config, 1)


def test_a_request_that_the_end_cancels_leaves_the_state_as_it_is() -> None:
    states: Counter[str] = Counter()
    anything = cast(Any, MagicMock())
    run = ProgramRun(anything, anything, {"agent_name": "x"}, 0, [1], None, 0, None, states)
    run._complete = lambda _: asyncio.sleep(600)

    async def play() -> None:
        task = asyncio.create_task(run.complete(anything))
        await asyncio.sleep(0)
        await run._close()
        run.state = State.FINISHED
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(play())
    assert +states == {State.FINISHED: 1}
