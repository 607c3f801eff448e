"""Size, names, handlers and literals: the coding rules that a machine can check.

Each exception is listed with its reason.
"""

import ast
import re
import tomllib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlctl.recipes.role_table import ROLES
from tests.architecture.source import BENCHMARKS, FILES, ROOT, functions, name_of, nodes, parsed
from tests.plugin_folders import FOLDERS, in_this_tree

MAX_LINES_OF_A_FILE = 500
MAX_LINES_OF_A_FUNCTION = 60
MAX_UNPACKED_TUPLES = 3  # per 1,000 lines
MAX_CONDITIONAL_EXPRESSIONS = 14
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
NAMES_THAT_SAY_NOTHING = {"utils", "util", "common", "helpers", "helper", "misc"}

# A broad handler that does not raise must have a fallback: where, and which.
MAY_CATCH_EVERYTHING = {
    "rlctl/__main__.py::_main": "outermost frame: one line, a crash file and exit code 70",
    "rlctl/runtime/cluster/system.py::Sampler._add": "a machine may not answer; one warning",
    "rlctl/tracking/destination.py::announce": "a tracker may fail; one warning",
    "rlctl/tracking/delivery.py::Delivery.send": "a tracker may fail; one warning",
    "rlctl/tracking/threaded.py::ThreadedDelivery._run": "re-raised in the waiting thread",
    "rlctl/runtime/training/listeners.py::Listeners._call": "a plug-in may fail; one warning",
    "rlctl/plugins/console/notices.py::error_of": "a receiver may fail: printed, and tried again",
    "rlctl/tracking/swanlab.py::_in_time.work": "re-raised in the waiting thread",
    "rlctl/tracking/wandb.py::WandbTracker._log_config": "the files are not needed; one warning",
    "rlctl/tracking/read_back.py::confirm": "a server may not answer; then nothing is confirmed",
    "rlctl/tracking/read_back.py::without_received": "a server may not answer; one warning",
    "rlctl/runtime/cluster/ray_start.py::RayStart._init": "re-raised in the waiting thread",
    "rlctl/runtime/cluster/stop_key.py::StopKey.is_set": "Ray's store is away: asked again",
    "rlctl/runtime/cluster/fork_server.py::_work": "printed as Python would; it exits with 1",
    "rlctl/runtime/cluster/jobs.py::_with_deadline.run": "re-raised in the waiting thread",
    "rlctl/runtime/training/one_step_ahead.py::result_of.run": "re-raised in the waiting thread",
    "rlctl/runtime/rewards/functions.py::call_reward": "user code may raise anything: scores 0",
    "rlctl/runtime/rewards/functions.py::call_async": "user code may raise anything: scores 0",
    "rlctl/runtime/rewards/reward_workers.py::RewardWorkers._serve": "delivered to the callers",
    "rlctl/runtime/sandbox/worker_main.py::_ending_process": "logged; status 1",
    "rlctl/runtime/sandbox/worker_main.py::_Server.process": "user code: sent to the controller",
    "rlctl/runtime/sandbox/worker_main.py::_Server.process_async": "delivered to the controller",
    "rlctl/plugins/agents/environments/environment_host.py::EnvironmentHost.describe": "no tools",
    "rlctl/plugins/agents/environments/tool_calls.py::ToolCalls._execute": "user "
    "code may raise anything: the policy gets it as a message",
    "rlctl/plugins/agents/environments/mcp_tools.py::_Connection._hold": "delivered to the callers",
    "rlctl/plugins/agents/environments/python_process.py::run": "printed as Python would",
    "rlctl/runtime/workers/background.py::_guarded": "written to a file for the controller",
    "rlctl/runtime/training/saver.py::Saver._write": "reported as a failed checkpoint",
    "rlctl/plugins/objectives/judge_worker.py::EngineLoop._run": "delivered to the callers",
    "rlctl/cli/commands/recipes.py::_check_recipe": "re-raised unless users' code raised it",
}
# Names of plug-ins that are also words with another meaning.
ALSO_A_WORD = {
    "auto": "trainer.device and the like have an `auto` of their own",
    "distill": "a command and a recipe",
    "dpo": "a command and a recipe",
    "episodes": "the episodes of a batch, and of the live panel",
    "grpo": "a command and a recipe",
    "kl": "the state of the KL controller in a checkpoint",
    "math": "the `ability` of a row in verl's data",
    "online_dpo": "a command and a recipe",
    "pattern": "a keyword of JSON schema",
    "ppo": "a command, a recipe, and the prefix of verl's micro-batch keys",
    "python": "the version, and a random stream",
    "raft": "a command and a recipe",
    "random": "model.init and sweep.sampler have a `random` of their own",
    "schema": "JSON schema",
    "search": "HTML of the report",
    "sft": "a command and a recipe",
    "tools": "argument of chat templates, and a column of verl's data",
}
# Files, or folders, that may name a plug-in although they do not define it.
MAY_NAME = {
    ("rlctl/data_prep/contract.py", "reward_model"): "verl's column with the ground truth",
    ("rlctl/data_prep/rows.py", "reward_model"): "verl's column with the ground truth",
    ("rlctl/data_prep/row_columns.py", "reward_model"): "verl's column with the ground truth",
    ("rlctl/plugins/agents/environments/skyrl.py", "reward_model"): "column of SkyRL's rows",
    ("rlctl/runtime/data/bundled.py", "reward_model"): "section of the configuration",
    ("rlctl/tracking/fanout.py", "jsonl"): "the record is always written and comes first",
    ("rlctl/tracking/panel.py", "rollout"): "label of a phase",
    ("rlctl/api.py", "console"): "without `progress` nothing is printed",
    ("rlctl/cli/commands/train.py", "console"): "`--logger X` keeps the console",
    ("rlctl/recipes/python_values.py", "console"): "likewise, with `logger=`",
    ("rlctl/runtime/data/bundled.py", "calculator"): "the tool of the quickstart's problems",
    ("rlctl/plugins/agents/environments/verl/", "verl"): "module of verl that tools import",
    ("rlctl/plugins/bridges/commands/import_verl.py", "verl"): "a command",
    **{
        ("rlctl/recipes/role_table.py", name): "name of the role, which the core looks up"
        for name in ("judge", "reward_learner", "reward_model")
    },
    ("rlctl/plugins/bridges/verl/", "gdpo"): "name of a reward manager of verl",
    ("rlctl/data_prep/verifiers_rows.py", "verifiers"): "the package whose release it checks",
    **{
        ("rlctl/plugins/bridges/verl/verl_settings.py", name): "loss of verl's distillation"
        for name in ("k1", "k2", "k3", "mse", "abs", "low_var_kl")
    },
    ("rlctl/runtime/rollout/vllm_engine/", "vllm"): "the engine's folder",
    ("rlctl/plugins/agents/commands/env.py", "verifiers"): "library whose environments are listed",
    ("rlctl/cli/explain/lookup.py", "trl"): "library whose options are explained",
    ("rlctl/runs/provenance.py", "vllm"): "library whose version is recorded",
    ("rlctl/runtime/resume.py", "vllm"): "library whose version is compared",
    ("rlctl/runtime/planning/doctor.py", "notify"): "the extra of that name",
    ("rlctl/runtime/planning/doctor.py", "vllm"): "library whose installation is checked",
}


