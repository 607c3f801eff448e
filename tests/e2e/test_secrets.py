"""Secrets reach the reward function and nothing that a run leaves: files, trackers, messages."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.e2e.command import metrics, rlctl
from tests.plugin_folders import is_there
from tests.rewards.chat_server import Reply, chat_server
from tests.tracking.real import LOGGERS

# No piece of these is in any other text.
PLANTED = {
    "api key": "Qkey-11aa11",
    "token": "Qtok-22bb22",
    "number": "987654321012",
    "environment": "Qenv-33cc33",
    "default": "Qdef-44dd44",
    "user of a URL": "Qusr-55ee55",
    "password of a URL": "Qpwd-66ff66",
    "parameter of a URL": "Qpar-77aa77",
    "element of a list": "Qele-88bb88",
    "dictionary": "Qdic-99cc99",
    "worker environment": "Qwrk-10dd10",
    "other section": "Qoth-12ee12",
    "git remote": "Qgit-13ff13",
    "logger": "Qlog-14ee14",
    "URL of a logger": "Qlur-15dd15",
    "judge": "Qjug-16ee16",
    "parameter of a judge": "Qjup-17ff17",
}
KWARGS = "+reward.custom_reward_function.reward_kwargs"
REWARD = """
import json

def compute_score(data_source, solution_str, ground_truth, extra_info=None, *, out, **kwargs):
    with open(out, "w") as file:
        json.dump(kwargs, file)
    if len(solution_str) % 3 == 0:
        raise ValueError(f"refused: {kwargs['api_key']} {kwargs['endpoint']}")
    return len(solution_str) % 2
"""


# A logger whose errors repeat its settings.
LOGGER = """
from pathlib import Path
from rlctl.plugins import Params

class Settings(Params):
    api_key: str
    server: str
    out: str

class Tracker:
    Params = Settings

    def __init__(self, params):
        self.params = params

    def start(self, run):
        Path(self.params.out).write_text(f"{self.params.api_key} {self.params.server}")
        return "id"

    def log(self, step, metrics):
        raise RuntimeError(f"refused: {self.params!r}")

    def generations(self, step, samples): ...

    def finish(self, state): ...
