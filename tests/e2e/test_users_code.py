"""Errors of users' code end as the user's: exit code 3, the line of the code, and the exception.

`tests/architecture/test_users_code.py` lists the places that import such code.
"""

from __future__ import annotations

import re
import sys
import tomllib
from importlib.metadata import EntryPoint
from pathlib import Path
from types import SimpleNamespace

import pytest

from rlctl import plugins
from rlctl.errors import ConfigError, RlctlError
from rlctl.plugins.user_code import load_named, module_file
from rlctl.runtime.rewards.functions import RewardSpec
from rlctl.runtime.rewards.loading import load_reward
from tests.e2e.command import rlctl
from tests.plugin_folders import in_this_tree, marks_of
from tests.recorded import called

KINDS = {
    *("advantages", "algorithms", "commands", "datasets", "engines", "environments"),
    *("generators", "kl_estimators", "listeners", "loggers", "policy_losses", "programs"),
    *("readers", "rewards", "samplers"),
    *("tool_parsers", "tools"),
}
# No key selects these; rlctl's commands and its Python API call them.
NOT_SELECTED = {"dialects", "evidence", "launchers", "python_api", "roles", "run_fields"}
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
from contextlib import contextmanager
from rlctl.plugins import Params, declare
from rlctl.runtime.algorithms.sft import SFT
from rlctl.runtime.generation.on_engines import OnEngines
from rlctl.runtime.rollout.hf import HFEngine

class Settings(Params):
    def model_post_init(self, context): raise KeyError("settings")

@declare(Params=Settings)
def settle(*arguments, params): ...

def prepare(): raise KeyError("prepare")

@declare(prepare=prepare)
def prepared(**call): ...
class Sampler:
    def __init__(self, num_prompts, seed): self.fail = seed
    def draw(self, count, avoid=()): raise KeyError("draw")
    def observe(self, prompts, scores): ...
    def metrics(self): return {}
    def state_dict(self): return {}
    def load_state_dict(self, state): ...

class NoSampler(Sampler):
    def __init__(self, num_prompts, seed): raise KeyError("built")

class TextSampler(Sampler):
    def draw(self, count, avoid=()): return list(range(count))
    def metrics(self): return {"level": "high"}

def order(num_prompts, epoch, seed): return [0]

class NoListener:
    def __init__(self, run, config): raise KeyError("listener")

class Listener:
    @classmethod
    def check(cls, config, run, sources): raise KeyError("listens")

class Logger:
    start = log = finish = None
    def __init__(self): raise KeyError("logger")

class LateLogger:
    log = finish = None
    def start(self, run): raise KeyError("start")

class NoLogger:
    def log(self, step, metrics): ...

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

class NoEngine(HFEngine):
    @classmethod  # engine
    def from_spec(cls, spec, policy): return None

class PoorEngine(HFEngine):
    def generate(self, prompt_ids, sampling): return None

class NoGenerator:
    @classmethod
    def check(cls, config, tokenizer, rows): raise KeyError("generator")
    open = check

class NoRollouts(OnEngines):
    @classmethod
    def check(cls, config, tokenizer, rows): ...
    @classmethod
    @contextmanager
    def open(cls, generation): yield cls(generation.engines)
    def generate_sequences(self, prompts, **how): return None

class NoAlgorithm:
    @classmethod  # algorithm
    def from_config(cls, config, num_steps): return None

class NoResponses(SFT):
    def collect(self, prompts, roles, step): return None

class NoMetrics(SFT):
    def learn(self, scored, roles, step): return None

class NoLoss(SFT):
    def loss(self, outputs, batch): return None

class Parser:
    parse = None
    def __init__(self): raise KeyError("parser")

def data(params): raise KeyError("data")

def no_data(params): return None

import typer

app = typer.Typer()

@app.command()
def main(): raise KeyError("command")

no_app = 5
empty_app = typer.Typer()

def no_rows_of(source): raise KeyError("rows")

def none_of(source): return None

def no_rows(params): return {"train": None}

def wrong_rows(params): return {"train": [5]}

class NoTurns:
    def parse(self, text, tools, offset=0): return text