def test_files_are_short():
    lengths = {name_of(path): len(path.read_text().splitlines()) for path in FILES}
    assert not {name: length for name, length in lengths.items() if length > MAX_LINES_OF_A_FILE}


def test_variables_of_loops_are_named_after_their_items():
    loops = [
        {name.id for name in ast.walk(node.target) if isinstance(name, ast.Name)}
        for path in FILES
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.For | ast.AsyncFor | ast.comprehension)
    ]
    assert sum("each" in names for names in loops) <= 0.03 * len(loops)


def test_a_line_has_one_thought() -> None:
    """Per 1,000 lines: few tuples unpacked from tuples, and few conditional expressions."""
    lines = sum(len(file.read_text(encoding="utf-8").splitlines()) for file in FILES)
    found = [node for file in FILES for _, node in nodes(parsed(file))]
    conditional = sum(isinstance(node, ast.IfExp) for node in found)
    unpacked = sum(
        isinstance(node.value, ast.Tuple) and isinstance(node.targets[0], ast.Tuple)
        for node in found
        if isinstance(node, ast.Assign)
    )
    assert 0 < 1000 * unpacked / lines <= MAX_UNPACKED_TUPLES
    assert 0 < 1000 * conditional / lines <= MAX_CONDITIONAL_EXPRESSIONS


def test_functions_are_short():
    lengths = {
        f"{name_of(path)}::{name}": (node.end_lineno or node.lineno) - node.lineno + 1
        for path in FILES
        for name, node in functions(path)
    }
    assert not {
        name: length for name, length in lengths.items() if length > MAX_LINES_OF_A_FUNCTION
    }


