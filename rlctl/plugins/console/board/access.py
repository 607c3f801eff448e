"""Access rules of the board: host names, token, CSRF protection and response headers."""

from __future__ import annotations

import hmac
import ipaddress
import secrets
import socket
from dataclasses import dataclass, field

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

CSRF_HEADER = "X-CSRF-Token"
_HEADERS = {
    # Scripts come from the board alone. Figures set inline styles; text cannot become markup.
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self' "
    "'unsafe-inline'; img-src 'self' data: blob:; connect-src 'self'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
}
_COOKIE_AGE_S = 30 * 24 * 3600


@dataclass(frozen=True)
class Access:
    """Rules for requests; without a token (None) every local request is let in."""

    host: str
    token: str | None
    read_only: bool = False
    csrf: str = field(default_factory=lambda: secrets.token_urlsafe(32))
    tickets: set[str] = field(default_factory=set)  # tokens for one visit

    def make_ticket(self) -> str:
        """Return a token that signs in one browser."""
        ticket = secrets.token_urlsafe(24)
        self.tickets.add(ticket)
        return ticket

    def middleware(self) -> Middleware:
        """Return the middleware that enforces the rules."""

        @web.middleware
        async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
            if (refused := self._refused(request)) is not None:
                return refused
            return await handler(request)

        return check

    def _refused(self, request: web.Request) -> web.Response | None:
        """Return the response to a request that must not reach its handler."""
        if not self._knows(request.host):
            return _refusal(403, f"unknown host {request.host!r}: open the board by its address")
        if self.token is not None:
            if request.method == "GET" and self._admits(request.query.get("token", "")):
                return self._signed_in(request)
            if not self._has_token(request):
                return _refusal(401, "open the address with ?token=… that `rlctl board` printed")
        if request.method not in ("GET", "HEAD"):
            if self.read_only:
                return _refusal(403, "this board is read-only")
            if not self._is_own_page(request):
                return _refusal(403, "the request does not come from the board's page")
        return None

    def _knows(self, given: str) -> bool:
        """Return True for an address or a name of this machine.

        Another name may be that of a foreign page which resolves to this address (DNS rebinding).
        """
        if _has_port(given):
            given = given.rpartition(":")[0]
        name = given.strip("[]").lower()
        known = {"localhost", self.host.lower(), socket.gethostname().lower()}
        return name in known or _is_address(name)

    def _has_token(self, request: web.Request) -> bool:
        kind, _, word = request.headers.get("Authorization", "").partition(" ")
        bearer = kind.lower() == "bearer" and self._is_token(word.strip())
        return bearer or self._is_token(request.cookies.get(_cookie(request), ""))

    def _admits(self, given: str) -> bool:
        """Return True for the token, and once for a ticket."""
        ticket = next((each for each in self.tickets if _same(given, each)), None)
        self.tickets.discard(ticket or "")
        return ticket is not None or self._is_token(given)

    def _is_token(self, given: str) -> bool:
        return bool(given) and _same(given, self.token or "")

    def _signed_in(self, request: web.Request) -> web.Response:
        """Return a redirect to the page without the token, which a cookie keeps.

        A path as `//host/` would lead to another host. The cookie must come with a link of another
        site, so it is not strict: such links only read, and changes need the page's secret.
        """
        rest = request.rel_url.without_query_params("token").with_path("/", keep_query=True)
        response = web.Response(status=303, headers={"Location": str(rest)})
        response.set_cookie(
            _cookie(request),
            self.token or "",
            httponly=True,
            samesite="Lax",
            max_age=_COOKIE_AGE_S,
        )
        return response

    def _is_own_page(self, request: web.Request) -> bool:
        origin = request.headers.get("Origin")
        if origin is not None and origin.partition("://")[2] != request.host:
            return False
        given = request.headers.get(CSRF_HEADER, "")
        return _same(given, self.csrf)


async def add_headers(_: web.Request, response: web.StreamResponse) -> None:
    """Add the security headers; signal handler for `on_response_prepare`."""
    response.headers.update(_HEADERS)
    response.headers.setdefault("Cache-Control", "no-store")
    response.headers["Server"] = "rlctl"


def _same(given: str, secret: str) -> bool:
    """Compare in constant time; headers may contain any bytes."""
    return hmac.compare_digest(given.encode(errors="surrogateescape"), secret.encode())


def _cookie(request: web.Request) -> str:
    """Return the name of the cookie: cookies of all ports of a host are in one place."""
    return f"rlctl_board_{request.url.port}"


def _refusal(status: int, message: str) -> web.Response:
    return web.json_response({"error": message}, status=status)


def _has_port(given: str) -> bool:
    return given.rpartition(":")[2].isdigit() and (given.count(":") == 1 or "]:" in given)


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
