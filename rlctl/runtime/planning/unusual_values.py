"""Warnings about values that can hardly be meant, and the check of an episode of one row."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from rlctl.data_prep.agent_columns import agent_problems
from rlctl.data_prep.rows import PromptRow
from rlctl.errors import ConfigError, raise_problems
from rlctl.plugins import load
from rlctl.recipes import schema
from rlctl.recipes.role_table import needed_roles, rollout_pool
from rlctl.runtime.algorithms.base import Needs
from rlctl.runtime.cluster.address import address_of
from rlctl.runtime.data.tokenizer import render_prompt, stop_token_ids

LOG = logging.getLogger(__name__)

_MANY_RESPONSES = 100_000  # per step; DAPO's 512 prompts × 16 responses are 8,192
_ANSWER = "an answer"
_HIGH_LR = 0.1  # AdamW moves each weight by up to `lr`, and weights are below 1


def unusual_values(config: schema.Config, needs: Needs) -> Iterator[str]:
    """Yield one warning for each such value of the configuration."""
    rollout = config.actor_rollout_ref.rollout
    data = config.data
    trainer = config.trainer
    responses = data.train_batch_size * rollout.n
    if Needs.GROUPS in needs and responses > _MANY_RESPONSES:
        yield (
            f"a step generates {responses:,} responses: data.train_batch_size="
            f"{data.train_batch_size} × actor_rollout_ref.rollout.n={rollout.n}"
        )
    for role in needed_roles(config, needs):
        if role.learns and (lr := role.learner(config).optim.lr) >= _HIGH_LR:
            yield (
                f"{role.section}.optim.lr={lr:g} overwrites the weights: AdamW moves each weight "
                "by up to this much in an update; 1e-7 to 1e-3 are usual"
            )
    steps = trainer.total_training_steps
    if Needs.CRITIC in needs and steps is not None and steps <= trainer.critic_warmup:
        yield (
            f"the actor never learns: trainer.critic_warmup={trainer.critic_warmup} of {steps} "
            "steps train only the critic"
        )
    if data.val_files and Needs.ENGINE in needs:
        yield from greedy_validation(rollout.val_kwargs)
    beside = config.async_training
    if beside.max_staleness == 1 and not beside.eager and rollout_pool(config, needs) is None:
        yield (
            "async_training.max_staleness=1 saves no time without engines of their own, which "
            "trainer.placement.rollout=POOL gives: generation and training take turns"
        )
    if trainer.nnodes > 1 and address_of(config.ray_kwargs.ray_init) is None:
        yield (
            f"trainer.nnodes={trainer.nnodes} needs a running Ray cluster, and none is named: set "
            "RAY_ADDRESS or ray_kwargs.ray_init.address, or start with --address"
        )


def greedy_validation(given: schema.ValKwargs) -> Iterator[str]:
    """Yield a warning if responses should be sampled, or differ, and are greedy."""
    section = "actor_rollout_ref.rollout.val_kwargs"
    if given.do_sample and given.temperature == 0:
        yield (
            f"{section}.do_sample=true samples at temperature 0, which is greedy: set "
            f"{section}.temperature=1.0"
        )
    elif not given.do_sample and given.n > 1:
        yield (
            f"{section}.n={given.n} gives equal responses to a prompt, because they are greedy: "
            f"set {section}.do_sample=true and {section}.temperature=1.0"
        )


def missing_generation_prompt(
    tokenizer: PreTrainedTokenizerBase, kwargs: Mapping[str, Any]
) -> Iterator[str]:
    """Yield a warning if the template begins an assistant's turn only with its text."""
    chat = [{"role": "user", "content": "1"}]
    finished = [*chat, {"role": "assistant", "content": _ANSWER}]
    without = {**kwargs, "add_generation_prompt": False}
    try:
        prompt = render_prompt(tokenizer, chat, **kwargs)
        ignored = prompt == render_prompt(tokenizer, chat, **without)
        written = render_prompt(tokenizer, finished, **without)
    except ConfigError:  # other checks report it
        return
    begin = written.removeprefix(prompt).partition(_ANSWER)[0].strip()
    if ignored and begin and written.startswith(prompt):
        yield (
            f"the chat template ignores add_generation_prompt: prompts lack {begin!r}, with which "
            "it begins a response, and a model that was trained with it may not respond; add "
            f"{{% if add_generation_prompt %}}{begin}{{% endif %}} to the end of the template"
        )


def warn_of_stop_tokens(config: schema.Config, tokenizer: PreTrainedTokenizerBase) -> None:
    """Warn of turns that end without a stop token."""
    model = config.actor_rollout_ref.model
    kwargs = {**config.data.apply_chat_template_kwargs, "add_generation_prompt": False}
    chat = [{"role": "user", "content": "1"}, {"role": "assistant", "content": _ANSWER}]
    try:
        stops = stop_token_ids(tokenizer, model.path)
        end = render_prompt(tokenizer, chat, **kwargs).rpartition(_ANSWER)[2].strip()
    except ConfigError:  # other checks report it
        return
    if end and not set(stops) & set(tokenizer.encode(end, add_special_tokens=False)):
        LOG.warning(
            "the chat template ends a turn with %r, which has no stop token; responses end at %s: "
            "add the token to eos_token_id in generation_config.json",
            end,
            ", ".join(repr(tokenizer.decode([token])) for token in stops),
        )


def check_rows(
    config: schema.Config, tokenizer: PreTrainedTokenizerBase, rows: Sequence[PromptRow]
) -> None:
    """Check tokenizer and rows that responses are sampled for, and the generator with them.

    Raises ConfigError for rows that need several turns without `multi_turn.enable`, and as
    `GeneratorKind.check`.
    """
    warn_of_stop_tokens(config, tokenizer)
    turns = config.actor_rollout_ref.rollout.multi_turn
    raise_problems(agent_problems(rows, turns.enable))
    if turns.enable:
        load("generators", turns.generator).check(config, tokenizer, rows)
