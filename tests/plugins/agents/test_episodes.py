"""Episodes with a real engine and environments in real processes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from rlctl.data_prep.gridworld import GridworldParams, gridworld
from rlctl.data_prep.rows import write_rows
from rlctl.errors import RlctlError
from rlctl.plugins.agents.chat_bridge import ChatBridge
from rlctl.plugins.agents.episode import EpisodeSettings, turn_seed
from rlctl.plugins.agents.generator import EpisodeGenerator
from rlctl.quickstart import AGENT, real_path
from rlctl.recipes.compose import compose
from rlctl.runtime.base.batch import Batch, Prompts, Rollouts
from rlctl.runtime.base.rank_info import RankInfo
from rlctl.runtime.base.roles import Reward, Roles
from rlctl.runtime.build import build_actor, load_algorithm
from rlctl.runtime.cluster.pools import InlinePool
from rlctl.runtime.data.loader import PromptSet
from rlctl.runtime.data.tokenizer import tokenizer_of
from rlctl.runtime.generation.policy_engines import ColocatedEngines
from rlctl.runtime.generation.schedule import OnStates
from rlctl.runtime.generation.stream import StreamedGenerator
from rlctl.runtime.generators import Generation, open_generator
from rlctl.runtime.model.attention import use_rlctl_attention
from rlctl.runtime.model.sequences import prompt_numbers
from rlctl.runtime.rollout.engine import random_stream, random_streams
from rlctl.runtime.training.stored_rollouts import read_rollouts, write_rollouts
from rlctl.suggest import hydra_text
from tests.distributed.ranks import rank_info
from tests.generation import exact_log_probs
from tests.plugins.agents.quiz import write_quiz
from tests.runtime.test_stream import WAIT_S, streamed
from tests.settings import given
from tests.tolerance import assert_as_exact

ROLLOUT = "actor_rollout_ref.rollout"
NUM_ROWS, N = 6, 2


class NoReward(Reward):
    """Placeholder: these tests score nothing."""


@contextmanager
def episodes(
    file: Path, *overrides: str, on_states: OnStates = lambda _: None
) -> Iterator[tuple[Roles, Prompts]]:
    """Yield an actor that generates episodes with the rows of `file`, and their prompts."""
    config = compose(
        "grpo",
        [
            *given(train=f"[{file}]", prompt=64, response=256, engine="hf", n=N),
            hydra_text("actor_rollout_ref.model.path", real_path("quickstart")),
            f"{ROLLOUT}.multi_turn.enable=true",
            f"{ROLLOUT}.agent.environment=tests.plugins.agents.quiz:Quiz",
            f"{ROLLOUT}.agent.num_workers=1",
            *overrides,
        ],
    ).config
    tokenizer = tokenizer_of(config.actor_rollout_ref.model)
    prompts = PromptSet.load([str(file)], config.data, tokenizer, -1)
    info: RankInfo = rank_info()
    pool = InlinePool(info)
    try:
        actor = build_actor(config, load_algorithm(config, 1), tokenizer, pool)
        actor.start_engine()
        engines = ColocatedEngines(actor)
        generation = Generation(config, tokenizer, engines, info, on_states=on_states)
        with open_generator(generation) as (generator, _):
            roles = Roles(actor, NoReward(), generator_role=generator)
            yield roles, prompts.batch(range(len(prompts)))
    finally:
        pool.close()


def generate(roles: Roles, prompts: Prompts, **options: Any) -> Rollouts:
    roles.generator.update_weights()
    return roles.generator.generate_sequences(prompts, seed=3, **options)


def assert_trained(found: Rollouts, trained: Tensor) -> None:
    """Check that log-probs of the engine are as near to float64 as those `trained` (T,)."""
    model = AutoModelForCausalLM.from_pretrained(real_path("quickstart"))
    use_rlctl_attention(model)
    written = found.response_mask.values.bool()
    exact = exact_log_probs(model, found)[written]
    assert_as_exact(found.rollout_log_probs.values[written], trained[written], exact)


@dataclass
class Asked:
    """Actor that asks the quiz, its prompts, and the states on the way, which tests may clear."""

    roles: Roles
    prompts: Prompts
    states: list[Mapping[str, int]]

    @contextmanager
    def changed(self, **settings: Any) -> Iterator[Prompts]:
        """Change settings of the episodes for the block; yield two prompts."""
        generator = self.roles.generator
        assert isinstance(generator, EpisodeGenerator)
        before = generator.settings
        generator.settings = replace(before, **settings)
        try:
            yield self.prompts.select(torch.arange(2))
        finally:
            generator.settings = before

    @property
    def settings(self) -> EpisodeSettings:
        assert isinstance(self.roles.generator, EpisodeGenerator)
        return self.roles.generator.settings


@pytest.fixture(scope="module")
def quiz(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_quiz(tmp_path_factory.mktemp("quiz"), NUM_ROWS, num_problems=6)


@pytest.fixture(scope="module")
def asked(quiz: Path) -> Iterator[Asked]:
    states: list[Mapping[str, int]] = []
    fixed = f"{ROLLOUT}.agent.schedule=fixed"
    with episodes(quiz, fixed, on_states=states.append) as (roles, prompts):
        yield Asked(roles, prompts, states)


@pytest.fixture(scope="module")
def batch(asked: Asked) -> Rollouts:
    asked.states.clear()
    return generate(asked.roles, asked.prompts)


def test_engine_and_trainer_agree_after_five_replies(asked: Asked, batch: Rollouts) -> None:
    found, trained = batch, asked.roles.actor.compute_log_probs(batch).log_probs
    assert len(found) == NUM_ROWS * N
    assert [each.num_turns for each in found.episodes] == [6] * len(found)
    assert all(each.outcome == "done" for each in found.episodes)
    assert sum(each.num_retokenized for each in found.episodes) == 0
    written = found.response_mask.values.bool()
    assert 0 < written.float().mean() < 1
    assert_trained(found, trained.values)
    assert set(found.versions.values.tolist()) == {0}
    assert torch.equal(found.versions.lengths, found.response_ids.lengths)
    versions = [[each.version for each in one.messages] for one in found.episodes]
    assert versions == [[0, None] * 5 + [0]] * len(found)
    for turns, mask, ids in zip(
        found.turn.rows(), found.response_mask.rows(), found.response_ids.rows(), strict=True
    ):
        assert turns.unique().tolist() == list(range(6))
        assert (turns.diff() >= 0).all()
        assert mask[-1] == 1, "an episode ends with a turn of the policy"
        assert len(ids) == len(mask)
    for episode, ids in zip(found.episodes, found.response_ids.rows(), strict=True):
        assert all(each.num_tokens for each in episode.messages)
        assert sum(each.num_tokens for each in episode.messages) == len(ids)
    rewards = found.step_rewards.values
    torch.testing.assert_close(rewards[rewards != 0], torch.full_like(rewards[rewards != 0], 1 / 6))
    assert (rewards[~written] == 0).all()


@pytest.mark.parametrize("seed", [0, 1, 2**62 + 12345, 2**63 - 1])
def test_the_stream_of_a_turn_is_that_of_the_rows_of_a_batch(seed: int) -> None:
    streams = random_streams(seed, torch.arange(50)).tolist()
    assert [random_stream(seed, each) for each in range(50)] == streams
    assert [turn_seed(seed, each) for each in range(50)] == [seed, *streams[1:]]


@pytest.mark.parametrize("engine", ["hf", pytest.param("vllm", marks=pytest.mark.extra("vllm"))])
def test_all_tokens_agree_to_1e_5(engine: str, tmp_path: Path) -> None:
    """Text like that of the model's training: its logits are not large, so rounding is small."""
    write_rows(tmp_path / "rows.parquet", gridworld(GridworldParams(train=12, val=1))["train"])
    overrides = [
        hydra_text("actor_rollout_ref.model.path", real_path(AGENT)),
        *given(engine=engine, n=1),
        f"{ROLLOUT}.agent.environment=gridworld",
        f"{ROLLOUT}.agent.params={{max_turns: 8}}",
    ]
    with episodes(tmp_path / "rows.parquet", *overrides) as (roles, prompts):
        found = generate(roles, prompts)
        trained = roles.actor.compute_log_probs(found).log_probs
    assert sum(each.num_turns > 5 for each in found.episodes) >= 10
    assert sum(each.num_retokenized for each in found.episodes) == 0
    written = found.response_mask.values.bool()
    assert 0 < written.float().mean() < 1
    assert_trained(found, trained.values)


