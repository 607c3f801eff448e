"""Validation of a model, its scores and its responses, without a run: in this process."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch
from transformers import PreTrainedTokenizerBase

from rlctl.data_prep.images import Image, content_of
from rlctl.data_prep.message_parts import PLACEHOLDER
from rlctl.data_prep.rows import PromptRow
from rlctl.data_prep.sources import VALIDATION
from rlctl.episodes import Episode
from rlctl.errors import ConfigError, UsageError, raise_problems
from rlctl.recipes import schema
from rlctl.recipes.recorded import missing_secrets
from rlctl.recipes.role_table import REWARD_LEARNER, REWARD_MODEL
from rlctl.runtime.algorithms.base import Algorithm, Needs, generate
from rlctl.runtime.algorithms.pair_metrics import pair_metrics
from rlctl.runtime.base.batch import Prompts, Ragged, Rollouts
from rlctl.runtime.base.metrics import to_floats
from rlctl.runtime.base.roles import RewardModel, Roles
from rlctl.runtime.build import (
    build_actor,
    build_reward,
    load_algorithm,
    request_settings,
    role_plugin,
)
from rlctl.runtime.cluster.pools import InlinePool
from rlctl.runtime.data.conversations import Conversations, Pairs
from rlctl.runtime.data.image_prompts import ImagePrompts
from rlctl.runtime.data.loader import PromptSet, check_tokens
from rlctl.runtime.data.tokenizer import (
    Chat,
    encode_prompt,
    encode_text,
    tokenizer_of,
    with_response,
)
from rlctl.runtime.generation.policy_engines import ColocatedEngines
from rlctl.runtime.generators import Generation, open_generator
from rlctl.runtime.planning.devices import inline_rank_info
from rlctl.runtime.planning.evaluation import no_responses
from rlctl.runtime.planning.image_check import check_images
from rlctl.runtime.planning.preflight import check_model, check_vocabulary
from rlctl.runtime.planning.unusual_values import greedy_validation, missing_generation_prompt
from rlctl.runtime.rewards.functions import CallResult
from rlctl.runtime.rewards.reward_pool import RewardPool
from rlctl.runtime.rewards.reward_report import RewardReport
from rlctl.runtime.rewards.specs import scored_sources
from rlctl.runtime.training.validation import Validation, Validator

LOG = logging.getLogger(__name__)

_CHUNK = 256  # responses between two reports of progress


@dataclass(frozen=True)
class Answer:
    """Response to a prompt. `length` is in tokens, `log_prob` is the sum over them."""

    prompt: str
    text: str
    length: int
    finish: str
    log_prob: float


def evaluate(config: schema.Config) -> Validation:
    """Generate responses to `data.val_files` with `rollout.val_kwargs`, and score them.

    A reward model scores the preference pairs of the files.
    """
    if config.data.val_files is None:
        raise UsageError(
            "no data to evaluate on: data.val_files is null",
            hint="data.val_files=FILE.parquet",
        )
    if Needs.REWARD_LEARNER in load_algorithm(config, num_steps=1).needs:
        return _evaluate_pairs(config, config.data.val_files)
    raise_problems(missing_secrets(config))
    for warning in greedy_validation(config.actor_rollout_ref.rollout.val_kwargs):
        LOG.warning(warning)
    tokenizer = tokenizer_of(config.actor_rollout_ref.model)
    data = config.data
    model = config.actor_rollout_ref.model
    for warning in missing_generation_prompt(tokenizer, data.apply_chat_template_kwargs):
        LOG.warning(warning)
    samples = data.val_max_samples
    files = config.data.val_files
    prompts = PromptSet.load(files, data, tokenizer, samples, VALIDATION, model)
    if prompts.has_images:
        check_images(config, None, Needs.ENGINE)
    tokens = map(prompts.encode, prompts.rows)
    kinds = prompts.rows.first_of_each_kind(1)
    has_tokens = data.reader is not None and Needs.GROUPS not in load_algorithm(config, 1).needs
    scored = [] if has_tokens else kinds
    with _roles(config, tokenizer, tokens, scored) as roles:
        if has_tokens:
            from rlctl.runtime.training.loss_validation import LossValidator

            return LossValidator(prompts, config.data.val_batch_size).run(roles)
        return Validator(prompts, config.data.val_batch_size, tokenizer, config.trainer.seed).run(
            roles
        )


def _evaluate_pairs(config: schema.Config, files: Sequence[str]) -> Validation:
    """Score the preference pairs of `files` with the reward model that a run has trained."""
    settings = config.reward.reward_model
    data = config.data
    raise_problems(check_model(config, REWARD_MODEL))
    tokenizer = tokenizer_of(settings.model)
    prompts = PromptSet.load(
        files, data, tokenizer, data.val_max_samples, VALIDATION, settings.model
    )
    pairs = Pairs.from_config(settings, data)
    pairs.check(prompts.rows)
    with reward_model(config) as model:
        return role_plugin(REWARD_LEARNER.name).validator(config, prompts).score(model)


@contextmanager
def reward_model(config: schema.Config) -> Iterator[RewardModel]:
    """Yield the reward model of `config`, frozen, in this process."""
    pool = InlinePool(inline_rank_info(config.trainer))
    try:
        yield role_plugin(REWARD_MODEL.name).build(config, pool)
    finally:
        pool.close()


def model_report(
    config: schema.Config,
    rows: Sequence[PromptRow],
    texts: Sequence[str],
    on_progress: Callable[[int], None],
) -> RewardReport:
    """Score one response to each of `rows` with the reward model alone; scores are raw.

    A conversation that the chat template rejects is an error with score 0, as in training. One that
    is too long has the component `truncated`. Raises ConfigError for a model that cannot be loaded.
    """
    settings = config.reward.reward_model
    raise_problems(check_model(config, REWARD_MODEL))
    conversations = Conversations.from_config(settings)
    encoded: list[list[int]] = []
    errors: dict[int, str] = {}
    for index, (row, text) in enumerate(zip(rows, texts, strict=True)):
        try:
            chat = with_response(row.prompt, text)
            ids = conversations.encode(chat, tuple(map(content_of, row.images)))
        except ConfigError as error:
            errors[index] = error.problems[0].message
            ids = []
        encoded.append(ids)
    usable = [index for index in range(len(rows)) if index not in errors]
    scores = dict.fromkeys(range(len(rows)), 0.0)
    with reward_model(config) as model:
        for start in range(0, len(usable), _CHUNK):
            part = usable[start : start + _CHUNK]
            owner = _to_prompts([rows[index] for index in part], [[]] * len(part))
            batch = conversations.to_rollouts(owner, [encoded[index] for index in part])
            values = model.compute_rewards(batch).values.float().tolist()
            scores |= dict(zip(part, values, strict=True))
            on_progress(start + len(part))
    results = [
        CallResult(
            scores[index],
            {"truncated": 1.0} if conversations.is_too_long(ids) else {},
            errors.get(index),
        )
        for index, ids in enumerate(encoded)
    ]
    return RewardReport(results, len(errors), 0, next(iter(errors.values()), None))


def pair_summary(report: RewardReport) -> dict[str, float]:
    """Return accuracy, margin and calibration error of pairs without errors.

    The results of a pair are adjacent, the chosen response first.
    """
    pairs = zip(report.results[::2], report.results[1::2], strict=True)
    scores = [(one.score, two.score) for one, two in pairs if not (one.error or two.error)]
    flat = torch.tensor(scores, dtype=torch.float64).flatten()
    found = to_floats(pair_metrics(flat, torch.zeros(len(scores)), "pairs"))
    return {name: found.get(f"pairs/{name}", 0.0) for name in ("accuracy", "margin", "ece")}


def answer(
    config: schema.Config, prompts: Sequence[str], seed: int, images: Sequence[Image] = ()
) -> list[Answer]:
    """Return n adjacent responses to each of `prompts`, generated with `rollout.val_kwargs`.

    Each prompt has all `images`, at its start unless it refers to them.
    """
    model = config.actor_rollout_ref.model
    kwargs = config.data.apply_chat_template_kwargs
    tokenizer = tokenizer_of(model)
    reader = None
    if images:
        reader = ImagePrompts(model, tokenizer)
        start = PLACEHOLDER * len(images)
        check_images(config, None, Needs.ENGINE)
        prompts = [text if PLACEHOLDER in text else start + text for text in prompts]

    def encode(chat: Chat) -> list[int]:
        if reader is None:
            return encode_prompt(tokenizer, chat, **kwargs)
        return encode_text(tokenizer, reader.render(chat, images, **kwargs))

    chats = [[{"role": "user", "content": text}] for text in prompts]
    rows = [PromptRow("chat", chat, None, images=tuple(images)) for chat in chats]
    ids = list(map(encode, chats))
    longest = max(map(len, ids))
    if config.actor_rollout_ref.rollout.multi_turn.enable:  # environment and tools add to a prompt
        longest = max(longest, config.data.max_prompt_length)
    data = config.data.model_copy(update={"max_prompt_length": longest})
    rollouts = _generate(config.model_copy(update={"data": data}), tokenizer, rows, ids, seed)
    texts = tokenizer.batch_decode(
        [response.tolist() for response in rollouts.response_ids.rows()], skip_special_tokens=True
    )
    log_probs = rollouts.rollout_log_probs.sums().tolist()
    lengths = rollouts.response_ids.lengths.tolist()
    return [
        Answer(row.prompt[-1]["content"], text, length, finish, log_prob)
        for row, text, length, finish, log_prob in zip(
            rollouts.rows, texts, lengths, rollouts.finish, log_probs, strict=True
        )
    ]


def play(config: schema.Config, rows: Sequence[PromptRow], seed: int) -> list[tuple[str, Episode]]:
    """Play an episode for each of `rows`; return each episode after its prompt.

    A row may lack a prompt if its environment gives one.
    """
    tokenizer = tokenizer_of(config.actor_rollout_ref.model)
    kwargs = config.data.apply_chat_template_kwargs
    ids = [encode_prompt(tokenizer, row.prompt, **kwargs) if row.prompt else [] for row in rows]
    rollouts = _generate(config, tokenizer, rows, ids, seed)
    prompts = tokenizer.batch_decode([prompt.tolist() for prompt in rollouts.prompt_ids.rows()])
    return list(zip(prompts, rollouts.episodes, strict=True))


def _to_prompts(rows: Sequence[PromptRow], ids: Sequence[list[int]]) -> Prompts:
    return Prompts(
        prompt_ids=Ragged.from_rows(ids, dtype=torch.int64),
        group=torch.arange(len(rows)),
        rows=list(rows),
        images=[tuple(map(content_of, row.images)) for row in rows],
    )


def _generate(
    config: schema.Config,
    tokenizer: PreTrainedTokenizerBase,
    rows: Sequence[PromptRow],
    ids: Sequence[list[int]],
    seed: int,
) -> Rollouts:
    """Return n adjacent responses to each row's prompt `ids`, with `rollout.val_kwargs`."""
    with _roles(config, tokenizer, ids) as roles:
        return generate(_to_prompts(rows, ids), roles, seed, validate=True)