MAX_PARAMETERS = 6
# Functions that may have more, and why. Commands have a parameter for each option.
MAY_HAVE_MORE_PARAMETERS = {
    "rlctl/api.py::train": "keywords for the options of the command",
    "rlctl/api.py::resume": "likewise",
    "rlctl/api.py::generate": "likewise",
    "rlctl/runtime/cluster/programs.py::ResourcePool.__init__": "keywords of the Python API",
    "rlctl/runtime/model/attention.py::_attention": "transformers' signature",
    "rlctl/runtime/model/score_kernels.py::_forward": "a kernel takes addresses and numbers",
    "rlctl/runtime/model/score_kernels.py::_backward": "likewise",
    "rlctl/runtime/rollout/vllm_engine/log_probs.py::_patch_runner_v2.sample_random": "vLLM's",
}


def test_functions_have_few_parameters():
    found = set[str]()
    for path in FILES:
        for name, node in functions(path):
            given = node.args.posonlyargs + node.args.args + node.args.kwonlyargs
            named = [each.arg for each in given if each.arg not in ("self", "cls")]
            is_command = "/commands/" in name_of(path) and node.decorator_list
            if len(named) > MAX_PARAMETERS and not is_command:
                found.add(f"{name_of(path)}::{name}")
    assert found == set(MAY_HAVE_MORE_PARAMETERS)


# Unpickling runs code, so files are not unpickled except with a list of classes.
MAY_UNPICKLE = {
    "rlctl/runtime/rollout/signed_store.py": "objects that a member of the group has signed",
    "rlctl/runtime/sandbox/messages.py": "a worker reads requests of the controller",
    "rlctl/runtime/workers/safe_load.py": "subclass with a list of allowed classes",
}
UNPICKLERS = re.compile(r"\b(?:pickle|cloudpickle|dill|joblib|shelve)\.(?:loads?|Unpickler|open)\b")

LOADS = {"load", "loads", "Unpickler", "open"}


def unsafe_loads(path: Path) -> Iterator[str]:
    """Yield the places of a file that unpickle or load more than tensors and plain values."""
    for _, node in nodes(parsed(path)):
        loads = isinstance(node, ast.Attribute) and node.attr in LOADS
        text = ast.unparse(node) if loads else ""
        imports_from = isinstance(node, ast.ImportFrom) and node.module in ("pickle", "torch")
        if UNPICKLERS.search(text) or (
            imports_from and any(name.name.startswith("load") for name in node.names)
        ):
            yield name_of(path)
        is_call = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
        if is_call and node.func.attr == "load" and ast.unparse(node.func) == "torch.load":
            safe = any(
                each.arg == "weights_only" and ast.unparse(each.value) == "True"
                for each in node.keywords
            )
            if not safe:
                yield name_of(path)


def test_files_are_not_unpickled():
    assert {place for path in FILES for place in unsafe_loads(path)} == set(MAY_UNPICKLE)


def test_the_names_of_files_say_something():
    assert not [
        name_of(path) for path in FILES if {path.stem, path.parent.name} & NAMES_THAT_SAY_NOTHING
    ]


COMMAND = "a command, and the module that it runs"
SECTION = "a section of the configuration, and the command or class that has its name"
MOST_REPEATED_NAMES = 20
# Files in different folders may share a name only if they play the same part there.
MAY_REPEAT = {
    "base": "protocol or base class of a folder",
    "command_help": "help of a package's commands",
    "data": SECTION,
    "doctor": COMMAND,
    "evaluate": COMMAND,
    "export": COMMAND,
    "geo3k": "a data set, and its reward",
    "gpg": "an advantage, and its policy loss",
    "gridworld": "an environment, and its data set",
    "gsm8k": "a data set, and its reward",
    "resume": COMMAND,
    "reward": SECTION,
    "runs": "a command, and its view",
    "sweep": "a section, a command, and its view",
    "trainer": SECTION,
}


@pytest.mark.plugin(*FOLDERS)
def test_few_files_share_a_name():
    counts = Counter(path.stem for path in FILES)
    repeated = {name for name, count in counts.items() if count > 1} - {"__init__"}
    assert repeated == set(MAY_REPEAT)
    assert len(MAY_REPEAT) <= MOST_REPEATED_NAMES


def test_nothing_is_left_to_do():
    marks = re.compile(r"\b(TODO|FIXME|XXX|HACK)\b")
    places = [*FILES, *BENCHMARKS]
    lines = (
        (path, number, line)
        for path in places
        for number, line in enumerate(path.read_text().splitlines(), 1)
    )
    assert not [f"{name_of(path)}:{number}" for path, number, line in lines if marks.search(line)]


def is_broad(handler: ast.ExceptHandler) -> bool:
    """Return True for a handler of everything, of Exception or of BaseException."""
    return handler.type is None or bool(
        {"Exception", "BaseException"} & set(re.findall(r"\w+", ast.unparse(handler.type)))
    )