def test_fixed_and_eager_schedules_generate_the_same_tokens(asked: Asked, batch: Rollouts) -> None:
    again = generate(asked.roles, asked.prompts)
    assert torch.equal(batch.rollout_log_probs.values, again.rollout_log_probs.values)
    seen = [*asked.states]
    asked.states.clear()
    with asked.changed(fixed=False):
        eager = generate(asked.roles, asked.prompts)
    assert torch.equal(batch.response_ids.values, eager.response_ids.values)
    assert seen[0] == {"pending": NUM_ROWS * N}
    assert {"generating": NUM_ROWS * N} in seen
    for states in (seen, asked.states):
        assert all(sum(counts.values()) == NUM_ROWS * N for counts in states if counts)
        assert states[-1] == {}
    assert any("interacting" in counts for counts in [*seen, *asked.states])


def test_single_turn_rows_are_those_without_episodes(quiz: Path, asked: Asked) -> None:
    with episodes(quiz, f"{ROLLOUT}.multi_turn.enable=false") as (roles, prompts):
        plain = generate(roles, prompts)
    with asked.changed(default_agent="single_turn_agent"):
        found = generate(asked.roles, asked.prompts)
    assert torch.equal(found.response_ids.values, plain.response_ids.values)
    assert_trained(found, plain.rollout_log_probs.values)
    assert found.finish == plain.finish


@pytest.mark.parametrize(("limit", "turns"), [("max_assistant_turns", 2), ("max_user_turns", 3)])
def test_turns_are_limited(asked: Asked, limit: str, turns: int) -> None:
    limits = asked.settings.multi_turn.model_copy(update={limit: turns})
    with asked.changed(multi_turn=limits) as prompts:
        found = generate(asked.roles, prompts)
    assert {(each.outcome, each.num_turns) for each in found.episodes} == {("max_turns", turns)}