"""


def overrides(folder: Path) -> list[str]:
    """Return overrides with literal secrets; the first ones must be given again on resume."""
    planted = PLANTED
    url = (
        f"https://{planted['user of a URL']}:{planted['password of a URL']}@h/x"
        f"?token={planted['parameter of a URL']}"
    )
    return [
        f"{KWARGS}.api_key={planted['api key']}",
        f"{KWARGS}.hfToken={planted['token']}",
        f"{KWARGS}.pin.password={planted['number']}",
        f"{KWARGS}.default_token='${{oc.env:NOT_SET,{planted['default']}}}'",
        f"{KWARGS}.url='{url}'",
        f"{KWARGS}.services=[{{name: a, password: {planted['element of a list']}}}]",
        f"{KWARGS}.login={{user: me, credentials: {{value: {planted['dictionary']}}}}}",
        f"+data.apply_chat_template_kwargs.access_token={planted['other section']}",
        f"trainer.tracking.params={{hidden: {{api_key: {planted['logger']}, "
        f"server: 'https://me:{planted['URL of a logger']}@h/x', out: '{folder}/logged'}}}}",
        "ray_kwargs.ray_init.runtime_env="
        f"{{env_vars: {{MY_API_KEY: {planted['worker environment']}}}}}",
        f"{KWARGS}.endpoint=${{oc.env:RLCTL_TEST_ENDPOINT}}",
        f"{KWARGS}.copy=${{reward.custom_reward_function.reward_kwargs.endpoint}}",
        f"{KWARGS}.out={folder}/seen.json",
        f"reward.custom_reward_function.path={folder}/reward.py",
        "reward.num_processes=1",
    ]


def judge_reply(number: int, body: dict[str, Any]) -> Reply:
    """Score by the length of the message; each fifth reply has no verdict, and two are errors.

    All repeat the key.
    """
    key = PLANTED["judge"]
    if number == 3:
        return Reply(status=500, body=f"failed with {key}")
    if number == 5:
        return Reply(body=json.dumps({"error": key}))
    if number % 5 == 4:
        return Reply(f"I cannot say: {key}")
    score = len(body["messages"][1]["content"]) % 11
    return Reply(json.dumps({"reasoning": f"your key is {key}", "score": score}))


def contents(folder: Path) -> Iterator[tuple[str, bytes]]:
    """Yield the names and contents of all files below a folder, without git's own."""
    for parent, _, names in os.walk(folder):
        for path in map(Path(parent).joinpath, names):
            with suppress(FileNotFoundError):  # removed by a process of a tracker that is ending
                if path.is_file() and not path.is_symlink() and ".git" not in path.parts:
                    yield str(path.relative_to(folder)), path.read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize(
    "trackers", [("swanlab", "wandb"), pytest.param(LOGGERS, marks=pytest.mark.soak)], ids=len
)
def test_secrets_are_in_nothing_that_a_run_leaves(
    trackers: Sequence[str], settings: list[str], tmp_path: Path
) -> None:
    work, outside = tmp_path / "work", tmp_path / "outside"
    outside.mkdir()
    (outside / "reward.py").write_text(REWARD)
    (outside / "hidden_logger.py").write_text(LOGGER)
    installed = outside / "hidden-1.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text("Name: hidden\nVersion: 1\n")
    (installed / "entry_points.txt").write_text("[rlctl.loggers]\nhidden = hidden_logger:Tracker\n")
    subprocess.run(["git", "init", "-q", str(work)], check=True)
    remote = f"https://me:{PLANTED['git remote']}@example.com/x.git"
    subprocess.run(["git", "-C", str(work), "remote", "add", "origin", remote], check=True)
    author = ["-c", "user.name=a", "-c", "user.email=a@example.com"]
    commit = ["git", "-C", str(work), *author, "commit", "-q", "--allow-empty", "-m", "x"]
    subprocess.run(commit, check=True)
    home = {
        "HOME": str(work / "home"),
        "TRACKIO_DIR": str(work / "trackio"),
        "TMPDIR": str(work / "tmp"),
        "WANDB_MODE": "offline",
        "SWANLAB_MODE": "offline",
        "PYTHONPATH": os.pathsep.join([str(outside), os.environ.get("PYTHONPATH", "")]),
    }
    given = home | {"RLCTL_TEST_ENDPOINT": PLANTED["environment"]}
    for folder in ("home", "tmp"):
        (work / folder).mkdir()
    own = overrides(outside)
    options = ["trainer.save_freq=2", "trainer.log_val_generations=2", "trainer.seed=1"]
    loggers = f"trainer.logger=[console,hidden,{','.join(trackers)}]"
    train = ["train", "grpo", "--inline", "--name", "one", *settings, *options, loggers, *own]
    texts: list[str] = []

    def run(*words: str, code: int = 0, env: dict[str, str] = given, process: bool = False) -> str:
        done = rlctl(*words, cwd=work, code=code, more=env, process=process)
        texts.append(done.stdout + done.stderr)
        return texts[-1]

    run(*train, process=True)  # SDKs read the command line of the process
    seen = json.loads((outside / "seen.json").read_text())
    assert seen["api_key"] == PLANTED["api key"]
    assert seen["endpoint"] == seen["copy"] == PLANTED["environment"]
    assert seen["services"][0]["password"] == PLANTED["element of a list"]
    assert PLANTED["password of a URL"] in seen["url"]
    logged = (outside / "logged").read_text()
    assert PLANTED["logger"] in logged
    assert PLANTED["URL of a logger"] in logged

    folder = work / "runs" / "quickstart" / "one"
    assert folder.stat().st_mode & 0o777 == 0o700
    kwargs = yaml.safe_load((folder / "config.yaml").read_text())["reward"][
        "custom_reward_function"
    ]["reward_kwargs"]
    assert kwargs["endpoint"] == "${oc.env:RLCTL_TEST_ENDPOINT}"
    assert kwargs["api_key"] == "<secret>"
    assert kwargs["url"] == "https://<secret>@h/x?token=<secret>"

    without = "trainer.logger=[console,hidden]"  # the SDKs take seconds to import
    longer = ["resume", "one", "--inline", "trainer.total_training_steps=3", without]
    text = run(*longer, code=3)
    for key in ("api_key", "services", "url", "default_token", "pin.password"):
        assert f"reward_kwargs.{key} is a secret, which the earlier run did not store" in text
    text = run(*longer, *own[:10], code=3, env=home)
    assert "the environment variable RLCTL_TEST_ENDPOINT is not set" in text
    (outside / "seen.json").unlink()
    run(*longer, *own[:10])
    assert json.loads((outside / "seen.json").read_text()) == seen

    run("show", "one")
    run("runs", "--json")
    if is_there("console"):
        run("report", "one", "-o", "report.html")
    run("config", "show", "--recipe", "one", "--origin")
    run("config", "show", "reward", *own, loggers, "--recipe", "grpo", "--origin")
    fresh = [*("two" if word == "one" else word for word in train), without]
    run(*fresh, "--dry-run")
    mirror = f"trainer.mirror=s3://{PLANTED['user of a URL']}:{PLANTED['password of a URL']}@b/x"
    run(*fresh, "data.train_files=/nowhere", "trainer.seed=x", "--dry-run", code=3)
    run(*fresh, mirror, "--dry-run", code=7)

    def run_with_a_judge() -> None:
        with chat_server(judge_reply) as server:
            judge = [
                f"reward.params.judge.base_url={server.base_url}",
                "reward.params.judge.api_key_env=RLCTL_TEST_JUDGE_KEY",
                f"+reward.params.judge.extra_body.api_key={PLANTED['parameter of a judge']}",
                *("reward.num_processes=1", "trainer.save_freq=1"),
                *("actor_rollout_ref.rollout.n=2", "reward.max_failed_share=0.9"),
            ]
            run(
                *("train", "grpo", "--recipe", "judge", "--inline", "--name", "judged", *settings),
                *judge,
                env=given | {"RLCTL_TEST_JUDGE_KEY": PLANTED["judge"]},
            )
            assert server.bodies[0]["api_key"] == PLANTED["parameter of a judge"]
            assert set(server.keys) == {f"Bearer {PLANTED['judge']}"}
        rows = metrics(folder.with_name("judged"))[-2:]
        assert sum(row["reward/num_dropped"] for row in rows) > 0
        assert (folder.with_name("judged") / ".reward_cache.sqlite").is_file()
        run("show", "judged", "--json")
        run("show", "judged", "--samples")
        if is_there("console"):
            run("report", "judged", "-o", "judged.html")

    if is_there("objectives"):
        run_with_a_judge()
    places = [*contents(work), *((f"output {n}", text.encode()) for n, text in enumerate(texts))]
    found = [
        (kind, name)
        for name, content in places
        for kind, secret in PLANTED.items()
        if secret.encode() in content
    ]
    assert found == [], found
    assert len(places) > 40
    assert os.environ.get("RLCTL_TEST_ENDPOINT") is None