def broad_handlers(path: Path) -> Iterator[str]:
    """Yield the functions of a file with a broad handler that does not end by raising."""
    for name, node in nodes(parsed(path)):
        if (
            isinstance(node, ast.ExceptHandler)
            and is_broad(node)
            and not isinstance(node.body[-1], ast.Raise)
        ):
            yield f"{name_of(path)}::{name}"


def test_errors_pass():
    found = {place for path in FILES for place in broad_handlers(path)}
    assert found == {*filter(in_this_tree, MAY_CATCH_EVERYTHING)}


def plug_ins() -> dict[str, set[str]]:
    """Return the files that may contain the name of each plug-in: those that define it.

    They are the plug-in's module, or its package: the folder of that name that contains the module.
    """
    owners: dict[str, set[str]] = {}
    for kind, group in PROJECT["entry-points"].items():
        if kind.startswith(("rlctl.reward_sources", "rlctl.command", "rlctl.python_api")):
            continue  # names of data sets, of commands that hints name, and of calls by the API
        for name, target in group.items():
            file = Path(target.partition(":")[0].replace(".", "/") + ".py")
            package = (ROOT / file).parent if file.parent.name == name else None
            files = sorted(package.glob("*.py")) if package else [ROOT / file]
            owners.setdefault(name, set()).update(name_of(each) for each in files)
    return {name: files for name, files in owners.items() if name not in ALSO_A_WORD}


def literals(path: Path) -> Iterator[tuple[str, int]]:
    """Yield every string literal of a file that is not a docstring, and its line."""
    tree = parsed(path)
    documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    docstrings = {
        id(node.body[0].value)
        for node in (tree, *(node for _, node in nodes(tree)))
        if isinstance(node, documented) and node.body and isinstance(node.body[0], ast.Expr)
    }
    for _, node in nodes(tree):
        is_text = isinstance(node, ast.Constant) and isinstance(node.value, str)
        if is_text and id(node) not in docstrings:
            yield node.value, node.lineno


def test_no_plug_in_is_named_outside_its_own_file():
    owners = plug_ins()
    assert {"ppo", "jsonl", "gae", "vanilla", "hf", "gsm8k"} <= set(owners) | set(ALSO_A_WORD)
    found = [
        f"{name_of(path)}:{line} names {value!r}"
        for path in FILES
        for value, line in literals(path)
        if value in owners and name_of(path) not in owners[value]
        if not any(value == name and name_of(path).startswith(at) for at, name in MAY_NAME)
    ]
    assert not found, "\n".join(found)


def test_role_names_are_in_one_table():
    names = {role.name for role in ROLES}
    found = [
        f"{name_of(path)}:{line} names {value!r}"
        for path in FILES
        if name_of(path) != "rlctl/recipes/role_table.py"
        for value, line in literals(path)
        if value in names and (name_of(path), value) not in MAY_NAME
    ]
    assert not found, "\n".join(found)


def test_suppressions_are_rare():
    pattern = re.compile(r"#\s*(type: ignore|pyright: ignore|pyright: \w+)")
    texts = [path.read_text() for path in FILES]
    found = sum(len(pattern.findall(text)) for text in texts)
    assert found <= sum(text.count("\n") for text in texts) / 1000


def test_runtime_has_few_loose_files():
    loose = [path.stem for path in (ROOT / "rlctl" / "runtime").glob("*.py")]
    assert len(set(loose) - {"__init__"}) <= 10


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("x == 'grpo'", ["grpo"]),
        ("f('a')", ["a"]),
        ("match x:\n    case 'a' | 'b': pass", ["a", "b"]),
        ("def f():\n    'grpo'", []),
    ],
)
def test_the_check_of_literals_finds_them(tmp_path, source, expected):
    (tmp_path / "a.py").write_text(source)
    assert [name for name, _ in literals(tmp_path / "a.py")] == expected


def test_the_check_of_handlers_sees_them(tmp_path, monkeypatch):
    monkeypatch.setattr("tests.architecture.source.ROOT", tmp_path)
    body = "def f():\n    try:\n        pass\n    except {}:\n        {}\n"
    for kind, last, caught in [
        ("Exception", "pass", True),
        ("(ValueError, Exception)", "pass", True),
        ("BaseException", "pass", True),
        ("Exception", "raise", False),
        ("ValueError", "pass", False),
    ]:
        (tmp_path / "a.py").write_text(body.format(kind, last))
        assert list(broad_handlers(tmp_path / "a.py")) == (["a.py::f"] if caught else []), kind
