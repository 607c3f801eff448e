"""HTTP client of a server that generates responses."""

from __future__ import annotations

import http.client
import json
import os
import time
from dataclasses import dataclass, field
from typing import Any, ClassVar
from urllib.parse import urlsplit

from rlctl.errors import ConfigError, ResourceError, RlctlError
from rlctl.network import is_loopback

_POLL_S = 0.2
_HEALTH_S = 10.0


class LostServerError(RlctlError):
    """A server has ended or does not reply; another one may."""


@dataclass(frozen=True)
class HttpServer:
    """Server at `url`. Subclasses name their `product` for errors.

    `api_key_env` names the environment variable with the key that requests are sent with.
    """

    product: ClassVar[str]

    url: str
    api_key_env: str | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        parts = urlsplit(self.url)
        if parts.scheme not in ("http", "https") or parts.hostname is None:
            raise ConfigError(
                f"{self.url!r} is not the address of a server",
                where="engine_kwargs.url",
                hint="use an address such as http://127.0.0.1:30000",
            )

    @property
    def is_local(self) -> bool:
        """True if the server is on this machine, by its address."""
        return is_loopback(urlsplit(self.url).hostname or "")

    def wait_for(self, path: str, timeout_s: float) -> None:
        """Wait until `GET path` succeeds. Raises ResourceError after `timeout_s`."""
        self._authorization()  # what is missing does not come by waiting
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                left = max(0.1, deadline - time.monotonic())
                self.call("GET", path, None, min(_HEALTH_S, left))
                return
            except RlctlError as error:
                last = error.problems[0].message
            self.check_running()
            if time.monotonic() > deadline:
                raise ResourceError(
                    f"the {self.product} server is not ready after {timeout_s:g} s: {last}",
                    where=self.url,
                    hint=self.last_lines() or "set a larger engine_kwargs.start_timeout_s",
                )
            time.sleep(_POLL_S)

    def check_running(self) -> None:
        """Raise ResourceError if the server has exited and cannot become ready."""

    def call(self, method: str, path: str, body: object, timeout_s: float) -> Any:
        """Send a request and return the reply, decoded from JSON if possible.

        Raises RlctlError, naming `path`, for any failure, or if the reply is not complete after
        `timeout_s`.
        """
        connection = _connection(self.url, timeout_s)
        deadline = time.monotonic() + timeout_s
        parts: list[bytes] = []
        try:
            data = None if body is None else json.dumps(body).encode()
            connection.request(
                method,
                urlsplit(self.url).path.rstrip("/") + path,
                data,
                {"Content-Type": "application/json"} | self._authorization(),
            )
            response = connection.getresponse()
            while part := response.read1():
                parts.append(part)
                if time.monotonic() > deadline:
                    raise TimeoutError
            if response.length:  # `read1` does not check it
                raise http.client.IncompleteRead(b"".join(parts), response.length)
        except TimeoutError as error:
            raise LostServerError(
                f"{self.product} did not reply to {path} within {timeout_s:g} s",
                where=self.url,
                hint=self.last_lines(),
            ) from error
        except (OSError, http.client.HTTPException) as error:
            why = f"{type(error).__name__}: {error}"
            raise LostServerError(
                f"lost the connection to the {self.product} server during {path} ({why})",
                where=self.url,
                hint=self.last_lines(),
            ) from error
        finally:
            connection.close()
        text = b"".join(parts).decode(errors="replace")
        if response.status >= 400:
            raise RlctlError(
                f"{self.product} replied {response.status} to {path}: {text[:1000]}",
                where=self.url,
                hint=self.last_lines(),
            )
        try:
            return json.loads(text)
        except ValueError:
            return text

    def _authorization(self) -> dict[str, str]:
        """Return the header with the API key, if any. Raises ConfigError if it is not set."""
        if self.api_key_env is None:
            return {}
        key = os.environ.get(self.api_key_env)
        if not key:
            raise ConfigError(
                f"the environment variable {self.api_key_env} with the API key is not set",
                where="engine_kwargs.api_key_env",
                hint=f"export {self.api_key_env}=..., on every machine with an engine",
            )
        return {"Authorization": f"Bearer {key}"}

    def last_lines(self) -> str | None:
        """Return the end of the log for use as a hint; None if the server was not started here."""
        return None


def _connection(url: str, timeout_s: float) -> http.client.HTTPConnection:
    """Create an HTTP or HTTPS connection, according to `url`."""
    parts = urlsplit(url)
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    return kind(parts.hostname or "", parts.port, timeout=timeout_s)
