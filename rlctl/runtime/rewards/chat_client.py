"""Client of OpenAI-compatible servers for asynchronous reward functions.

`complete` sends one chat completion within the run's limits, repeats it after failures that pass,
and keeps the reply in the run's cache. A function that uses it declares `limits_requests`.

The cache has replies by a hash of all that determines them. SQLite makes a write atomic and lets
several processes, also of different runs, share a file. An entry has the reply only: no request, no
prompt and no key of an API.
"""

from __future__ import annotations

import asyncio
import email.utils
import hashlib
import itertools
import json
import logging
import os
import random
import re
import sqlite3
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlsplit

from rlctl.network import is_loopback
from rlctl.runtime.rewards.limiter import Limiter
from rlctl.runtime.rewards.request_limits import RequestSettings

if TYPE_CHECKING:
    import aiohttp


T = TypeVar("T")

_FIRST_DELAY_S = 0.5  # of a retry
_LONGEST_DELAY_S = 30.0
_LONGEST_RETRY_AFTER_S = 300.0
_PASSING = (408, 409, 425, 429)  # and all from 500
_MAX_TEXT = 300  # characters of a server's error
_CHARACTERS_PER_TOKEN = 4
_DATA_URL = re.compile(r'"data:[^"]*"')


class RequestFailed(Exception):
    """Failure of a request, after its retries."""


class RequestTimeout(RequestFailed, TimeoutError):
    """Failure of a request whose last attempt took too long."""


class _Passing(Exception):
    """Failure that may pass; `after` is the server's Retry-After in seconds."""

    def __init__(self, text: str, after: float | None = None, is_timeout: bool = False) -> None:
        super().__init__(text)
        self.after = after
        self.is_timeout = is_timeout


class ChatClient:
    """Connections, limits and cache that all requests of a process share."""

    def __init__(self, settings: RequestSettings) -> None:
        self.settings = settings
        self.limiter = Limiter(settings)
        self._cache = None if settings.cache is None else ReplyCache(settings.cache)
        self._sessions: dict[bool, aiohttp.ClientSession] = {}  # by whether a proxy may be used
        self._open: dict[str, asyncio.Future[Any]] = {}  # requests in progress, by their hash
        self._engines = itertools.cycle(settings.engines)

    async def complete(
        self,
        messages: Sequence[Mapping[str, Any]],
        accept: Callable[[str], T],
        *,
        base_url: str | None,
        model: str,
        api_key_env: str | None = None,
        **body: Any,
    ) -> T:
        """Return `accept(text)` of the completion of `messages`; see the module.

        `base_url` None is the run's engine. `api_key_env` names the environment variable with
        the key. `body` has further parameters of the request. `accept` raises ValueError for a text
        without a result, which is not kept. Raises RequestFailed, and the ValueError.
        """
        body = {"model": model, "messages": list(messages), **body}
        key = ReplyCache.key([base_url or self.settings.engine_name, body])
        text = None if self._cache is None else self._cache.get(key)
        if text is None:
            text = await self._shared(key, base_url, api_key_env, body)
            result = accept(text)
            if self._cache is not None:
                self._cache.put(key, text)
            return result
        return accept(text)

    async def close(self) -> None:
        """Close the connections."""
        for session in self._sessions.values():
            await session.close()

    async def _shared(
        self, key: str, base_url: str | None, api_key_env: str | None, body: Mapping[str, Any]
    ) -> str:
        """Send a request; with a cache, equal requests at the same time are sent once."""
        if self._cache is None:
            return await self._send(base_url, api_key_env, body)
        if key not in self._open:
            task = asyncio.ensure_future(self._send(base_url, api_key_env, body))
            task.add_done_callback(lambda _: self._open.pop(key, None))
            self._open[key] = task
        return await asyncio.shield(self._open[key])

    async def _send(
        self, base_url: str | None, api_key_env: str | None, body: Mapping[str, Any]
    ) -> str:
        """Send a request until it succeeds or its retries are used up."""
        if base_url is None and not self.settings.engines:
            raise RequestFailed("no base_url is set, and the run has no engine of its own")
        secret = self.settings.engine_key if base_url is None else _secret(api_key_env)
        text = _DATA_URL.sub("", json.dumps(body))
        size = len(text) // _CHARACTERS_PER_TOKEN + int(body.get("max_tokens") or 0)
        for attempt in itertools.count(1):
            url = (next(self._engines) if base_url is None else base_url).rstrip("/")
            try:
                async with self.limiter.slot(size) as charge:
                    reply = await self._post(f"{url}/chat/completions", secret, body)
                    if isinstance(used := _tokens(reply), int):
                        self.limiter.correct(charge, used)
                return _content(reply)
            except _Passing as error:
                if attempt > self.settings.max_retries:
                    text = f"{error}, in the last of {attempt} attempts"
                    if error.is_timeout:
                        raise RequestTimeout(text) from None
                    raise RequestFailed(text) from None
                delay = min(_FIRST_DELAY_S * 2 ** (attempt - 1), _LONGEST_DELAY_S)
                if error.after is not None:
                    self.limiter.pause(delay := error.after)
                await asyncio.sleep(delay * random.uniform(1.0, 1.25))
        raise AssertionError("the loop has no end")

    async def _post(self, url: str, secret: str, body: Mapping[str, Any]) -> Any:
        """Send one attempt and return the reply. Raises _Passing or RequestFailed."""
        import aiohttp

        # A proxy of the environment would look for this machine's servers on the proxy's machine.
        may_use_proxy = not is_loopback(urlsplit(url).hostname or "")
        session = self._sessions.get(may_use_proxy)
        if session is None:
            # The slots of the limiter limit the connections.
            connector = aiohttp.TCPConnector(limit=0)
            session = aiohttp.ClientSession(connector=connector, trust_env=may_use_proxy)
            self._sessions[may_use_proxy] = session
        limit = self.settings.timeout_s
        headers: dict[str, str] = {}
        if secret:
            headers["Authorization"] = f"Bearer {secret}"
        try:
            async with (
                asyncio.timeout(limit),
                session.post(
                    url,
                    json=body,
                    headers=headers,
                    timeout=aiohttp.ClientTimeout(None),
                    allow_redirects=False,  # the request and its key are for this server
                ) as response,
            ):
                # A server may repeat the key, and replies are kept.
                text = _without(await response.text(errors="replace"), secret)
                if response.status != 200:
                    raise _failure(response, text)
                return json.loads(text)
        except TimeoutError:
            raise _Passing(f"took longer than {limit:g} s", is_timeout=True) from None
        except json.JSONDecodeError:
            raise _Passing("the reply is not valid JSON") from None
        except aiohttp.ClientError as error:
            text = f"{type(error).__name__}: {error}"
            raise _Passing(_without(text, secret)) from None


