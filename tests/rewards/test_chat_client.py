"""Tests of the client of judges against a real server: limits, retries, cache, secrets."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

import pytest

from rlctl.runtime.rewards import chat_client, limiter
from rlctl.runtime.rewards.chat_client import ChatClient, ReplyCache, RequestFailed, RequestTimeout
from rlctl.runtime.rewards.request_limits import RequestSettings
from tests.rewards.chat_server import ChatServer, Reply, chat_server

T = TypeVar("T")


def run(settings: RequestSettings, use: Callable[[ChatClient], Awaitable[T]]) -> T:
    """Return the result of `use` with a client, which is closed."""

    async def inner() -> T:
        client = ChatClient(settings)
        try:
            return await use(client)
        finally:
            await client.close()

    return asyncio.run(inner())


def ask(client: ChatClient, server: ChatServer, text: str = "x", **body: Any) -> Awaitable[str]:
    messages = [{"role": "user", "content": text}]
    return client.complete(messages, str, base_url=server.base_url, model="m", **body)


@pytest.fixture(autouse=True)
def short_delays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_client, "_FIRST_DELAY_S", 0.01)


def test_failures_that_pass_are_repeated() -> None:
    bad = [
        Reply(status=429, headers={"Retry-After": "0.2"}),
        Reply(status=500, body="internal"),
        Reply(body="<html>no json"),
        Reply(body='{"unexpected": 1}'),
    ]
    with chat_server(lambda number, _: [*bad, Reply("good")][number]) as server:
        began = time.monotonic()
        assert run(RequestSettings(), lambda client: ask(client, server)) == "good"
        assert time.monotonic() - began >= 0.2  # of Retry-After


@pytest.mark.parametrize(
    ("reply", "retries", "kind", "text", "requests"),
    [
        (Reply(status=503, body="busy"), 2, RequestFailed, "HTTP 503.*busy.*of 3 attempts", 3),
        (Reply(status=400, body="bad model"), 2, RequestFailed, "HTTP 400.*bad model", 1),
        (Reply(delay_s=30), 0, RequestTimeout, "took longer than 0.3 s", 1),
        (
            Reply(status=307, headers={"Location": "http://other.example/v1"}),
            *(2, RequestFailed, "redirects to http://other.example/v1", 1),
        ),
        (Reply(" "), 2, RequestFailed, "no text; its finish_reason is 'stop'", 1),
    ],
)
def test_requests_that_fail(
    reply: Reply, retries: int, kind: type[Exception], text: str, requests: int
) -> None:
    timeout_s = 0.3 if reply.delay_s else 300.0
    settings = RequestSettings(timeout_s=timeout_s, max_retries=retries)
    with chat_server(lambda *_: reply) as server:
        with pytest.raises(kind, match=text):
            run(settings, lambda client: ask(client, server))
        assert len(server.bodies) == requests


def test_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limiter, "_WINDOW_S", 0.4)  # of a "minute"
    with chat_server(lambda *_: Reply(delay_s=0.1)) as server:

        async def many(client: ChatClient) -> float:
            began = time.monotonic()
            await asyncio.gather(*(ask(client, server, str(i), max_tokens=100) for i in range(12)))
            return time.monotonic() - began

        assert run(RequestSettings(max_concurrent=3), many) > 0
        assert server.most_open == 3
        assert run(RequestSettings(max_rpm=4), many) >= 0.8  # 4 at once, and after 0.4 and 0.8 s
        assert run(RequestSettings(max_tpm=650), many) >= 0.4  # 100 tokens each, and the message


def test_replies_are_kept_for_equal_requests_only(tmp_path: Path) -> None:
    settings = RequestSettings(cache=tmp_path / "cache.sqlite")
    with chat_server(lambda number, _: Reply(str(number))) as server:

        async def use(client: ChatClient) -> list[str]:
            same = await asyncio.gather(*(ask(client, server) for _ in range(8)))
            return [*same, await ask(client, server), await ask(client, server, seed=2)]

        assert run(settings, use) == [*["0"] * 9, "1"]
        assert run(settings, use) == [*["0"] * 9, "1"]  # in another process or run
        assert len(server.bodies) == 2


def test_a_reply_that_is_not_accepted_is_not_kept(tmp_path: Path) -> None:
    settings = RequestSettings(cache=tmp_path / "cache.sqlite")
    with chat_server(lambda number, _: Reply(["none", "7"][number])) as server:

        async def use(client: ChatClient) -> int:
            return await client.complete([], int, base_url=server.base_url, model="m")

        with pytest.raises(ValueError, match="invalid literal"):
            run(settings, use)
        assert run(settings, use) == 7


def test_texts_that_are_no_unicode_are_kept(tmp_path: Path) -> None:
    cache, key = ReplyCache(tmp_path / "cache.sqlite"), ReplyCache.key(["\ud83d"])
    cache.put(key, "reply \ud83d")
    assert cache.get(key) == "reply \ud83d"


def test_a_cache_that_cannot_be_used_is_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "cache.sqlite").write_text("no database, but a text that is long enough " * 20)
    cache = ReplyCache(tmp_path / "cache.sqlite")
    cache.put("key", "reply")
    assert cache.get("key") is None
    assert "is not used" in caplog.text


def test_the_key_is_in_no_message_and_in_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PLANTED_KEY", "Qjud-21ff21")
    settings = RequestSettings(cache=tmp_path / "cache.sqlite", max_retries=0)
    replies = [Reply("good"), Reply(status=401, body="wrong key Qjud-21ff21")]
    with chat_server(lambda number, _: replies[number]) as server:

        async def use(client: ChatClient) -> None:
            await ask(client, server, api_key_env="PLANTED_KEY")
            with pytest.raises(RequestFailed) as caught:
                await ask(client, server, "other", api_key_env="PLANTED_KEY")
            assert "wrong key ***" in str(caught.value)

        run(settings, use)
        assert server.keys == ["Bearer Qjud-21ff21"] * 2
    for file in tmp_path.iterdir():
        assert b"Qjud" not in file.read_bytes()
    with pytest.raises(RequestFailed, match="NOT_SET with the API key is not set"):
        run(settings, lambda client: ask(client, server, "third", api_key_env="NOT_SET"))
