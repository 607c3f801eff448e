"""`--slurm`: the script, the job's process, and the commands of a waiting job, with stand-ins."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from rlctl.errors import ResourceError, UsageError
from rlctl.plugins.console.queue.orders import Line
from rlctl.plugins.console.slurm.sbatch import check, parse, submit
from rlctl.process import DriverProcess
from rlctl.recipes.compose import compose
from rlctl.runs.record import RunRecord
from rlctl.runs.run_dir import RunDir
from tests.plugins.console.queued import wait
from tests.recorded import called
from tests.slurm_programs import missing_programs

STAND_INS = {
    "sbatch": """case "$*" in
*--tiem*) echo "sbatch: unrecognized option '$1'" >&2; exit 255;;
*=bogus*) echo "sbatch: error: Invalid ${1%%=*} specification" >&2; exit 255;;
"--gres --help") echo "sbatch: error: Batch script is empty!" >&2; exit 1;;
*--help) echo "  -t, --time=minutes   time limit"; exit;;
esac
[ ! -e {here}/silent ] || { echo "sbatch: error: Unable to contact slurm controller" >&2; exit 1; }
[ ! -e {here}/refuse ] || { echo "sbatch: error: invalid partition" >&2; exit 1; }
cp "$2" {here}/submitted; cp "$2" {here}/submitted-$(basename "$2")
echo "PENDING|Resources|N/A" >{here}/state; echo "42;cluster" """,
    "squeue": """[ -e {here}/state ] || { echo "Invalid job id specified" >&2; exit 1; }
cat {here}/state""",
    "scancel": "echo $* >>{here}/cancelled; rm -f {here}/state",
    "scontrol": "echo $* >>{here}/requeued",
    # Python of the job: instead of rlctl it notes its words and runs until it is stopped.
    "python": """shift 3; echo "$*" >>{here}/ran