"""
# By kind, moment and case: settings, the text of the message, and of the line that raises it.
FAILURES = {
    ("samplers", "build", "raises"): ("data.sampler={}:NoSampler", "KeyError: 'built'", '"built"'),
    ("samplers", "call", "raises"): ("data.sampler={}:Sampler", "KeyError: 'draw'", '"draw"'),
    ("samplers", "call", "no tensor"): (
        "data.sampler={}:order",
        "returned [0], not a tensor",
        "def order",
    ),
    ("readers", "build", "settings"): (
        "data.reader={}:settle",
        "KeyError: 'settings'",
        '"settings"',
    ),
    ("readers", "call", "raises"): ("data.reader={}:no_rows_of", "KeyError: 'rows'", '"rows"'),
    ("readers", "call", "none"): (
        "data.reader={}:none_of",
        "returned None, not an iterator of rows",
        "def none_of",
    ),
    ("listeners", "build", "raises"): (
        "trainer.listeners=[{}:NoListener]",
        "KeyError: 'listener'",
        '"listener"',
    ),
    ("listeners", "call", "check"): (
        "trainer.listeners=[{}:Listener]",
        "KeyError: 'listens'",
        '"listens"',
    ),
    ("loggers", "build", "raises"): (
        "trainer.logger=[{}:Logger]",
        "KeyError: 'logger'",
        '"logger"',
    ),
    ("loggers", "call", "start"): (
        "trainer.logger=[{}:LateLogger]",
        "KeyError: 'start'",
        '"start"',
    ),
    ("loggers", "build", "no start"): (
        "trainer.logger=[{}:NoLogger]",
        "is no logger: it has no start, finish",
        "",
    ),
    ("advantages", "build", "settings"): (
        "algorithm.adv_estimator={}:settle",
        "KeyError: 'settings'",
        '"settings"',
    ),
    ("advantages", "call", "raises"): (
        "algorithm.adv_estimator={}:estimate",
        "NameError: name 'undef",
        "undefined",
    ),
    ("advantages", "call", "exits"): (
        "algorithm.adv_estimator={}:leave",
        "SystemExit: 5",
        "SystemExit(5)",
    ),
    ("advantages", "call", "no tensors"): (
        "algorithm.adv_estimator={}:nothing",
        "returned None, not",
        "def nothing",
    ),
    ("policy_losses", "build", "settings"): (
        f"{ACTOR}.policy_loss.loss_mode={{}}:settle",
        "KeyError: 'settings'",
        '"settings"',
    ),
    ("policy_losses", "call", "raises"): (
        f"{ACTOR}.policy_loss.loss_mode={{}}:lose",
        "TypeError: ",
        "/ []",
    ),
    ("kl_estimators", "call", "one number"): (
        f"{ACTOR}.kl_loss_type={{}}:kl",
        "returned a tensor of ()",
        "def kl",
    ),
    ("algorithms", "build", "raises"): (
        "algorithm.name={}:Algorithm",
        "KeyError: 'algorithm'",
        '"algorithm"',
    ),
    ("algorithms", "build", "none"): (
        "algorithm.name={}:NoAlgorithm",
        "from_config returned None, not an algorithm",
        "@classmethod  # algorithm",
    ),
    ("algorithms", "call", "no responses"): (
        "algorithm.name={}:NoResponses",
        "collect returned None, not Scored",
        "def collect",
    ),
    ("engines", "build", "raises"): (
        f"{ROLLOUT}.name={{}}:Engine",
        "KeyError: 'engine'",
        '"engine"',
    ),
    ("engines", "build", "none"): (
        f"{ROLLOUT}.name={{}}:NoEngine",
        "from_spec returned None, not an engine",
        "@classmethod  # engine",
    ),
    ("generators", "build", "raises"): (
        f"{ROLLOUT}.multi_turn.enable=true {ROLLOUT}.multi_turn.generator={{}}:NoGenerator",
        "KeyError: 'generator'",
        '"generator"',
    ),
    ("generators", "call", "no rollouts"): (
        f"{ROLLOUT}.multi_turn.enable=true {ROLLOUT}.multi_turn.generator={{}}:NoRollouts",
        "generate_sequences returned None, not Rollouts",
        "def generate_sequences",
    ),
    ("tool_parsers", "build", "raises"): (
        f"{ROLLOUT}.multi_turn.enable=true {ROLLOUT}.multi_turn.format={{}}:Parser",
        "KeyError: 'parser'",
        '"parser"',
    ),
}
OF_PLUGINS = {"tool_parsers": "agents"}  # folder in which a kind is used
# Slower ones: another process, or a step of training.
LATER = {
    ("rewards", "build", "settings"): (
        "reward.functions=[{}:settle] --dry-run",
        "KeyError: 'settings'",
        '"settings"',
    ),
    ("rewards", "build", "prepare"): (
        "reward.functions=[{}:prepared] --dry-run",
        "KeyError: 'prepare'",
        '"prepare"',
    ),
    ("samplers", "call", "no numbers"): (
        "data.sampler={}:TextSampler",
        "metrics returned {'level': 'high'}, not numbers",
        '"high"',
    ),
    ("algorithms", "call", "no metrics"): (
        "algorithm.name={}:NoMetrics",
        "learn returned None, not metrics",
        "def learn",
    ),
    ("algorithms", "call", "no loss"): (
        "algorithm.name={}:NoLoss",
        "loss returned None, not a Loss",
        "def loss",
    ),
    ("engines", "call", "none"): (
        f"{ROLLOUT}.name={{}}:PoorEngine",
        "generate returned None, not Responses",
        "def generate",
    ),
}
PREP = "prep failing --out x"
COMMANDS = {  # of installed packages: name in the module, words, message, text of the line
    ("commands", "build", "no app"): (
        "no_app",
        "failing",
        "the command 'failing' is of type int",
        "",
    ),
    ("commands", "build", "empty"): ("empty_app", "failing", "without commands", ""),
    ("datasets", "call", "no rows"): ("no_rows", PREP, "returned {'train': None}", "def no_rows("),
    ("datasets", "call", "wrong rows"): ("wrong_rows", PREP, "is 5, not a PromptRow", ""),
    ("commands", "call", "raises"): ("app", "failing", "KeyError: 'command'", '"command"'),
    ("datasets", "build", "settings"): (
        "settle",
        PREP,
        "KeyError: 'settings'",
        '"settings"',
    ),
    ("datasets", "call", "raises"): ("data", PREP, "KeyError: 'data'", '"data"'),
    ("datasets", "call", "none"): (
        "no_data",
        PREP,
        "your function no_data returned None, not rows",
        "def no_data",
    ),
}
# Tests of other files: their calls are in other processes, or their failures are no errors.
ELSEWHERE = {
    ("rewards", "call"): "e2e/test_failing_rewards.py:test_each_file_is_scored_before_the_start",
    ("environments", "build"): "plugins/agents/environments/test_environment_pool.py:"
    "test_wrong_environments_are_refused_at_the_start",
    ("environments", "call"): "plugins/agents/test_env.py:test_failures_exit_with_one",
    (
        "tools",
        "build",
    ): "plugins/agents/environments/test_tools_environment.py:test_wrong_configurations",
    ("tools", "call"): "plugins/agents/environments/test_tools_environment.py:"
    "test_every_call_gets_a_message_in_order",
    ("tool_parsers", "call"): "e2e/test_users_code.py:test_results_of_parsers_fail_the_episodes",
    ("programs", "call"): "plugins/agents/test_programs.py:test_programs_of_a_batch",
}
REASONS = {
    ("kl_estimators", "build"): "they are functions without settings",
    ("programs", "build"): "it is the `prepare` of an environment",
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


@pytest.mark.parametrize(
    "what",
    [
        *(
            pytest.param(case, id=" ".join(case), marks=marks_of(OF_PLUGINS.get(case[0])))
            for case in FAILURES
        ),
        *(pytest.param(case, id=" ".join(case), marks=pytest.mark.soak) for case in LATER),
    ],
)
def test_code_that_fails_is_named_with_its_line(
    what: tuple[str, str, str],
    here: Path,
    settings: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    given, message, text = (FAILURES | LATER)[what]
    module = f"failing_{'_'.join(what).replace(' ', '_')}"
    (here / f"{module}.py").write_text(CODE)
    words = [*settings, f"{ACTOR}.use_kl_loss=true", *given.format(module).split()]
    command = ("train", "grpo", "--inline", "--name", "x", *words)
    # Users' code may end the process: not that of the tests.
    done = rlctl(*command, cwd=here, code=3, fork=True)
    assert message in done.stderr
    if text:
        assert f"at: {here}/{module}.py:{line_of(text)}" in done.stderr
    code = "E-REWARD-CODE" if what[0] == "rewards" else "E-PLUGIN"
    assert f"explain {code}" in done.stderr
    if (here / "runs").exists():
        shown = called("show", "x", cwd=here).stdout
        assert code in shown


@pytest.mark.plugin("agents")
@pytest.mark.soak
def test_results_of_parsers_fail_the_episodes(here: Path, settings: list[str]) -> None:
    (here / "failing_turns.py").write_text(CODE)
    words = [
        *(f"{ROLLOUT}.agent.environment=tools", f"{ROLLOUT}.agent.params={{tools:[calculator]}}"),
        *(
            f"{ROLLOUT}.multi_turn.enable=true",
            f"{ROLLOUT}.multi_turn.format=failing_turns:NoTurns",
        ),
        *("actor_rollout_ref.model.path=quickstart-agent", "data.train_files=quickstart-tools"),
    ]
    done = rlctl("train", "grpo", "--inline", *settings, *words, cwd=here, code=1, fork=True)
    assert "environment_error: your function parse returned '" in done.stderr
    assert f"at: {here}/failing_turns.py:{line_of('def parse')}" in done.stderr


def line_of(text: str) -> int:
    return next(n for n, found in enumerate(CODE.splitlines(), 1) if text in found)


@pytest.mark.parametrize("what", [pytest.param(case, id=" ".join(case)) for case in COMMANDS])
def test_code_of_a_package_that_fails_is_named_with_its_line(
    what: tuple[str, str, str], here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, words, message, text = COMMANDS[what]
    module = f"package_{'_'.join(what).replace(' ', '_')}"
    info = here / "site" / "failing-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Name: failing\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[rlctl.{what[0]}]\nfailing = {module}:{name}\n")
    (here / "site" / f"{module}.py").write_text(CODE)
    monkeypatch.syspath_prepend(here / "site")
    done = called(*words.split(), cwd=here)
    assert done.returncode == 3, done.stderr
    assert message in done.stderr
    if text:
        assert f"at: {here}/site/{module}.py:{line_of(text)}" in done.stderr


ATTRIBUTES = {
    "Params = 5": "its Params are 5, not a class of rlctl.plugins.Params",
    "unused_keys = 5": "its unused_keys are 5, neither keys nor a function",
}


@pytest.mark.parametrize("given", ATTRIBUTES)
def test_attributes_of_another_type_are_refused_for_every_kind(
    given: str, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    names = (
        *("check", "open", "from_spec", "from_config", "draw", "observe", "metrics", "parse"),
        *("state_dict", "load_state_dict", "start", "log", "finish"),
    )
    methods = "".join(f"    {name} = None\n" for name in names)
    module = f"attributes_{given.partition(' ')[0]}"
    (here / f"{module}.py").write_text(f"class Thing:\n    {given}\n{methods}")
    for kind in KINDS:
        with pytest.raises(ConfigError, match=re.escape(ATTRIBUTES[given])):
            plugins.load(kind, f"{module}:Thing")


@pytest.mark.parametrize("kind", ["samplers", "tool_parsers"])
def test_a_class_without_the_methods_of_its_kind_is_refused(
    kind: str, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    (here / "lacking.py").write_text("class Thing:\n    def draw(self, count, avoid=()): ...\n")
    with pytest.raises(ConfigError, match=r"is no .*: it has no .*(observe|parse)"):
        plugins.load(kind, "lacking:Thing")


@pytest.mark.parametrize(("name", "text"), [("settle", '"settings"'), ("prepared", '"prepare"')])
def test_a_reward_that_cannot_be_built_is_named_with_its_line(
    name: str, text: str, here: Path
) -> None:
    (here / "built.py").write_text(CODE)
    with pytest.raises(ConfigError, match=rf"built.py:{name}' cannot be built: KeyError") as caught:
        load_reward(RewardSpec(f"{here}/built.py:{name}", 1.0))
    assert caught.value.problems[0].where == f"{here}/built.py:{line_of(text)}"


def test_keys_of_no_plugin_are_none() -> None:
    assert plugins.unused_keys(SimpleNamespace(unused_keys=lambda _: None), None) == {}


def test_each_kind_fails_at_each_moment() -> None:
    """Imports are those of one function: `test_code_that_does_not_import_…` has all kinds."""
    path = Path(__file__).parents[2] / "pyproject.toml"
    project = tomllib.loads(path.read_text(encoding="utf-8"))
    groups = {group.removeprefix("rlctl.") for group in project["project"]["entry-points"]}
    of_rewards = {"reward_sources"}  # other names of plug-ins
    of_advantages = {"other_names.advantages"}
    of_commands = {group for group in groups if group.startswith(("commands.", "command_"))}
    assert groups - of_rewards - of_advantages - of_commands - NOT_SELECTED == KINDS
    tried = {case[:2] for case in (*FAILURES, *LATER, *COMMANDS)}
    assert tried.isdisjoint(REASONS)
    expected = {(kind, moment) for kind in KINDS for moment in ("build", "call")}
    assert tried | ELSEWHERE.keys() | REASONS.keys() == expected
    for place in filter(in_this_tree, ELSEWHERE.values()):
        file, _, name = place.partition(":")
        path = Path(__file__).parents[1] / file
        assert f"def {name}(" in path.read_text(encoding="utf-8")


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


def test_a_module_is_found_in_folders_without_init(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    file = tmp_path / "envs_of_mine" / "games" / "cards.py"
    file.parent.mkdir(parents=True)
    file.write_text("raise KeyError('imported')\n")
    package = tmp_path / "elsewhere" / "package_of_mine"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise KeyError('imported')\n")
    (package / "tools.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.syspath_prepend(tmp_path / "elsewhere")
    assert module_file("envs_of_mine.games.cards") == file
    assert module_file("package_of_mine.tools") == package / "tools.py"
    for absent in (
        "envs_of_mine",
        "envs_of_mine.games.dice",
        "package_of_mine.x.y",
        "sys.x",
        "9.9",
    ):
        assert module_file(absent) is None