@contextmanager
def judged_pool(
    config: schema.Config, sources: Iterable[str], num_processes: int
) -> Iterator[RewardPool]:
    """Yield a pool of the reward functions, with the engine of the run's judge."""
    rank_info = inline_rank_info(config.trainer)
    with ExitStack() as stack:
        processes = InlinePool(rank_info)
        stack.callback(processes.close)
        requests = request_settings(config, None, processes)
        yield stack.enter_context(
            RewardPool.from_config(config.reward, sources, num_processes, requests=requests)
        )


def generating_algorithm(config: schema.Config) -> Algorithm:
    """Return the algorithm of a policy. Raises UsageError for that of a reward model."""
    algorithm = load_algorithm(config, num_steps=1)
    if Needs.REWARD_LEARNER in algorithm.needs:
        raise no_responses()
    return algorithm


@contextmanager
def _roles(
    config: schema.Config,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Iterable[Sequence[int]],
    scored: Sequence[PromptRow] = (),
) -> Iterator[Roles]:
    """Build an actor with its engine and the reward of the `scored` rows, and no other role.

    `prompts` are the tokens of all prompts. Raises ConfigError if the model lacks one.
    """
    algorithm = generating_algorithm(config)
    raise_problems(check_model(config))
    lacking = check_vocabulary(config.actor_rollout_ref.model, tokenizer, "actor_rollout_ref.model")
    check_tokens(prompts, lacking)
    sources = scored_sources(config, (row.data_source for row in scored))
    rank_info = inline_rank_info(config.trainer)
    with ExitStack() as stack:
        pool = InlinePool(rank_info)
        stack.callback(pool.close)
        judge = pool if scored else None
        reward = stack.enter_context(build_reward(config, tokenizer, sources, judge=judge))
        actor = build_actor(config, algorithm, tokenizer, pool)
        actor.start_engine()
        scoring = reward if scored else None
        engines = ColocatedEngines(actor)
        generation = Generation(config, tokenizer, engines, rank_info, reward=scoring)
        generator, _ = stack.enter_context(open_generator(generation))
        yield Roles(actor, reward, generator_role=generator)
