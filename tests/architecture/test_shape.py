"""The house rules that a machine can check, on every file of the package. What a test allows, it allows with a reason."""

import ast
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "rlctl").rglob("*.py"))

MAX_LINES_OF_A_FILE = 300
MAX_LINES_OF_A_FUNCTION = 60
NAMES_THAT_SAY_NOTHING = {"utils", "util", "common", "helpers", "helper", "misc"}

# A handler of Exception that does not raise must be able to do something else (house rule 6): where, and what.
MAY_CATCH_EVERYTHING = {
    "rlctl/__main__.py::main": "the outermost frame: turns a defect into one line, a file and exit code 70",
    "rlctl/tracking/fanout.py::Trackers._tell": "the run goes on without a line on the terminal, and its record catches up",
    "rlctl/tracking/async_tracker.py::AsyncTracker._say": "a mirror may break, the run goes on, and says so once",
    "rlctl/tracking/async_tracker.py::AsyncTracker._work": "hands the error of the start to the thread that waits, which raises it",
    "rlctl/runtime/cluster/session.py::_start.start": "hands the error to the thread that waits, which raises it",
    "rlctl/runtime/cluster/jobs.py::_within.ask": "hands the error to the thread that waits, which raises it",
    "rlctl/runtime/rewards/functions.py::answer": "a user's function may do anything wrong: the answer scores 0 and says why",
    "rlctl/runtime/workers/background.py::_guarded": "leaves the reason in a file for the controller, which waits for that or for the end",
    "rlctl/runtime/rollout/vllm/loop.py::VLLMLoop._run": "hands vLLM's error to the threads that wait, which raise it",
    "rlctl/data_prep/hub.py::hub_answers": "asks only whether there is a network; the errors of HTTP libraries share no other class",
}
# Names of plug-ins that are also words of the configuration with another meaning.
ALSO_A_WORD = {"auto": "trainer.device and the like have an `auto` of their own"}

Function = ast.FunctionDef | ast.AsyncFunctionDef


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def nodes(tree: ast.AST, inside: str = "") -> Iterator[tuple[str, ast.AST]]:
    """Every node below `tree`, with the qualified name of the innermost function or class around it, or of itself if it is one."""
    for node in ast.iter_child_nodes(tree):
        name = (
            f"{inside}.{node.name}".lstrip(".")
            if isinstance(node, Function | ast.ClassDef)
            else inside
        )
        yield name, node
        yield from nodes(node, name)


def functions(path: Path) -> Iterator[tuple[str, Function]]:
    for name, node in nodes(ast.parse(path.read_text())):
        if isinstance(node, Function):
            yield name, node


def test_files_are_short():
    lengths = {name_of(path): len(path.read_text().splitlines()) for path in FILES}
    assert not {name: length for name, length in lengths.items() if length > MAX_LINES_OF_A_FILE}


def test_functions_are_short():
    lengths = {
        f"{name_of(path)}::{name}": (node.end_lineno or node.lineno) - node.lineno + 1
        for path in FILES
        for name, node in functions(path)
    }
    assert not {
        name: length for name, length in lengths.items() if length > MAX_LINES_OF_A_FUNCTION
    }


def test_the_names_of_files_say_something():
    assert not [
        name_of(path) for path in FILES if {path.stem, path.parent.name} & NAMES_THAT_SAY_NOTHING
    ]


def test_nothing_is_left_to_do():
    marks = re.compile(r"\b(TODO|FIXME|XXX|HACK)\b")
    places = [*FILES, *sorted((ROOT / "benchmarks").rglob("*.py"))]
    lines = (
        (path, number, line)
        for path in places
        for number, line in enumerate(path.read_text().splitlines(), 1)
    )
    assert not [f"{name_of(path)}:{number}" for path, number, line in lines if marks.search(line)]


def is_broad(handler: ast.ExceptHandler) -> bool:
    """Whether it catches everything, or Exception or BaseException, alone or among others."""
    return handler.type is None or bool(
        {"Exception", "BaseException"} & set(re.findall(r"\w+", ast.unparse(handler.type)))
    )


def broad_handlers(path: Path) -> Iterator[str]:
    """The functions of a file with a broad handler that does not end by raising."""
    for name, node in nodes(ast.parse(path.read_text())):
        if (
            isinstance(node, ast.ExceptHandler)
            and is_broad(node)
            and not isinstance(node.body[-1], ast.Raise)
        ):
            yield f"{name_of(path)}::{name}"


def test_errors_pass():
    assert {place for path in FILES for place in broad_handlers(path)} == set(MAY_CATCH_EVERYTHING)


def plug_ins() -> dict[str, set[str]]:
    """The name of every plug-in and the files it may be spoken of in: entry points, and what `@estimator` and `@policy_loss` register."""
    owners: dict[str, set[str]] = {}
    for group in tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "entry-points"
    ].values():
        for name, target in group.items():
            owners.setdefault(name, set()).add(target.partition(":")[0].replace(".", "/") + ".py")
    for path in sorted((ROOT / "rlctl/runtime/algorithms").glob("*.py")):
        for _, function in functions(path):
            for decorator in function.decorator_list:
                if isinstance(decorator, ast.Call) and ast.unparse(decorator.func) in (
                    "estimator",
                    "policy_loss",
                ):
                    owners.setdefault(ast.literal_eval(decorator.args[0]), set()).add(name_of(path))
    return {name: files for name, files in owners.items() if name not in ALSO_A_WORD}


def compared_names(path: Path) -> Iterator[tuple[str, int]]:
    """Every string that a file compares something with (==, !=, in, match), and its line."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
        elif isinstance(node, ast.MatchValue):
            sides = [node.value]
        else:
            continue
        for side in sides:
            for item in side.elts if isinstance(side, ast.Tuple | ast.List | ast.Set) else [side]:
                if isinstance(item, ast.Constant) and isinstance(item.value, str):
                    yield item.value, item.lineno


def test_no_plug_in_is_compared_by_name_outside_its_own_file():
    owners = plug_ins()
    assert {"ppo", "jsonl", "gae", "vanilla"} <= set(owners)
    found = [
        f"{name_of(path)}:{line} compares with {name!r}"
        for path in FILES
        for name, line in compared_names(path)
        if name in owners and name_of(path) not in owners[name]
    ]
    assert not found


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("x == 'grpo'", ["grpo"]),
        ("x in ('a', 'b')", ["a", "b"]),
        ("match x:\n    case 'a' | 'b': pass", ["a", "b"]),
        ("f('grpo')", []),
    ],
)
def test_the_check_of_comparisons_sees_them(tmp_path, source, expected):
    (tmp_path / "a.py").write_text(source)
    assert [name for name, _ in compared_names(tmp_path / "a.py")] == expected


def test_the_check_of_handlers_sees_them(tmp_path, monkeypatch):
    monkeypatch.setattr(f"{__name__}.ROOT", tmp_path)
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
