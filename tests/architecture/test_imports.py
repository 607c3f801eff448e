"""Imports go one way, and the command line stays light."""

import ast
import re
import subprocess
import sys
import tomllib

import pytest
from importlinter.cli import lint_imports

from tests.architecture.source import HEAVY, ROOT, TEST_FILES, name_of, nodes, parsed
from tests.plugin_folders import FOLDERS, in_this_tree

# Programs that are started by hand and need all folders of `rlctl/plugins`.
PROGRAMS = ("tests/abroad/", "tests/e2e/combinations.py", "tests/e2e/soak")


@pytest.mark.plugin(*FOLDERS)
def test_imports_go_one_way(capsys, monkeypatch):
    monkeypatch.setattr(
        "logging.config.dictConfig", lambda _: None
    )  # it would silence the loggers of all tests to come
    code = lint_imports(config_filename=str(ROOT / "pyproject.toml"), no_cache=True)
    assert code == 0, capsys.readouterr().out


def loaded_by(statements: str) -> set[str]:
    """Return the top-level modules that a fresh interpreter has loaded after `statements`."""
    names = "{name.partition('.')[0] for name in sys.modules}"
    probe = f"import sys\n{statements}\nprint(*{names}, file=sys.stderr)"
    return set(
        subprocess.run(
            [sys.executable, "-c", probe], capture_output=True, text=True, check=True, cwd=ROOT
        ).stderr.split()
    )


@pytest.mark.parametrize(
    "statements",
    [
        "from rlctl.__main__ import main; main(['--help'])",
        "import rlctl; rlctl.train, rlctl.open_run, rlctl.RlctlError; import rlctl.workers",
        "from rlctl.cli import all_commands\nfor command in all_commands(): command.load()",
        "import rlctl.runs.details, rlctl.tracking.console_tracker, rlctl.cli.startup",
    ],
    ids=["help", "python api", "command modules", "runs and trackers"],
)
def test_nothing_heavy_is_loaded(statements):
    loaded = loaded_by(statements)
    assert "rlctl" in loaded
    assert not loaded & HEAVY


def test_the_command_line_imports_the_runtime_only_inside_function_bodies():
    found = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for folder in (
            "cli",
            *(f"plugins/{name}/commands" for name in ("agents", "bridges", "console")),
        )
        for path in sorted((ROOT / "rlctl" / folder).rglob("*.py"))
        for node in parsed(path).body
        if isinstance(node, ast.Import | ast.ImportFrom) and "rlctl.runtime" in ast.unparse(node)
    ]
    assert not found


def test_every_entry_point_names_something_that_is_there():
    points = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
    for group in points.values():
        for target in group.values():
            module, _, name = target.partition(" [")[0].partition(":")
            file = module.replace(".", "/") + ".py"
            if not in_this_tree(file):
                continue
            tree = ast.parse((ROOT / file).read_text())
            targets = [each for node in tree.body for each in getattr(node, "targets", [])]
            names = {getattr(each, "id", None) for node in targets for each in ast.walk(node)}
            names |= {getattr(node, "name", None) for node in tree.body}
            assert name in names, target


def test_tests_import_a_plug_in_where_it_may_be_absent():
    """At the top of a module only if the tests of its folder are there: see `make without`."""
    plugin = re.compile(r"\b(?:rlctl|tests)\.plugins\.(\w+)")
    found = [
        f"{name_of(path)}:{node.lineno} imports a plug-in of {folder}"
        for path in TEST_FILES
        if not name_of(path).startswith(PROGRAMS)
        for inside, node in nodes(parsed(path))
        if isinstance(node, ast.Import | ast.ImportFrom) and not inside
        for folder in plugin.findall(ast.unparse(node))
        if folder in FOLDERS and f"tests/plugins/{folder}/" not in name_of(path)
    ]
    assert not found, "import it in tests marked `plugin(folder)`: " + ", ".join(found)


# Import names of what extras install.
OPTIONAL = (
    "vllm sglang swanlab wandb tensorboardX mlflow trackio aiohttp_cors opencensus "
    "peft bitsandbytes torchao math_verify lm_eval s3fs mcp websockets openai debugpy triton"
).split()
TRACKERS = (
    *(f"rlctl.plugins.bridges.{name}" for name in ("mlflow", "tensorboard", "trackio")),
    *(f"rlctl.tracking.{name}" for name in ("swanlab", "wandb")),
)
IMPORT_WITHOUT = """
import importlib, sys
sys.modules.update(dict.fromkeys(sys.argv[1:]))
for name in sys.stdin.read().split():
    try:
        importlib.import_module(name)
    except Exception as error:
        print(name, type(error).__name__)
"""
ON_DEMAND = "ModuleNotFoundError"
NEED_EXTRAS = {
    **dict.fromkeys(TRACKERS, ON_DEMAND),
    "rlctl.runtime.model.score_kernels": ON_DEMAND,
    "rlctl.plugins.bridges.vllm_server_extension": ON_DEMAND,  # vLLM's server imports it
}


@pytest.mark.soak
def test_modules_that_need_an_optional_package_are_few():
    """Import every module where no extra is installed; those that fail are loaded on demand."""
    modules = " ".join(
        ".".join(path.relative_to(ROOT).with_suffix("").parts)
        for path in sorted((ROOT / "rlctl").rglob("*.py"))
        if not path.name.startswith("__")
    )
    command = [sys.executable, "-c", IMPORT_WITHOUT, *OPTIONAL]
    done = subprocess.run(command, input=modules, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert dict(line.split() for line in done.stdout.splitlines()) == NEED_EXTRAS
