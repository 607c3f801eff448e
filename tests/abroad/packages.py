"""Packages of other projects, with the versions that are tried, and the tests that use them."""

from __future__ import annotations

from dataclasses import dataclass

from tests.e2e.wheel import ROOT


@dataclass(frozen=True)
class Trial:
    """An environment with rlctl and `packages`, and the files of tests that run in it."""

    name: str
    packages: tuple[str, ...]  # requirements
    tests: tuple[str, ...]  # arguments of pytest
    extras: str = ""  # of rlctl
    apart: bool = False  # the packages are in an environment without rlctl: ABROAD_PYTHON


HERE = "tests/abroad"

TRIALS = (
    Trial("trl", ("trl==1.16.0",), (f"{HERE}/on_trl.py",)),
    Trial("skyrl-gym", ("skyrl-gym==0.4.0",), (f"{HERE}/on_skyrl_gym.py",)),
    Trial("openenv", ("openenv==0.10.0",), (f"{HERE}/on_openenv.py",), "openenv"),
    Trial("openenv-core", ("openenv-core==0.3.0",), (f"{HERE}/on_openenv.py",), "openenv"),
    Trial(
        "mcp",
        ("mcp==2.3.0", "uv==0.13.9"),
        (f"{HERE}/on_mcp.py", "tests/agents/environments/test_mcp_tools.py"),
        "mcp",
    ),
    Trial(
        "agents",
        (
            "openai-agents==0.24.0",
            "langgraph==1.2.24",
            "langchain-openai==1.7.4",
            "smolagents==1.26.0",
            "pydantic-ai-slim==2.68.0",
            "autogen-agentchat==0.7.5",
            "autogen-ext[openai]==0.7.5",
        ),
        (f"{HERE}/on_agents.py",),
        "agents",
    ),
    Trial("crewai", ("crewai==1.15.30",), (f"{HERE}/on_crewai.py",), "agents"),
    Trial(
        "verifiers",
        ("verifiers==0.1.14", "reasoning-gym==0.1.25", str(ROOT / HERE / "verifiers_env")),
        (f"{HERE}/on_verifiers.py",),
        apart=True,
    ),
    Trial("reasoning-gym", ("reasoning-gym==0.1.25",), (f"{HERE}/on_reasoning_gym.py",)),
)
