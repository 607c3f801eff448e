"""HTTP server of the policy on the loopback interface, with the APIs of OpenAI and Anthropic.

It runs on the event loop of a batch of episodes. The API key names the episode, so a request needs
nothing else; without a valid key there is no access.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol, Self

from aiohttp import web

from rlctl.runtime.serving.chat_api import (
    ChatReply,
    chunks,
    completion,
    parse_completions,
    text_chunks,
    text_completion,
)
from rlctl.runtime.serving.chat_request import MODEL, ApiError, ChatRequest, new_key
from rlctl.runtime.serving.messages_api import (
    error_body,
    message_body,
    message_events,
    parse_messages,
)
from rlctl.runtime.serving.responses_api import (
    parse_response_request,
    response_body,
    response_events,
)

LOOPBACK = "127.0.0.1"
_CHAT = "/v1/chat/completions"
_MESSAGES = "/v1/messages"
_MODELS = "/v1/models"
_RESPONSES = "/v1/responses"
_TEXTS = "/v1/completions"
_MAX_BODY = 64 * 2**20  # bytes
_SHUTDOWN_S = 1.0  # time that unfinished requests get at the end


class _Api(NamedTuple):
    """Form of requests, of whole replies, and of the events of a stream.

    Events are named by their type, or have no names, and `[DONE]` ends them.
    """

    parse: Callable[[Any], Sequence[ChatRequest]]
    body: Callable[[Sequence[ChatReply], ChatRequest], dict[str, Any]]
    events: Callable[[Sequence[ChatReply], ChatRequest], Iterable[Mapping[str, Any]]]
    has_names: bool = False


_APIS = {
    _CHAT: _Api(lambda body: [ChatRequest.parse(body)], completion, chunks),
    _RESPONSES: _Api(parse_response_request, response_body, response_events, has_names=True),
    _TEXTS: _Api(parse_completions, text_completion, text_chunks),
    _MESSAGES: _Api(parse_messages, message_body, message_events, has_names=True),
}
_SERVED = [f"POST {path}" for path in _APIS] + [f"GET {_MODELS}"]

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Session(Protocol):
    """Episode whose program sends requests."""

    async def complete(self, request: ChatRequest) -> ChatReply:
        """Continue a conversation. Raises ApiError."""
        ...


class Endpoint:
    """Server for the programs of one batch of episodes; use it as a context manager."""

    def __init__(self, host: str = LOOPBACK) -> None:
        self._host = host
        self._sessions: dict[str, Session] = {}
        app = web.Application(middlewares=[_with_errors], client_max_size=_MAX_BODY)
        for path, api in _APIS.items():
            app.router.add_post(path, partial(self._complete, api))
        app.router.add_get(_MODELS, self._models)
        app.router.add_get(f"{_MODELS}/{{name:.+}}", self._model)
        # A program that goes away cancels its request.
        self._runner = web.AppRunner(
            app, access_log=None, handler_cancellation=True, shutdown_timeout=_SHUTDOWN_S
        )

    async def __aenter__(self) -> Self:
        """Listen on a port that the kernel chooses."""
        await self._runner.setup()
        await web.TCPSite(self._runner, self._host, 0).start()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self._runner.cleanup()

    @property
    def base_url(self) -> str:
        """Address for clients."""
        return f"http://{self._host}:{self._runner.addresses[0][1]}/v1"

    def open(self, session: Session, key: str | None = None) -> str:
        """Return the API key of a new session: `key`, or a random one."""
        key = key or new_key()
        self._sessions[key] = session
        return key

    def close(self, key: str) -> None:
        """Refuse later requests with `key`."""
        self._sessions.pop(key, None)

    def _session(self, request: web.Request) -> Session:
        scheme, _, key = request.headers.get("Authorization", "").partition(" ")
        if scheme.lower() != "bearer":
            key = request.headers.get("X-Api-Key", "")
        session = self._sessions.get(key.strip())
        if session is None:
            text = "the API key is not that of an episode in progress"
            raise ApiError(401, text, "invalid_api_key")
        return session

    async def _models(self, request: web.Request) -> web.StreamResponse:
        self._session(request)
        return web.json_response({"object": "list", "data": [_described(MODEL)]})

    async def _model(self, request: web.Request) -> web.StreamResponse:
        """Describe a model. As in requests, any name means the policy."""
        self._session(request)
        return web.json_response(_described(request.match_info["name"]))

    async def _complete(self, api: _Api, request: web.Request) -> web.StreamResponse:
        session = self._session(request)
        asked = api.parse(await _body(request))
        # At most one continues the row of the conversation, the others begin rows.
        calls = [session.complete(one) for one in asked for _ in range(one.n)]
        replies = await asyncio.gather(*calls)
        first = asked[0]
        if not first.stream:
            return web.json_response(api.body(replies, first))
        return await _streamed(request, api.events(replies, first), api.has_names)


def _described(model: str) -> dict[str, Any]:
    return {"id": model, "object": "model", "created": 0, "owned_by": "rlctl"}


async def _streamed(
    request: web.Request, events: Iterable[Mapping[str, Any]], has_names: bool
) -> web.StreamResponse:
    """Send the events of a turn. It is complete, so errors have come as such before."""
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    for event in events:
        text = f"data: {json.dumps(event)}\n\n"
        if has_names:
            text = f"event: {event['type']}\n{text}"
        await response.write(text.encode())
    if not has_names:
        await response.write(b"data: [DONE]\n\n")
    return response


async def _body(request: web.Request) -> Any:
    try:
        return await request.json()
    except (ValueError, LookupError):  # LookupError: an unknown charset
        raise ApiError(400, "the body is not valid JSON") from None


@web.middleware
async def _with_errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Return errors in the form of the API."""
    try:
        return await handler(request)
    except ApiError as found:
        error = found
    except (web.HTTPNotFound, web.HTTPMethodNotAllowed) as found:
        text = f"{request.method} {request.path} is not served; served: {', '.join(_SERVED)}"
        error = ApiError(found.status, text)
    except web.HTTPException as found:
        error = ApiError(found.status, f"{request.method} {request.path}: {found.reason}")
    except RecursionError:  # of the parser of JSON, or of the chat template
        error = ApiError(400, "the body is nested too deeply")
    body = error.body()
    if request.path == _MESSAGES:
        body = error_body(error)
    return web.json_response(body, status=error.status)
