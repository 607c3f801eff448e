"""Check of episodes before a run starts: rows, chat template, and the environment of one row."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from rlctl.data_prep.agent_columns import SINGLE_TURN, agent_problems
from rlctl.data_prep.rows import PromptRow
from rlctl.errors import raise_problems
from rlctl.recipes import schema
from rlctl.runtime.agents.build import check_episodes
from rlctl.runtime.data.tokenizer import stop_token_ids
from rlctl.runtime.planning.unusual_values import warn_of_tokens
from rlctl.runtime.sandbox.isolation import missing_isolation

LOG = logging.getLogger(__name__)


def check_rows(
    config: schema.Config, tokenizer: PreTrainedTokenizerBase, rows: Sequence[PromptRow]
) -> None:
    """Check tokenizer and rows that responses are sampled for, and the episode of one of them.

    Raises ConfigError for rows that need several turns without `multi_turn.enable`, and as
    `check_episodes`.
    """
    warn_of_tokens(config, tokenizer)
    rollout = config.actor_rollout_ref.rollout
    enabled, default = rollout.multi_turn.enable, rollout.agent.default_agent_loop
    raise_problems(agent_problems(rows, enabled))
    first = next((row for row in rows if (row.agent_name or default) != SINGLE_TURN), None)
    if enabled and first is not None:
        missing = missing_isolation() if "python" in rollout.agent.params.get("tools", ()) else None
        if missing:
            LOG.warning("%s (apt install bubblewrap)", missing)
        stops = stop_token_ids(tokenizer, config.actor_rollout_ref.model.path)
        check_episodes(config, tokenizer, stops, first)
