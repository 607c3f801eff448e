"""Published MCP servers as tools, which training calls."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.abroad.training import AGENT, NUM_EPISODES, train, wide_model, write_rows

# As in the servers' READMEs: uvx runs each in an environment of its own.
SERVERS: dict[str, tuple[str, tuple[str, dict[str, Any]], str]] = {
    "mcp-server-time": (
        "2026.10.19",
        (
            "convert_time",
            {"source_timezone": "UTC", "time": "12:30", "target_timezone": "Asia/Tokyo"},
        ),
        "21:30",
    ),
    "mcp-server-calculator": ("0.2.1", ("calculate", {"expression": "6*7"}), "42"),
    "mcp-server-git": ("2026.10.19", ("git_log", {"repo_path": "repository"}), "First commit"),
}

ROWS = [
    {
        "data_source": "mcp",
        "prompt": [{"role": "user", "content": "Use the tool."}],
        "reward_model": {"style": "rule", "ground_truth": ""},
    }
] * 4


@pytest.mark.parametrize("name", SERVERS)
def test_training_calls_a_server(name: str, tmp_path: Path) -> None:
    version, (tool, given), part = SERVERS[name]
    if name == "mcp-server-git":
        given = {"repo_path": str(repository(tmp_path))}
    command = ["--from", f"{name}=={version}", name]
    subprocess.run(["uvx", *command, "--help"], check=True, stdout=subprocess.DEVNULL)  # install
    servers = tmp_path / "servers.json"
    servers.write_text(json.dumps({"mcpServers": {name: {"command": "uvx", "args": command}}}))
    found = train(
        tmp_path,
        f"~{AGENT}.params.tools",
        f"data.train_files={write_rows(tmp_path / 'rows.parquet', ROWS)}",
        f"{AGENT}.params.mcp_config_path={servers}",
        f"actor_rollout_ref.model.path={wide_model(tmp_path)}",
        *("data.max_prompt_length=6000", "data.max_response_length=1500"),
        calls=[(tool, given)],
    )
    assert found.total(f"tool/{tool}/calls") == NUM_EPISODES
    assert found.total(f"tool/{tool}/errors") == 0
    replies = list(found.replies())
    assert len(replies) == NUM_EPISODES
    assert all(part in text for text in replies), replies[0]


def repository(folder: Path) -> Path:
    """Make a repository with one commit."""
    place = folder / "repository"
    author = ["-c", "user.name=A", "-c", "user.email=a@b.invalid"]
    subprocess.run(["git", "init", "-q", place], check=True)
    commit = [*author, "commit", "-q", "--allow-empty", "-m", "First commit"]
    subprocess.run(["git", "-C", place, *commit], check=True)
    return place
