"""Tests that may be skipped, and where. Any other skip fails the session (see `conftest.py`)."""

from __future__ import annotations

import os
import shutil
from collections.abc import Container, Iterable
from fnmatch import fnmatch
from importlib.util import find_spec
from typing import Any

import pytest

from rlctl.runtime.sandbox.isolation import has_bubblewrap, own_namespaces
from rlctl.runtime.sandbox.namespaces import Namespaces
from tests.browser import CHROMIUM
from tests.plugin_folders import FOLDERS, absent, is_there
from tests.slurm_programs import missing_programs

# What `make test` does not install, and `make test-extras` does; the module that shows it.
EXTRAS = {
    "vllm": "vllm",
    "torchao": "torchao",
    "qlora": "bitsandbytes",
    "lm-eval": "lm_eval",
    "triton": "triton",
    "gguf": "gguf",
}


def _no(program: str) -> bool:
    return shutil.which(program) is None


# (reason of the skip, condition that allows it, tests)
ALLOWED: list[tuple[str, bool, list[str]]] = [
    *(
        (f"the extra {extra} is not installed*", find_spec(module) is None, ["*"])
        for extra, module in EXTRAS.items()
    ),
    *((absent(folder), not is_there(folder), ["*"]) for folder in FOLDERS),
    (
        "SGLang is not installed: make sglang",
        "RLCTL_SGLANG_PYTHON" not in os.environ,
        ["tests/plugins/bridges/test_sglang_engine.py::*"],
    ),
    (
        "there is no Chromium here",
        CHROMIUM is None,
        [
            "tests/plugins/console/board/test_page.py::*",
            "tests/plugins/console/test_report.py::*",
            "tests/plugins/console/test_thumbnails.py::*",
        ],
    ),
    *(
        (f"{shell} is not installed", _no(shell), ["tests/cli/test_completion.py::*"])
        for shell in ("zsh", "fish")
    ),
    (
        "not here: *",
        bool(missing_programs()),
        ["tests/plugins/console/test_slurm*.py::*"],
    ),
    (
        "needs bubblewrap",
        not has_bubblewrap(),
        ["tests/plugins/agents/environments/test_python_escapes.py::*"],
    ),
    (
        "needs user namespaces",
        own_namespaces() < Namespaces.FILES,
        ["tests/plugins/agents/environments/test_python_escapes.py::*"],
    ),
    ("a file system cannot be mounted here", True, ["tests/*"]),  # users, containers
    ("this machine does not allow ptrace", True, ["tests/test_debugging.py::*"]),
    ("this build of torch has no oneDNN", True, ["tests/runtime/test_onednn.py::*"]),
    *(
        (f"{what} cannot be downloaded here", True, [f"tests/{file}::*"])  # without a network
        for what, file in (
            ("vLLM's GPU wheel", "runtime/test_vllm_gpu_wheel.py"),
            ("torch's build for CUDA", "e2e/test_cuda_build.py"),
        )
    ),
    ("this machine has a GPU", True, ["tests/e2e/test_cuda_build.py::*"]),
    # Cases of parametrized tests that an engine does not have.
    ("* cannot load weights in mid-response", True, ["tests/runtime/test_engine_contract.py::*"]),
]


def sampled(kinds: Iterable[str], sample: Container[str]) -> list[Any]:
    """Return the kinds as parameters of a test; only `make soak` has those outside the sample."""
    soak = pytest.mark.soak
    return [pytest.param(kind, marks=[] if kind in sample else soak) for kind in kinds]


def may_skip(test: str, reason: str) -> bool:
    """Return True if `test` (a node id) may be skipped for `reason` on this machine."""
    return any(
        holds and fnmatch(reason, pattern) and any(fnmatch(test, each) for each in tests)
        for pattern, holds, tests in ALLOWED
    )
