"""Files for other people's machines: metadata, workflow, image, scripts, versions, the audit."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.main import get_group

from rlctl import __version__
from rlctl.__main__ import main
from rlctl.cli import app
from tests import audit
from tests.abroad import tried
from tests.abroad.packages import TRIALS
from tests.plugin_folders import FOLDERS
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


@pytest.mark.plugin("console")
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
    targets = {each.split()[1] for each in commands if each.startswith("make ")}
    assert {"demo", "test", "without"} == targets <= TARGETS
    folders = jobs["without-plugins"]["strategy"]["matrix"]["folders"]
    assert folders == [" ".join(FOLDERS), *FOLDERS]
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


REPORT: dict[str, Any] = {
    "dependencies": [
        {"name": "safe", "version": "1", "vulns": []},
        {
            "name": "old",
            "version": "2",
            "vulns": [
                {"id": "PYSEC-1", "aliases": ["CVE-1"], "fix_versions": ["3"]},
                {"id": "PYSEC-2", "aliases": [], "fix_versions": []},
            ],
        },
        {"name": "local", "skip_reason": "not on the index"},
    ]
}


def test_vulnerabilities_are_found_unless_accepted() -> None:
    assert audit.findings(REPORT) == [
        "old 2: PYSEC-1, fixed in 3",
        "old 2: PYSEC-2, fixed in no version",
    ]
    assert audit.findings(REPORT, {"CVE-1": "not reached", "PYSEC-2": "not reached"}) == []


def test_exit_codes(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(audit, "audit", lambda: REPORT)
    assert audit.main() == 1
    assert "2 vulnerabilities in 2 packages, 1 not looked up" in capsys.readouterr().out
    monkeypatch.setattr(audit, "audit", lambda: {"dependencies": REPORT["dependencies"][:1]})
    assert audit.main() == 0
    assert "0 vulnerabilities in 1 packages" in capsys.readouterr().out
    monkeypatch.setattr(audit, "audit", lambda: {"dependencies": REPORT["dependencies"][2:]})
    assert audit.main() == 0
    assert "not done" in capsys.readouterr().out


def test_the_page_has_the_versions_that_are_tried() -> None:
    page = (ROOT / "docs/compatibility.md").read_text()
    pins = {
        requirement for trial in TRIALS for requirement in trial.packages if "==" in requirement
    }
    assert len(pins) > 20
    for pin in pins:
        name, version = pin.split("==")
        name = name.split("[")[0]
        rows = [line for line in page.splitlines() if re.search(rf"\b{name}\b", line)]
        assert any(re.search(rf"\b{re.escape(version)}\b", row) for row in rows), pin


@pytest.mark.plugin(*FOLDERS)
def test_the_files_of_tests_exist() -> None:
    files = [file.partition("::")[0] for trial in TRIALS for file in trial.tests]
    assert all((ROOT / file).is_file() for file in files)
    here = {f"tests/abroad/{path.name}" for path in (ROOT / "tests/abroad").glob("on_*.py")}
    assert here <= {*files}


def test_the_page_has_the_results_of_the_oldest_and_the_newest_versions() -> None:
    assert tried.PAGE.read_text() == tried.page()


def test_every_range_was_tried_at_its_ends() -> None:
    results = tried.read()
    assert {"oldest", "newest"} == {*results}
    for name, requirement in tried.ranges().items():
        oldest, newest = (results[trial]["versions"][name] for trial in ("oldest", "newest"))
        assert all(requirement.specifier.contains(found) for found in (oldest, newest)), name
    assert tried.not_lowest(results["oldest"]["versions"]) == []
    assert len(tried.not_lowest(results["newest"]["versions"])) > 15
    assert all(not result["failed"] for result in results.values())
