"""HTTP server of the board: addresses of pages, data, streams and actions."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import orjson
from aiohttp import web
from aiohttp.typedefs import Handler

from rlctl import __version__
from rlctl.causes import as_rlctl_error
from rlctl.data_prep.thumbnails import read_thumbnail
from rlctl.errors import (
    ConflictError,
    NotFoundError,
    ResourceError,
    RlctlError,
    UsageError,
)
from rlctl.plugins.console.board.access import Access, add_headers
from rlctl.plugins.console.board.actions import Actions
from rlctl.plugins.console.board.event_stream import ListChanges, RunChanges, send_events
from rlctl.plugins.console.board.sample_pages import VERDICTS, SampleQuery
from rlctl.plugins.console.board.views import PAGE, Views
from rlctl.plugins.console.report.page import BOARD_SCRIPTS, SCRIPTS, part, plotly, render
from rlctl.plugins.console.report.page import page as report_page
from rlctl.plugins.console.token_values import page as tokens
from rlctl.runs.listing import RunQuery

_STATUS: dict[type[RlctlError], int] = {UsageError: 400, NotFoundError: 404, ConflictError: 409}
_MAX_BODY = 64 * 1024
_MAX_DIGITS = 15
_SCRIPTS = (*SCRIPTS, *BOARD_SCRIPTS)
_KEPT = {"Cache-Control": "private, max-age=31536000, immutable"}
_TYPES = {"js": "text/javascript", "css": "text/css"}


def make_app(views: Views, access: Access) -> web.Application:
    """Return the application. Raises MissingExtraError without plotly."""
    pages = Pages({"csrf": access.csrf, "read_only": access.read_only})
    board = _Board(views, Actions(), pages)
    app = web.Application(
        middlewares=[access.middleware(), _errors_as_json], client_max_size=_MAX_BODY
    )
    app.on_response_prepare.append(add_headers)
    app.add_routes(
        [
            web.get("/", board.page),
            web.get("/static/{digest}/{name}", pages.static),
            web.get("/api/runs", board.runs),
            web.get("/api/view", board.view),
            web.get("/api/curves", board.curves),
            web.get("/api/seeds", board.seeds),
            web.get("/api/sweeps", board.sweeps),
            web.get("/api/trials", board.trials),
            web.get("/api/samples", board.samples),
            web.get("/tokens", board.tokens),
            web.get("/api/images", board.image),
            web.get("/api/logs", board.logs),
            web.get("/api/system", board.system),
            web.get("/api/report", board.report),
            web.get("/api/stream", board.stream),
            web.get("/api/jobs/{number:[0-9]{1,9}}", board.job),
            web.post("/api/act", board.act),
        ]
    )
    return app


async def listen(app: web.Application, host: str, port: int) -> tuple[web.AppRunner, int]:
    """Start to serve; return the runner and the port. Raises ResourceError if it is in use."""
    # Streams never end by themselves: closing waits for none of them.
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1, handler_cancellation=True)
    await runner.setup()
    try:
        await web.TCPSite(runner, host, port).start()
    except OSError as error:
        await runner.cleanup()
        raise ResourceError(
            f"cannot listen on {host}:{port}: {error.strerror or error}",
            hint="--port 0 takes a free port; --host 127.0.0.1 listens on this machine only",
        ) from error
    return runner, runner.addresses[0][1]


class Pages:
    """Files by name; their address has a digest, so that browsers may keep them.

    Raises MissingExtraError without plotly.
    """

    def __init__(self, settings: Mapping[str, str | bool]) -> None:
        # `</script>` cannot occur: the values are a token of base64 and flags.
        self.settings = json.dumps(settings)
        self.files = {name: part(name) for name in (*_SCRIPTS, "page.css")}
        self.files["plotly.js"] = plotly()
        text = "".join([__version__, *self.files.values()])
        self.digest = hashlib.sha256(text.encode()).hexdigest()[:12]

    def page(self) -> web.Response:
        """Return the page; which view it shows depends on the query of its address."""
        links = "\n".join(
            f'<script defer src="/static/{self.digest}/{name}"></script>' for name in _SCRIPTS
        )
        text = render(
            {
                "title": "rlctl board",
                "policy": "",
                "style": f'<link rel="stylesheet" href="/static/{self.digest}/page.css">',
                "content": "",
                "settings": self.settings,
                "scripts": links,
            }
        )
        return web.Response(text=text, content_type="text/html")

    async def static(self, request: web.Request) -> web.Response:
        """Return a script or the style sheet."""
        name = request.match_info["name"]
        text = self.files.get(name)
        if text is None:
            raise web.HTTPNotFound
        kind = _TYPES[name.rpartition(".")[2]]
        return web.Response(text=text, content_type=kind, headers=_KEPT)


class _Board:
    """Request handlers; files are read in threads."""

    def __init__(self, views: Views, actions: Actions, pages: Pages) -> None:
        self.views = views
        self.actions = actions
        self.pages = pages
        self._reading: set[asyncio.Task[None]] = set()

    async def page(self, request: web.Request) -> web.Response:
        """Return the page; read what it shows while the browser loads its scripts."""
        if keys := request.query.getall("run", []):
            self._read_ahead(keys)
        return self.pages.page()

    def _read_ahead(self, keys: Sequence[str]) -> None:
        task = asyncio.create_task(asyncio.to_thread(self.views.read_ahead, keys))
        self._reading.add(task)
        task.add_done_callback(self._reading.discard)

    async def runs(self, request: web.Request) -> web.Response:
        given = request.query
        query = RunQuery(
            given.get("state") or None,
            given.get("where") or None,
            given.get("sort") or None,
            given.get("cols") or None,
            PAGE,
            given.get("group") or None,
        )
        if query.group not in (None, "project", "sweep"):
            raise UsageError(f"cannot group by {query.group!r}", hint="project or sweep")
        found = await asyncio.to_thread(self.views.runs, query, _number(request, "offset", 0))
        self._read_ahead([row["key"] for row in found["runs"][:1]])  # it is often opened next
        return _response(found)

    async def view(self, request: web.Request) -> web.Response:
        if (sweep := request.query.get("sweep")) is not None:
            return await _json(self.views.sweep, sweep)
        return await _json(self.views.view, request.query.getall("run", []))

    async def curves(self, request: web.Request) -> web.Response:
        return await _json(self.views.curves, request.query.getall("run", []))

    async def seeds(self, request: web.Request) -> web.Response:
        return await _json(self.views.seeds, request.query.getall("run", []))

    async def sweeps(self, _: web.Request) -> web.Response:
        return await _json(self.views.sweeps)

    async def trials(self, request: web.Request) -> web.Response:
        return await _json(self.views.trials, request.query.get("sweep", ""))

    async def samples(self, request: web.Request) -> web.Response:
        given = request.query
        query = SampleQuery(
            _number(request, "step"),
            given.get("verdict", ""),
            given.get("text") or None,
            _number(request, "offset", 0),
            given.get("beside") or None,
            _number(request, "beside_step"),
        )
        if query.verdict not in VERDICTS:
            known = ", ".join(filter(None, VERDICTS))
            raise UsageError(f"unknown verdict {query.verdict!r}", hint=f"one of: {known}")
        return await _json(self.views.samples, _run(request), query)

    async def tokens(self, request: web.Request) -> web.Response:
        step = _number(request, "step")
        by = request.query.get("by", "")
        text = await asyncio.to_thread(lambda: tokens(self.views.run(_run(request)), step, by))
        return web.Response(text=text, content_type="text/html")

    async def image(self, request: web.Request) -> web.Response:
        def read() -> bytes | None:
            run = self.views.run(_run(request))
            return read_thumbnail(run.path, request.query.get("digest", ""))

        found = await asyncio.to_thread(read)
        if found is None:
            raise web.HTTPNotFound
        return web.Response(body=found, content_type="image/jpeg", headers=_KEPT)

    async def logs(self, request: web.Request) -> web.Response:
        return await _json(self.views.logs, _run(request), request.query.get("process"))

    async def system(self, request: web.Request) -> web.Response:
        return await _json(self.views.system, _run(request))

    async def report(self, request: web.Request) -> web.Response:
        text = await asyncio.to_thread(self._report, request.query.getall("run", []))
        name = {"Content-Disposition": 'attachment; filename="report.html"'}
        return web.Response(text=text, content_type="text/html", headers=name)

    def _report(self, keys: list[str]) -> str:
        from rlctl.plugins.console.report.content import content

        return report_page(content([self.views.run(key) for key in dict.fromkeys(keys)], 50))

    async def stream(self, request: web.Request) -> web.StreamResponse:
        keys = request.query.getall("run", [])
        if not keys:
            version = _number(request, "version", 0)
            return await send_events(request, ListChanges(self.views, version))
        epochs = request.query.getall("epoch", [])
        rows = request.query.getall("rows", [])
        try:
            places = [(int(a), int(b)) for a, b in zip(epochs, rows, strict=True)]
            shown = dict(zip(keys, places, strict=True))
        except ValueError as error:
            raise UsageError("each run= takes one epoch= and one rows=") from error
        return await send_events(request, RunChanges(self.views, shown))

    async def job(self, request: web.Request) -> web.Response:
        return await _json(self.actions.job, int(request.match_info["number"]))

    async def act(self, request: web.Request) -> web.Response:
        try:
            given = orjson.loads(await request.read())  # refuses lone surrogates and deep nesting
            key, action, text = (str(given[name]) for name in ("run", "action", "text"))
        except (ValueError, TypeError, LookupError) as error:
            raise UsageError("an action takes JSON with run, action and text") from error
        response = await _json(lambda: self.actions.act(self.views.run(key), action, text))
        await asyncio.to_thread(self.views.listing.read)
        return response


async def _json(read: Callable[..., Any], *arguments: Any) -> web.Response:
    return _response(await asyncio.to_thread(read, *arguments))


def _response(found: Any) -> web.Response:
    body = orjson.dumps(found, default=str)
    return web.Response(body=body, content_type="application/json")


@web.middleware
async def _errors_as_json(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Turn errors of rlctl into JSON with their message and hint."""
    try:
        return await handler(request)
    except (RlctlError, OSError) as error:
        known = as_rlctl_error(error)
        if known is None:
            raise
        problem = known.problems[0]
        status = _STATUS.get(type(known), 500)
        return web.json_response(
            {"error": problem.message, "where": problem.where, "hint": problem.help}, status=status
        )


def _run(request: web.Request) -> str:
    return request.query.get("run", "")


def _number(request: web.Request, name: str, default: int | None = None) -> Any:
    """Return an integer of the query that is not negative, else `default`."""
    given = request.query.get(name)
    if not given:
        return default
    if not given.isascii() or not given.isdigit() or len(given) > _MAX_DIGITS:
        raise UsageError(f"{name}={given[:40]!r} is not a number of at most {_MAX_DIGITS} digits")
    return int(given)