def test_tokens_of_turns_and_replies_are_limited(asked: Asked) -> None:
    with asked.changed(max_response_length=60) as prompts:
        found = generate(asked.roles, prompts)
    assert {each.outcome for each in found.episodes} == {"length"}
    assert int(found.response_ids.lengths.max()) <= 60
    assert set(found.finish) == {"length"}
    assert all(mask[-1] == 1 for mask in found.response_mask.rows())


def test_failed_environments_are_outcomes(asked: Asked) -> None:
    rows = [replace(row, extra_info={**row.extra_info, "fail_at": 1}) for row in asked.prompts.rows]
    prompts = replace(asked.prompts, rows=rows)
    too_many = f"{NUM_ROWS * N} of {NUM_ROWS * N} episodes failed; the first: environment_error"
    with pytest.raises(RlctlError, match=too_many):
        generate(asked.roles, prompts)
    with asked.changed(max_failed_share=1.0):
        found = generate(asked.roles, prompts)
    assert {each.outcome for each in found.episodes} == {"environment_error"}
    assert all("the quiz is broken" in (each.error or "") for each in found.episodes)


def test_messages_that_the_template_rejects_fail_their_episode(asked: Asked) -> None:
    template = (
        "{% for m in messages %}{% if m.role == 'user' and loop.previtem is defined "
        "and loop.index > 2 %}{{ raise_exception('users speak once') }}{% endif %}"
        "<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    tokenizer = copy(asked.settings.tokenizer)
    tokenizer.chat_template = template
    bridge = ChatBridge(tokenizer, asked.settings.sampling.stop_token_ids)
    with asked.changed(bridge=bridge, max_failed_share=1.0) as prompts:
        found = generate(asked.roles, prompts)
    assert {each.outcome for each in found.episodes} == {"environment_error"}
    assert "users speak once" in (found.episodes[0].error or "")


def test_hanging_environments_are_outcomes(quiz: Path) -> None:
    with episodes(
        quiz,
        f"{ROLLOUT}.agent.environment=tests.plugins.agents.quiz:Stuck",
        f"{ROLLOUT}.agent.max_failed_share=1",
        f"{ROLLOUT}.agent.timeouts.turn_s=1",
        f"{ROLLOUT}.agent.timeouts.episode_s=2",
    ) as (roles, prompts):
        found = generate(roles, prompts.select(torch.arange(2)))
    outcomes = {each.outcome for each in found.episodes}
    assert outcomes <= {"timeout", "environment_timeout", "environment_lost"}


def test_episodes_whose_process_is_killed_once_are_played_again(
    quiz: Path, batch: Rollouts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "kills").write_bytes(b"x")
    states: list[Mapping[str, int]] = []
    killed = f"{ROLLOUT}.agent.environment=tests.plugins.agents.quiz:Killed"
    with episodes(quiz, killed, on_states=states.append) as (roles, prompts):
        found = generate(roles, prompts)
        assert [each.outcome for each in found.episodes] == [e.outcome for e in batch.episodes]
        assert all(sum(each.values()) in (0, NUM_ROWS * N) for each in states)
        (tmp_path / "kills").write_bytes(b"xx")
        with pytest.raises(RlctlError, match=r"12 of 12 episodes failed.*environment_lost"):
            generate(roles, prompts)
    assert (tmp_path / "kills").stat().st_size == 0


def test_episodes_of_a_stream_are_those_of_a_batch(tmp_path: Path) -> None:
    """Each prompt is a group of its own; all are played at the same time."""
    quiz = write_quiz(tmp_path, 3, num_problems=2)
    with episodes(quiz) as (roles, asked):
        batch = generate(roles, asked)
        generator = roles.generator
        assert isinstance(generator, EpisodeGenerator)
        engines = generator.engines
        with streamed(engines, generator) as stream:
            groups = [asked.select(torch.tensor([i])) for i in range(len(asked))]
            futures = [stream.submit(each, seed=3) for each in groups]
            found = [each.result(WAIT_S) for each in futures]
            validating = StreamedGenerator(engines, stream)
            validated = validating.generate_sequences(asked, 3, validate=True)
        assert not +stream._schedule.states
    ids = [row.tolist() for each in found for row in each.response_ids.rows()]
    assert ids == [row.tolist() for row in batch.response_ids.rows()]
    assert torch.equal(torch.cat([each.group for each in found]), batch.group)
    assert {each.outcome for part in found for each in part.episodes} == {"done"}
    assert len(validated) == len(asked)
    # A resumed run joins groups of its checkpoint to new ones.
    write_rollouts(tmp_path / "groups", found[0], [0] * len(found[0]))
    stored = read_rollouts(tmp_path / "groups", asked.rows, Rollouts)
    both = Batch.concat([stored, *found[1:]])
    assert len(prompt_numbers(both.prompt_ids, images=both.images)) == len(batch)
