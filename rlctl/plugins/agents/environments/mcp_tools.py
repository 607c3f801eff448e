"""Tools of MCP servers, which run as processes (stdio) or at a URL (streamable HTTP).

A worker process has one connection to each server, which its episodes share. A connection that
ends is opened again with the next call.
"""

from __future__ import annotations

import asyncio
import json
import os
from base64 import b64decode
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from rlctl.errors import ConfigError, MissingExtraError
from rlctl.network import is_loopback
from rlctl.packages import require
from rlctl.plugins.agents.environments.tool import StatelessTool, Tool, ToolResult
from rlctl.plugins.user_code import check_file
from rlctl.runtime.sandbox.calls import call_limit, limited
from rlctl.runtime.sandbox.messages import error_text
from rlctl.runtime.serving.chat import to_schema

_HINT = '{"mcpServers": {"name": {"command": "...", "args": []}}}, or {"url": "..."} for the server'


async def tools_of_servers(path: str, selected: Sequence[str] | None = None) -> list[Tool]:
    """Return the tools of the servers of a JSON file, or those named in `selected`.

    The file has the usual form: `mcpServers` with `command`, `args` and `env`, or `url` and
    `headers` (or verl's `auth_token`) of each server. Raises ConfigError for a wrong file, a server
    that cannot be reached and unknown names, MissingExtraError without the package mcp.
    """
    tools: list[Tool] = []
    for name, config in _servers(Path(path).expanduser()).items():
        connection = _Connection(name, config)
        try:
            listed = await limited(connection.list_tools(), call_limit())
        except MissingExtraError:
            raise
        except Exception as error:
            raise ConfigError(
                f"the MCP server {name!r} does not reply: {error_text(error)}", where=path
            ) from error
        tools += [MCPTool(connection, tool) for tool in listed]
    known = [tool.schema["function"]["name"] for tool in tools]
    if unknown := [name for name in selected or () if name not in known]:
        raise ConfigError(
            f"no MCP server has the tool {unknown[0]!r}",
            where=path,
            hint=f"known: {', '.join(known)}",
        )
    return [tool for tool in tools if not selected or tool.schema["function"]["name"] in selected]


class MCPTool(StatelessTool):
    """A tool of a server. The server has its state, which all episodes of a worker share."""

    def __init__(self, connection: _Connection, tool: Any) -> None:
        self._connection = connection
        self.schema = to_schema(tool.name, tool.description or "", tool.input_schema)

    async def call(self, arguments: Mapping[str, Any]) -> ToolResult:
        """Call the tool. Raises RuntimeError with its text if it reports an error."""
        found = await self._connection.call_tool(self.schema["function"]["name"], dict(arguments))
        images = [part.data for part in found.content if part.type == "image"]
        others = [part for part in found.content if part.type != "image"]
        texts = [getattr(part, "text", f"[{part.type}]") for part in others]
        if found.is_error:
            raise RuntimeError("\n".join(texts))
        return ToolResult("\n".join(texts), images=[b64decode(image) for image in images])


class _Connection:
    """Connection to one server, opened when it is first used."""

    def __init__(self, name: str, config: Mapping[str, Any]) -> None:
        self._name = name
        self._config = config
        self._holder: asyncio.Task[None] | None = None
        self._client: asyncio.Future[Any] | None = None

    async def client(self) -> Any:
        """Return the client, connected."""
        if self._client is None or self._holder is None or self._holder.done():
            self._client = asyncio.get_running_loop().create_future()
            # One task opens and closes the connection, as anyio demands.
            self._holder = asyncio.create_task(self._hold(self._client))
        return await asyncio.shield(self._client)

    async def call_tool(self, name: str, arguments: dict[str, Any]) -> Any:
        """Call a tool. The next call opens a new connection if this one has ended."""
        from mcp import MCPError
        from mcp.types import CONNECTION_CLOSED

        client = await self.client()
        try:
            return await client.call_tool(name, arguments)
        except MCPError as error:
            if error.code == CONNECTION_CLOSED and self._holder is not None:
                self._holder.cancel()
                self._holder = None
            raise

    async def list_tools(self) -> list[Any]:
        """Return the tools of the server, of all pages."""
        client = await self.client()
        found: list[Any] = []
        cursor: str | None = None
        while True:
            page = await client.list_tools(cursor=cursor)
            found += page.tools
            cursor = page.next_cursor
            if cursor is None:
                return found

    async def _hold(self, opened: asyncio.Future[Any]) -> None:
        """Open the connection and keep it for the life of the process."""
        try:
            async with _new_client(self._config) as client:
                opened.set_result(client)
                await asyncio.Event().wait()
        except Exception as error:
            if opened.done():
                raise
            opened.set_exception(error)


def _new_client(config: Mapping[str, Any]) -> Any:
    """Return a client for the server of `config`."""
    require("mcp", "tools of MCP servers need mcp", "mcp")
    import httpx2  # of mcp
    from mcp import Client, StdioServerParameters
    from mcp.client.streamable_http import streamable_http_client

    if "command" in config:
        return Client(
            StdioServerParameters(
                command=config["command"],
                args=list(config.get("args") or []),
                # The worker's has proxies, certificates and what agent.env names, and no secrets.
                env={**os.environ, **(config.get("env") or {})},
            )
        )
    headers = dict(config.get("headers") or {})
    if token := config.get("auth_token"):
        headers["Authorization"] = f"Bearer {token}"
    may_use_proxy = not is_loopback(urlsplit(config["url"]).hostname or "")
    http = httpx2.AsyncClient(
        headers=headers, follow_redirects=True, timeout=None, trust_env=may_use_proxy
    )
    transport = streamable_http_client(config["url"], http_client=http)
    return Client(transport)


def _servers(path: Path) -> dict[str, dict[str, Any]]:
    """Return the servers of a JSON file by name. Raises ConfigError."""
    check_file(path, "the file of MCP servers does not exist")
    try:
        servers = json.loads(path.read_text(encoding="utf-8"))["mcpServers"]
        wrong = [name for name, server in servers.items() if not {"command", "url"} & set(server)]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError("no list of MCP servers", where=str(path), hint=_HINT) from error
    if wrong:
        raise ConfigError(
            f"the MCP server {wrong[0]!r} has neither command nor url", where=str(path), hint=_HINT
        )
    return servers
