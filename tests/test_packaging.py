"""Files for other people's machines: metadata, type marker, workflow, image and scripts."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
import yaml
from typer.main import get_group

from rlctl import __version__
from rlctl.__main__ import main
from rlctl.cli import app
from tests.strangers import command_paths

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
TARGETS = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def test_the_package_is_typed() -> None:
    assert (ROOT / "rlctl" / "py.typed").is_file()
    assert "Typing :: Typed" in PROJECT["project"]["classifiers"]


def test_the_source_distribution_has_what_the_wheel_is_built_from() -> None:
    included = PROJECT["tool"]["hatch"]["build"]["targets"]["sdist"]["include"]
    assert {"/rlctl", "/recipes", "/README.md", "/LICENSE"} <= set(included)
    assert all((ROOT / each.lstrip("/")).exists() for each in included)


def test_strangers_try_the_help_of_every_command() -> None:
    paths = list(command_paths("", get_group(app)))
    assert {"train", "config keys", "runs rm"} <= set(paths)
    assert len(paths) == len(set(paths)) > 40


def test_the_conda_recipe_has_the_requirements_of_the_package() -> None:
    recipe = yaml.safe_load((ROOT / "packaging/conda/recipe.yaml").read_text())
    names = {"torch": "pytorch", "ray": "ray-core"}  # other names on conda-forge
    project = PROJECT["project"]
    wanted = {"python": project["requires-python"].replace("3.11", "${{ python_min }}")}
    for each in project["dependencies"]:
        name, version = re.fullmatch(r"([\w-]+)(.*)", each).groups()
        wanted[names.get(name, name)] = version
    assert dict(each.split(maxsplit=1) for each in recipe["requirements"]["run"]) == wanted
    context = recipe["context"]
    assert context == {"version": __version__, "python_min": "3.11"}
    assert [f"{k} = {v}" for k, v in project["scripts"].items()] == recipe["build"]["python"][
        "entry_points"
    ]
    assert recipe["about"]["license"] == project["license"]
    assert (ROOT / recipe["about"]["license_file"]).is_file()


def test_every_command_of_the_workflow_exists() -> None:
    jobs = yaml.safe_load((ROOT / ".github/workflows/test.yml").read_text())["jobs"]
    commands = [step["run"] for job in jobs.values() for step in job["steps"] if "run" in step]
    targets = {each.removeprefix("make ") for each in commands if each.startswith("make ")}
    assert {"demo", "test"} == targets <= TARGETS
    for words in (each.split()[1:] for each in commands if each.startswith(".venv/bin/rlctl")):
        assert main([*words, "--help"]) == 0


def test_the_image_copies_files_that_exist_and_runs_the_quickstart() -> None:
    lines = (ROOT / "Dockerfile").read_text().replace("\\\n", " ").splitlines()
    copied = [word for line in lines if line.startswith("COPY") for word in line.split()[1:-1]]
    ignored = (ROOT / ".dockerignore").read_text().split()
    assert copied
    assert all((ROOT / each).exists() for each in copied)
    assert not {each.removeprefix("./") for each in copied} & set(ignored)
    assert 'ENTRYPOINT ["rlctl"]' in lines
    assert 'CMD ["train", "ppo"]' in lines
    known = ("#", "FROM", "ARG", "RUN", "WORKDIR", "COPY", "USER", "ENV", "VOLUME")
    known += ("ENTRYPOINT", "CMD")
    assert all(line.startswith(known) for line in lines if line)


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish", "powershell", "pwsh"])
def test_the_completion_script_of_a_shell(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", shell]) == 0
    script = capsys.readouterr().out
    assert "_RLCTL_COMPLETE" in script
    assert ("complete_fish" in script) == (shell in ("bash", "zsh", "fish"))
