"""Tests of tools of real MCP servers: a process (stdio) and a URL (streamable HTTP)."""

from __future__ import annotations

import json
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from rlctl.errors import ConfigError
from tests.plugins.agents.environments.episodes import load_here, play_here, turn_of
from tests.ports import free_port
from tests.progress import wait_until

SERVER = '''
import os, sys
from mcp.server.mcpserver import MCPServer

server = MCPServer("test")

@server.tool()
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b

@server.tool()
def fail() -> str:
    """Fail."""
    raise ValueError("no luck")

@server.tool()
def variable(name: str) -> str:
    """Return a variable of the environment."""
    return os.environ.get(name, "")

@server.tool()
def leave() -> str:
    """End the server."""
    os._exit(1)

if len(sys.argv) > 1:
    server.run("streamable-http", port=int(sys.argv[1]))
else:
    server.run("stdio")
'''


@pytest.fixture
def folder(here: Path) -> Path:
    pytest.importorskip("mcp")
    (here / "server.py").write_text(SERVER)
    configure({"command": sys.executable, "args": [str(here / "server.py")]})
    return here


def configure(server: dict[str, Any]) -> None:
    Path("servers.json").write_text(json.dumps({"mcpServers": {"test": server}}), encoding="utf-8")


def test_server_that_is_a_process(folder: Path) -> None:
    """Use the tools that a configuration of verl selects; a server that has ended is started."""
    Path("tools.yaml").write_text(
        "tools: [{class_name: x.Y, config: {type: mcp}, mcp: "
        "{mcp_servers_config_path: servers.json, tool_selected_list: [add, leave]}}]",
        encoding="utf-8",
    )
    turns = [
        turn_of("add", a=2, b=40),
        turn_of("fail"),
        turn_of("add", a="x"),
        turn_of("leave"),
        turn_of("add", a=1, b=1),
    ]
    played = play_here("tools", {"tool_config_path": "tools.yaml"}, turns)
    assert [set(tool["function"]["parameters"]["properties"]) for tool in played.tools] == [
        {"a", "b"},
        set(),
    ]
    assert played.texts[::4] == ["42", "2"]
    assert played.texts[2].startswith("error: wrong arguments: ")
    uses = [step.uses[0].error for step in played.steps]
    assert uses == [None, "unknown", "malformed", "raised", None]


def test_server_has_the_environment_of_its_worker(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", "certificates.pem")
    arguments = [str(folder / "server.py")]
    configure({"command": sys.executable, "args": arguments, "env": {"OWN": "1"}})
    turns = [turn_of("variable", name=name) for name in ("SSL_CERT_FILE", "OWN", "OTHER")]
    played = play_here("tools", {"mcp_config_path": "servers.json"}, turns)
    assert played.texts == ["certificates.pem", "1", ""]


def test_server_at_a_url(folder: Path) -> None:
    port = free_port()
    url = f"http://127.0.0.1:{port}/mcp"
    with Path("server.log").open("w", encoding="utf-8") as log:
        server = subprocess.Popen([sys.executable, "server.py", str(port)], stdout=log, stderr=log)
    try:
        wait_until(lambda: server.poll() is not None or responds(url), server.pid, "the server")
        assert server.poll() is None, Path("server.log").read_text(encoding="utf-8")
        configure({"url": url, "auth_token": "t"})
        params = {"mcp_config_path": "servers.json"}
        played = play_here("tools", params, [turn_of("add", a=2, b=3), turn_of("fail")])
        assert played.texts[0] == "5"
        assert played.texts[1].startswith("error: RuntimeError: ")
        assert played.steps[1].uses[0].error == "raised"
    finally:
        server.kill()
        server.wait()


def responds(url: str) -> bool:
    try:
        urllib.request.urlopen(url, timeout=5)
    except urllib.error.HTTPError:
        return True
    except OSError:
        return False
    return True


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "no list of MCP servers"),
        ('{"mcpServers": {"a": {}}}', "'a' has neither command nor url"),
        ('{"mcpServers": {"a": {"command": "/no/such/file"}}}', "'a' does not reply"),
        ('{"mcpServers": {"a": {"url": "http://127.0.0.1:1/mcp"}}}', "ConnectError"),
    ],
)
def test_wrong_servers(folder: Path, text: str, message: str) -> None:
    Path("servers.json").write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=message):
        load_here("tools", {"mcp_config_path": "servers.json"})
