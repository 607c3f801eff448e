"""Fault switch for substitute servers, which then refuse, hang, close connections or are slow."""

from __future__ import annotations

import json
import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from typing import Any
from urllib.parse import parse_qs, urlsplit

KINDS = ("401", "403", "500", "hang", "closed", "slow")
SLOW_S = (0.2, 0.8)
_CONTROL = "/fault"


@dataclass
class Switch:
    """Fault of a server: from the `after`-th request on, for `length` requests."""

    kind: str = ""
    after: int = 0
    length: int = 10**9
    is_on: threading.Event = field(default_factory=threading.Event)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def set(self, kind: str, after: int = 0, length: int = 10**9) -> None:
        """Set the fault; '' repairs the server, and ends requests that hang."""
        with self.lock:
            self.kind, self.after, self.length = kind, after, length
        self.is_on.set() if kind else self.is_on.clear()

    def next(self) -> str:
        """Return the fault of the next request, '' without one."""
        with self.lock:
            self.after -= 1
            if not self.kind or self.after >= 0:
                return ""
            self.length -= 1
            return self.kind if self.length >= 0 else ""


class FaultyHandler(BaseHTTPRequestHandler):
    """Handler whose answers are decided by `switch`; subclasses serve `do_...`."""

    switch: Switch
    protocol_version = "HTTP/1.0"

    def handle_one_request(self) -> None:
        """Replace the methods that serve by ones that ask the switch first."""
        for name in ("do_GET", "do_POST", "do_PUT"):
            serve = getattr(type(self), name, None)
            if serve is not None:
                setattr(self, name, lambda serve=serve: self._guard(serve))
        super().handle_one_request()

    def do_GET(self) -> None:
        self._refuse(404)

    def _guard(self, serve: Callable[[Any], object]) -> None:
        if self.path.startswith(_CONTROL):
            asked = {
                name: values[0] for name, values in parse_qs(urlsplit(self.path).query).items()
            }
            kind, after = asked.get("kind", ""), int(asked.get("after", 0))
            self.switch.set(kind, after, int(asked.get("length", 10**9)))
            return self._refuse(200)
        fault = self.switch.next()
        if fault == "hang":
            while self.switch.is_on.is_set():
                time.sleep(0.02)
        if fault in ("hang", "closed"):
            self.close_connection = True
            return None
        if fault == "slow":
            time.sleep(random.uniform(*SLOW_S))
        elif fault:
            return self._refuse(int(fault))
        serve(self)
        return None

    def _refuse(self, status: int) -> None:
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        body = json.dumps({"code": status, "message": "a test", "errors": []}).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None: ...