def _secret(variable: str | None) -> str:
    if variable is None:
        return ""
    found = os.environ.get(variable)
    if not found:
        raise RequestFailed(f"the environment variable {variable} with the API key is not set")
    return found


def _failure(response: aiohttp.ClientResponse, text: str) -> Exception:
    """Return the exception of a reply with an error status."""
    short = " ".join(text.split())[:_MAX_TEXT]
    if target := response.headers.get("Location"):
        short = f"redirects to {target:.{_MAX_TEXT}}, which is not followed"
    message = f"HTTP {response.status} {response.reason}: {short}"
    if response.status in _PASSING or response.status >= 500:
        return _Passing(message, _retry_after(response.headers.get("Retry-After")))
    return RequestFailed(message)


def _without(text: str, secret: str) -> str:
    if not secret:
        return text
    return text.replace(secret, "***")


def _retry_after(header: str | None) -> float | None:
    """Return the seconds of a Retry-After header: a number, or a date."""
    if header is None:
        return None
    seconds: float | None = None
    with suppress(ValueError, TypeError):
        seconds = float(header)
    if seconds is None:
        with suppress(ValueError, TypeError):
            seconds = email.utils.parsedate_to_datetime(header).timestamp() - time.time()
    if seconds is None:
        return None
    return min(max(0.0, seconds), _LONGEST_RETRY_AFTER_S)


def _content(reply: Any) -> str:
    """Return the text of a completion. Raises _Passing if the reply is something else."""
    try:
        text = reply["choices"][0]["message"]["content"]
    except (KeyError, IndexError, TypeError):
        raise _Passing(f"the reply is no chat completion: {reply!r:.100}") from None
    if not isinstance(text, str) or not text.strip():
        finish = reply["choices"][0].get("finish_reason")
        raise RequestFailed(f"the reply has no text; its finish_reason is {finish!r}")
    return text


def _tokens(reply: Any) -> Any:
    match reply:
        case {"usage": {"total_tokens": number}}:
            return number
        case _:
            return None


_client: ChatClient | None = None


def install(settings: RequestSettings) -> ChatClient:
    """Create the client of this process."""
    global _client
    _client = ChatClient(settings)
    return _client


def client() -> ChatClient:
    """Return the client of this process, with the limits of the run or the default limits."""
    return _client or install(RequestSettings())


LOG = logging.getLogger(__name__)

_BUSY_S = 10.0  # wait for another process


class ReplyCache:
    """Map of requests to replies in the file `path`; a file that fails is a warning."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: sqlite3.Connection | None = None
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = sqlite3.connect(path, _BUSY_S, isolation_level=None)
            self._file.execute("PRAGMA journal_mode=WAL")  # readers do not wait for a writer
            self._file.execute("PRAGMA synchronous=NORMAL")
            self._file.execute("CREATE TABLE IF NOT EXISTS replies (hash TEXT PRIMARY KEY, reply)")
        except (OSError, sqlite3.Error) as error:
            self._give_up(error)

    @staticmethod
    def key(request: Any) -> str:
        """Return the hash of a request in JSON's types."""
        text = json.dumps(request, sort_keys=True, ensure_ascii=False)
        return hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()

    def get(self, key: str) -> Any:
        """Return a reply, or None if there is none."""
        if self._file is None:
            return None
        try:
            row = self._file.execute("SELECT reply FROM replies WHERE hash = ?", (key,)).fetchone()
            return None if row is None else json.loads(row[0])
        except (sqlite3.Error, ValueError) as error:
            self._give_up(error)
            return None

    def put(self, key: str, reply: Any) -> None:
        """Keep a reply, in JSON's types."""
        if self._file is None:
            return
        try:
            values = (key, json.dumps(reply))
            self._file.execute("INSERT OR REPLACE INTO replies VALUES (?, ?)", values)
        except sqlite3.Error as error:
            self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        LOG.warning("the cache of replies %s is not used: %s", self.path, error)
        self._file = None
