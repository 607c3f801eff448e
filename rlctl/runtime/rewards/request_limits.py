"""Settings of the requests that asynchronous reward functions send, for all of them together."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:  # the process of the functions does not load it
    from rlctl.recipes import schema

CACHE_FILE = ".reward_cache.sqlite"  # hidden: a remote copy of the run leaves it out


@dataclass(frozen=True)
class RequestSettings:
    """Limits, retries and cache of requests; plain data that is sent to the process."""

    timeout_s: float = 10.0  # of one attempt
    max_concurrent: int = 64
    max_rpm: int | None = None  # requests in any 60 seconds
    max_tpm: int | None = None  # tokens in any 60 seconds
    tokens_per_call: int = 2000  # of a call whose tokens are unknown
    max_retries: int = 5
    cache: Path | None = None  # None: nothing is kept
    engines: tuple[str, ...] = ()  # base URLs of the run's engines
    engine_key: str = ""
    engine_name: str = ""  # of their model, for the cache

    @classmethod
    def from_config(cls, reward: schema.Reward, run: Path | None) -> Self:
        """Read the settings; without a path the cache is in the folder `run`, if any."""
        cache = run and run / CACHE_FILE
        if reward.cache_path is not None:
            cache = Path(reward.cache_path).expanduser().absolute()
        return cls(
            timeout_s=reward.timeout_s,
            max_concurrent=reward.max_concurrent,
            max_rpm=reward.max_rpm,
            max_tpm=reward.max_tpm,
            tokens_per_call=reward.estimated_tokens_per_request,
            max_retries=reward.max_retries,
            cache=cache.absolute() if cache is not None and reward.cache else None,
        )
