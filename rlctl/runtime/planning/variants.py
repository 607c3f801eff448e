"""Checks of configurations that differ from a checked one in a few values, as in a sweep."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

from rlctl.recipes import schema
from rlctl.recipes.compose import Recipe
from rlctl.runtime.data import bundled
from rlctl.runtime.planning.draft import CHECKS, Draft, check_rewards
from rlctl.runtime.planning.model_paths import with_models
from rlctl.runtime.planning.plan import Plan

# Keys of `data` that do not change the prompts.
_NOT_PROMPTS = {
    *("train_batch_size", "gen_batch_size", "val_batch_size", "max_response_length"),
    *("shuffle", "seed", "sampler", "sampler_params"),
}

# Settings of optimizers and losses that need no memory.
_NO_MEMORY = frozenset(
    [
        *("lr", "lr_warmup_steps", "lr_warmup_steps_ratio", "lr_scheduler_type", "min_lr_ratio"),
        *("weight_decay", "betas", "eps", "clip_ratio", "clip_ratio_low", "clip_ratio_high"),
        *("clip_ratio_c", "cliprange_value", "kl_loss_coef", "kl_loss_type", "loss_agg_mode"),
        *("temperature", "top_p", "top_k", "gamma", "lam", "seed", "shuffle", "sampler"),
    ]
)
_READ = ("prompts", "validator")
_SHARED = (*_READ, "memory")


class Variants:
    """Checks of other configurations, which share what equal settings make.

    The tokenizer, the prompts and the trial of the rewards are made once for equal data and models.
    """

    def __init__(self, first: Plan) -> None:
        self._made: dict[tuple[str, str], Any] = {}
        draft = Draft(first.recipe, first.config, first.config.data, False, None)
        parts: dict[str, Any] = {"prompts": first.loader.prompts, "validator": first.validator}
        parts["memory"] = first.memory
        self._made |= {(name, self._key(draft, name)): parts[name] for name in _SHARED}
        self._rewards = {self._key(draft, "rewards")}

    def check(self, recipe: Recipe) -> None:
        """Run the checks of a plan. Raises all problems at once."""
        config = with_models(recipe.config)
        draft = Draft(recipe, config, config.data, False, None)
        keys = {name: (name, self._key(draft, name)) for name in _SHARED}
        shared = {name: self._made[key] for name, key in keys.items() if key in self._made}
        is_read = all(name in shared for name in _READ)
        with nullcontext(config) if is_read else bundled.readable(config) as existing:
            draft.data = existing.data
            for name, made in shared.items():
                setattr(draft, name, made)
            has_new_rewards = self._key(draft, "rewards") not in self._rewards
            for check in CHECKS:
                if check is not check_rewards or has_new_rewards:
                    draft.errors.run(check, draft)
            draft.errors.raise_all()
            for name, key in keys.items():
                self._made[key] = getattr(draft, name)
            self._rewards.add(self._key(draft, "rewards"))

    def _key(self, draft: Draft, name: str) -> str:
        """Return the settings that a shared part depends on, as text."""
        config: schema.Config = draft.config
        if name == "memory":
            kept = _with_memory(config.model_dump(exclude={"sweep"}))
            return repr(kept)
        data = config.data.model_dump(exclude=_NOT_PROMPTS)
        parts: list[object] = [data, config.algorithm.name, config.algorithm.adv_estimator]
        parts += [config.actor_rollout_ref.model, config.reward.reward_model]
        if name == "validator":
            parts += [config.data.val_batch_size, config.trainer.seed]
        if name == "rewards":
            parts += [config.reward, config.actor_rollout_ref.rollout.n]
        return repr(parts)


def _with_memory(settings: Any) -> Any:
    """Return nested settings without those that need no memory."""
    if not isinstance(settings, dict):
        return settings
    return {name: _with_memory(value) for name, value in settings.items() if name not in _NO_MEMORY}


@contextmanager
def each_message_once() -> Iterator[None]:
    """Drop log messages that repeat an earlier one of the block."""
    seen: set[str] = set()

    def is_new(record: logging.LogRecord) -> bool:
        message = record.getMessage()
        found = message in seen
        seen.add(message)
        return not found

    handlers = list(logging.getLogger("rlctl").handlers)
    for handler in handlers:
        handler.addFilter(is_new)
    try:
        yield
    finally:
        for handler in handlers:
            handler.removeFilter(is_new)
