"""Errors of users' code end as the user's: exit code 3, the line of the code, and the exception.

`tests/architecture/test_users_code.py` lists the places that import such code.
"""

from __future__ import annotations

import sys
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from rlctl import plugins
from rlctl.errors import ConfigError, RlctlError
from rlctl.runtime.sandbox.user_code import load_named
from tests.e2e.command import rlctl
from tests.recorded import called

KINDS = {
    *("advantages", "algorithms", "commands", "datasets", "engines", "environments"),
    *("kl_estimators", "loggers", "policy_losses", "programs", "rewards", "samplers"),
    *("tool_parsers", "tools"),
}
IMPORTS = {
    "x = 1\ny = x / 0": (2, "ZeroDivisionError: division by zero"),
    "def f(:\n  pass": (1, "SyntaxError: invalid syntax"),
    "import os\nfrom rlctl.plugins import nothing": (
        2,
        "ImportError: cannot import name 'nothing'",
    ),
    "from rlctl.plugins.nothing import x": (1, "ModuleNotFoundError: No module named 'rlctl.plug"),
    "import sys\nsys.exit(4)": (2, "SystemExit: 4"),
}
ROLLOUT, ACTOR = "actor_rollout_ref.rollout", "actor_rollout_ref.actor"
CODE = """
class Sampler:
    def __init__(self, num_prompts, seed): self.fail = seed
    def draw(self, count, avoid=()): raise KeyError("draw")

class NoSampler:
    def __init__(self, num_prompts, seed): raise KeyError("built")

def order(num_prompts, epoch, seed): return [0]

class Logger:
    def __init__(self): raise KeyError("logger")

class LateLogger:
    def start(self, run): raise KeyError("start")

class PoorLogger:
    def start(self, run): ...
    def log(self, step, metrics): raise KeyError("log")
    def generations(self, step, samples): ...
    def finish(self, state): raise SystemExit("finish")

def estimate(inputs, config): return undefined

def leave(inputs, config): raise SystemExit(5)

def nothing(inputs, config): return None

def lose(tokens, clip): return tokens.log_probs.sum() / [], {}

def kl(d): return d.sum()

class Algorithm:
    @classmethod
    def from_config(cls, config, num_steps): raise KeyError("algorithm")

class Engine:
    @classmethod
    def check(cls, rollout, device, num_ranks): raise KeyError("engine")
    from_spec = check

class Parser:
    def __init__(self): raise KeyError("parser")
"""
FAILURES = {  # settings, with the text of the message and of the line that raises it
    "sampler is built": ("data.sampler={}:NoSampler", "KeyError: 'built'", '"built"'),
    "sampler draws": ("data.sampler={}:Sampler", "KeyError: 'draw'", '"draw"'),
    "order is no tensor": ("data.sampler={}:order", "returned [0], not a tensor", "def order"),
    "logger is built": ("trainer.logger=[{}:Logger]", "KeyError: 'logger'", '"logger"'),
    "logger starts": ("trainer.logger=[{}:LateLogger]", "KeyError: 'start'", '"start"'),
    "estimator": ("algorithm.adv_estimator={}:estimate", "NameError: name 'undef", "undefined"),
    "estimator exits": ("algorithm.adv_estimator={}:leave", "SystemExit: 5", "SystemExit(5)"),
    "no advantages": ("algorithm.adv_estimator={}:nothing", "returned None, not", "def nothing"),
    "policy loss": (f"{ACTOR}.policy_loss.loss_mode={{}}:lose", "TypeError: ", "/ []"),
    "KL of one number": (f"{ACTOR}.kl_loss_type={{}}:kl", "returned a tensor of ()", "def kl"),
    "algorithm": ("algorithm.name={}:Algorithm", "KeyError: 'algorithm'", '"algorithm"'),
    "engine": (f"{ROLLOUT}.name={{}}:Engine", "KeyError: 'engine'", '"engine"'),
    "parser": (
        f"{ROLLOUT}.multi_turn.enable=true {ROLLOUT}.multi_turn.format={{}}:Parser",
        "KeyError: 'parser'",
        '"parser"',
    ),
}


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_code_that_does_not_import_is_named_with_its_line(
    kind: str, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    for number, (code, (line, reason)) in enumerate(IMPORTS.items()):
        file = here / f"broken_{kind}_{number}.py"
        file.write_text(code)
        for load in (plugins.load, lambda kind, name: load_named(kind, name, "tool")):
            with pytest.raises(ConfigError) as caught:
                load(kind, f"{file.stem}:Thing")
            (problem,) = caught.value.problems
            assert problem.where == f"{file}:{line}"
            assert f"does not import: {reason}" in problem.message


def test_code_of_an_installed_package_is_its_users(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = tmp_path / "site-packages"
    site.mkdir()
    (site / "installed_parts.py").write_text("def part(): ...\nraise ValueError('no')\n")
    monkeypatch.syspath_prepend(site)
    with pytest.raises(
        ConfigError, match="the logger 'installed_parts:part' does not imp"
    ) as caught:
        plugins.load("loggers", "installed_parts:part")
    assert caught.value.problems[0].where == f"{site}/installed_parts.py:2"
    point = EntryPoint("x", "rlctl.nothing:x", "rlctl.loggers")
    with pytest.raises(RlctlError, match=r"no module named 'rlctl\.nothing'"):
        plugins._import(point)


def test_a_recipe_that_selects_broken_code_is_reported(here: Path) -> None:
    (here / "broken_part.py").write_text("x = 1 / 0\n")
    settings = ["data.train_files=quickstart", "actor_rollout_ref.model.path=quickstart"]
    recipe = "defaults: [ppo_trainer, _self_]\nactor_rollout_ref: {model: {path: quickstart}}\n"
    data = "data: {train_files: quickstart, sampler: 'broken_part:x'}\n"
    (here / "own.yaml").write_text(recipe + data)
    for words in (
        ("recipes", "check", "own.yaml"),
        ("train", "ppo", "--recipe", "own.yaml", "--inline", "--dry-run", *settings),
        ("train", "ppo", "--inline", "--dry-run", "trainer.logger=[broken_part:x]"),
    ):
        done = called(*words, cwd=here)
        assert done.returncode == 3, done.stderr
        assert "does not import: ZeroDivisionError: division by zero" in done.stderr
        assert f"at: {here}/broken_part.py:1" in done.stderr
    (here / "own.yaml").write_text(recipe + data.replace("}", ", sampler_params: {a: 1}}"))
    done = called("config", "why", "data.train_batch_size", "--recipe", "own.yaml", cwd=here)
    assert done.returncode == 3
    assert f"at: {here}/broken_part.py:1" in done.stderr


@pytest.mark.parametrize("what", FAILURES)
def test_code_that_fails_is_named_with_its_line(
    what: str, here: Path, settings: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    given, message, text = FAILURES[what]
    module = f"failing_{what.replace(' ', '_')}"
    (here / f"{module}.py").write_text(CODE)
    line = next(n for n, found in enumerate(CODE.splitlines(), 1) if text in found)
    words = [*settings, f"{ACTOR}.use_kl_loss=true", *given.format(module).split()]
    command = ("train", "grpo", "--inline", "--name", "x", *words)
    # Users' code may end the process: not that of the tests.
    done = rlctl(*command, cwd=here, code=3, fork=True)
    assert message in done.stderr
    assert f"at: {here}/{module}.py:{line}" in done.stderr
    assert "explain E-PLUGIN" in done.stderr
    if (here / "runs").exists():
        shown = called("show", "x", cwd=here).stdout
        assert "E-PLUGIN" in shown


def test_a_logger_that_fails_late_is_named_and_costs_nothing(
    here: Path, settings: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    (here / "poor_logger.py").write_text(CODE)
    words = [*settings, "trainer.logger=[console,poor_logger:PoorLogger]", "data.val_files=null"]
    words.append("trainer.total_training_steps=3")
    done = rlctl("train", "grpo", "--inline", "--name", "x", *words, cwd=here)
    (line,) = [number for number, text in enumerate(CODE.splitlines(), 1) if '("log")' in text]
    assert f"log: KeyError: 'log' ({here}/poor_logger.py:{line})" in done.stderr


def test_code_that_fails_in_a_worker_of_ray_is_named_with_its_line(
    here: Path, settings: list[str]
) -> None:
    (here / "failing_on_ray.py").write_text(CODE)
    loss = f"{ACTOR}.policy_loss.loss_mode=failing_on_ray:lose"
    done = rlctl("train", "grpo", *settings, loss, cwd=here, code=3)
    line = next(n for n, text in enumerate(CODE.splitlines(), 1) if "/ []" in text)
    assert f"at: {here}/failing_on_ray.py:{line}" in done.stderr
    assert "your code raised TypeError: " in done.stderr