trap 'if [ -e {here}/saves ]; then echo >>"$RUN/metrics.jsonl"; fi; exit 143' TERM
while [ ! -e {here}/end ]; do sleep 0.05; done""",
}


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, body in STAND_INS.items():
        path = tmp_path / "bin" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"#!/bin/bash\n{body.replace('{here}', str(tmp_path))}\n")
        path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:{os.environ['PATH']}")
    return tmp_path


def submitted(here: Path, *words: str, spec: str = "time=1:00:00 partition=a exclusive"):
    train = ("train", "ppo", "--name", "mine", "--slurm", spec, "--detach", *words)
    return called(*train, cwd=here)


def test_the_script_saves_before_the_limit_and_starts_the_job(here: Path):
    done = submitted(here, "--inline", "--max-time", "9h", "trainer.total_training_steps=3")
    assert done.returncode == 0, done.stderr
    folder = here / "runs" / "quickstart" / ".slurm" / "mine"
    script = (here / "submitted").read_text().splitlines()
    assert script[0] == "#!/bin/bash"
    assert {
        *("#SBATCH --job-name=mine", "#SBATCH --requeue", "#SBATCH --signal=B:USR1@300"),
        *("#SBATCH --time=1:00:00", "#SBATCH --partition=a", "#SBATCH --exclusive"),
        *(f"#SBATCH --output={folder}/slurm.out", "#SBATCH --open-mode=append"),
    } <= {*script}
    assert script[-1] == (f"exec {sys.executable} -P -m rlctl.plugins.console.slurm.job {folder}")
    order = json.loads((folder / "job.json").read_text())
    assert order["words"][:6] == ["train", "ppo", "--name", "mine", "--inline", "--max-time"]
    assert order["again"] == ["resume", order["run"], "--max-time", "9h"]
    assert "job 42 of SLURM runs mine" in done.stderr
    again = submitted(here)
    assert (again.returncode, "job 42 of the run mine has not ended" in again.stderr) == (5, True)


def test_several_nodes_start_ray(here: Path):
    done = submitted(here, "trainer.run_dir=/tmp", spec="nodes=2 time=20 signal=B:USR1@60")
    script = (here / "submitted").read_text()
    folder = Path("/tmp/quickstart/.slurm/mine")
    assert done.returncode == 0, done.stderr
    words = json.loads((folder / "job.json").read_text())["words"]
    (folder / "job.json").unlink()
    assert words[-1] == "trainer.nnodes=2"
    assert "ray start --head" in script
    assert "signal=B:USR1@60" in script
    assert subprocess.run(["bash", "-n"], input=script, text=True, check=False).returncode == 0


@pytest.mark.parametrize("spec", ["nodes=two", "no des", "output=x", "Nodes=2", "--array=1-3"])
def test_options_that_are_none_are_refused(spec: str):
    with pytest.raises(UsageError):
        parse(spec if spec != "no des" else "no d\ns=1 'x\n'")


@pytest.mark.parametrize(
    ("spec", "message", "hint"),
    [
        ("tiem=1:00:00", "sbatch does not know tiem", "did you mean time?"),
        ("time=bogus", "sbatch refuses time=bogus: Invalid --time specification", "sbatch --help"),
        ("gres", "gres needs a value", "sbatch --help"),
    ],
)
def test_options_are_checked_before_the_command_is(here: Path, spec: str, message: str, hint: str):
    done = submitted(here, spec=spec)
    assert (done.returncode, message in done.stderr, hint in done.stderr) == (2, True, True)
    assert "checking the command" not in done.stderr


def test_without_a_cluster_the_error_names_what_is_missing(
    here: Path, monkeypatch: pytest.MonkeyPatch
):
    (here / "silent").touch()
    done = submitted(here)
    message = "the controller of SLURM does not answer: Unable to contact slurm controller"
    assert (done.returncode, message in done.stderr, "scontrol ping" in done.stderr) == (7, 1, 1)
    broken = 'echo "sbatch: fatal: Could not establish a configuration source" >&2; exit 1'
    (here / "bin/sbatch").write_text(f"#!/bin/sh\n{broken}\n")
    done = submitted(here)
    assert "finds no cluster of SLURM: Could not establish a configuration" in done.stderr
    assert (done.returncode, "SLURM_CONF" in done.stderr, "rlctl queue add" in done.stderr) == (
        7,
        1,
        1,
    )
    monkeypatch.setenv("PATH", "/nowhere")
    done = submitted(here)
    assert "there is no SLURM here: sbatch is missing" in done.stderr
    assert (done.returncode, "rlctl queue add" in done.stderr) == (7, True)


@pytest.mark.skipif(bool(missing_programs()), reason=f"not here: {', '.join(missing_programs())}")
def test_the_parser_of_a_real_sbatch_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    config = "ClusterName=x\nSlurmctldHost=localhost\nNodeName=localhost\n"
    (tmp_path / "slurm.conf").write_text(config)
    monkeypatch.setenv("SLURM_CONF", str(tmp_path / "slurm.conf"))
    check(parse("time=20 nodes=2 hint=nomultithread exclusive gres=gpu:1"))
    for spec, message in (
        ("tiem=20", "does not know tiem"),
        ("time=bogus", "Invalid --time specification"),
        ("partition", "partition needs a value"),
    ):
        with pytest.raises(UsageError, match=message):
            check(parse(spec))


def test_what_slurm_refuses_is_an_error(here: Path, monkeypatch: pytest.MonkeyPatch):
    (here / "refuse").touch()
    done = submitted(here)
    assert (done.returncode, "sbatch: error: invalid partition" in done.stderr) == (7, True)
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(ResourceError, match="sbatch of SLURM is not here"):
        submit(Line(["train", "ppo"], [], here / "runs" / "p" / "x", compose("ppo").config), "")


def test_watch_logs_and_stop_of_a_waiting_job(here: Path):
    assert submitted(here).returncode == 0
    (here / "runs/quickstart/.slurm/mine/slurm.out").write_text("slurmstepd: error: bad node\n")
    assert called("logs", "mine", cwd=here).stdout == "slurmstepd: error: bad node\n"
    stopped = called("stop", "min", "--json", cwd=here)
    assert json.loads(stopped.stdout) == [{"name": "mine", "state": "cancelled"}]
    cancelled = (here / "cancelled").read_text().splitlines()
    assert cancelled == ["--state=PENDING 42", "--state=RUNNING --batch --signal=TERM 42"]
    done = called("logs", "mine", "-f", cwd=here)
    assert (done.returncode, done.stdout) == (0, "slurmstepd: error: bad node\n")


def test_watch_names_why_a_job_waits_until_it_is_over(here: Path, monkeypatch):
    monkeypatch.setattr("rlctl.plugins.console.slurm.sbatch._POLL_S", 0.05)
    done = submitted(here)
    assert done.returncode == 0
    squeue = here / "bin" / "squeue"
    text = squeue.read_text()
    squeue.write_text(f"{text}[ -e {here}/seen ] && rm {here}/state\ntouch {here}/seen\n")
    done = called("watch", "mine", cwd=here)
    assert "job 42: pending (Resources)" in done.stderr
    assert "the job 42 of mine ended before its run began" in done.stderr


def job(here: Path, **variables: str) -> tuple[subprocess.Popen[str], Path]:
    """Start the process of a job; return it and the folder of its run."""
    folder, run = here / "runs" / "p" / ".slurm" / "mine", here / "runs" / "p" / "mine"
    folder.mkdir(parents=True, exist_ok=True)
    order = {"words": ["train", "x"], "again": ["resume", "x"], "run": str(run)}
    (folder / "job.json").write_text(json.dumps(order | {"python": str(here / "bin/python")}))
    (folder / "job.sh").write_text("#!/bin/bash\n")
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "rlctl.plugins.console.slurm.job", str(folder)],
        env=os.environ | {"SLURM_JOB_ID": "42", "RUN": str(run)} | variables,
        stdout=subprocess.PIPE,
        text=True,
    )
    wait((here / "ran").exists)
    return process, run


@pytest.mark.parametrize(
    ("number", "saves", "requeued", "message"),
    [
        (signal.SIGUSR1, True, "requeue 42\n", "the job is requeued"),
        (signal.SIGUSR1, False, "", "no step fits into the time limit"),
        (signal.SIGTERM, True, "", ""),
    ],
)
def test_the_job_is_requeued_at_its_limit(here, number, saves, requeued, message):
    run = RunDir.create(here / "runs", "p", "mine", "ppo")
    if saves:
        (here / "saves").touch()
    process, _ = job(here)
    wait((run.path / "slurm.sh").exists)
    process.send_signal(number)
    output, _ = process.communicate(timeout=120)
    file = here / "requeued"
    assert (file.read_text() if file.exists() else "") == requeued
    assert process.returncode == (0 if requeued else 143)
    assert message in output


def test_a_requeued_job_resumes_its_run(here: Path):
    run = RunDir.create(here / "runs", "p", "mine", "ppo")
    elsewhere = replace(DriverProcess.current(), host="node7")
    run.update(state="running", process=elsewhere)
    (here / "end").touch()
    process, _ = job(here, SLURM_RESTART_COUNT="1")
    process.communicate(timeout=120)
    assert (here / "ran").read_text() == "resume x\n"
    assert RunRecord.read(run.path / "run.json").state == "stopped"


def test_a_run_that_ends_at_once_has_the_script(here: Path):
    stand_in = here / "bin/python"
    stand_in.write_text('#!/bin/sh\nmkdir "$RUN"; touch "$RUN/run.json" ' + f"{here}/ran\n")
    process, run = job(here)
    process.communicate(timeout=120)
    assert (run / "slurm.sh").read_text() == "#!/bin/bash\n"
