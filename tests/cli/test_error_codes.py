"""Each error message of the product has one code, and each code has messages."""

from __future__ import annotations

import ast
import json
import pickle
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

from rlctl import errors
from rlctl.__main__ import main
from rlctl.cli.json_errors import error_document
from rlctl.error_codes import code_of, error_entries, message_pattern
from rlctl.errors import ConfigError, RlctlError
from rlctl.plugins.user_code import load_named
from rlctl.runs.record import failure_of
from rlctl.runtime.sandbox.messages import error_from_json, error_to_json
from tests.architecture.source import FILES, ROOT
from tests.plugin_folders import FOLDERS

KINDS = {
    name: kind
    for name, kind in vars(errors).items()
    if isinstance(kind, type) and issubclass(kind, RlctlError)
}


@dataclass(frozen=True)
class Message:
    """A text given to an error or a problem; placeholders of f-strings are …."""

    file: str
    line: int
    text: str
    kind: type[RlctlError]
    code: str | None  # given where the error is raised


@cache
def messages() -> list[Message]:
    """Return the messages of the code that are constants, or put together in their function."""
    found: list[Message] = []
    for path in FILES:
        tree = ast.parse(Path(path).read_text(encoding="utf-8"))
        functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
        for function in (*functions, tree):
            found += _messages(str(path), function)
    return list({(each.file, each.line, each.text): each for each in reversed(found)}.values())


def _messages(file: str, function: ast.AST) -> Iterator[Message]:
    calls = [node for node in ast.walk(function) if isinstance(node, ast.Call) and node.args]
    inside = {  # a problem has the exit code of the error that it is given to
        id(argument): _name(call.func)
        for call in calls
        if _name(call.func) in KINDS
        for argument in call.args
    }
    for call in calls:
        name = _name(call.func)
        kind = KINDS.get(inside.get(id(call), "ConfigError") if name == "Problem" else name)
        if kind is None:
            continue
        code = next((each.value for each in call.keywords if each.arg == "code"), None)
        given = str(getattr(code, "value", "?")) if code else None
        for text in _texts(call.args[0], function):
            yield Message(file, call.lineno, text, kind, given)


def _name(function: ast.expr) -> str:
    return getattr(function, "id", getattr(function, "attr", ""))


def _texts(node: ast.expr, function: ast.AST) -> list[str]:
    if isinstance(node, ast.Constant):
        return [node.value] if isinstance(node.value, str) else []
    if isinstance(node, ast.JoinedStr):
        parts = (each.value if isinstance(each, ast.Constant) else "…" for each in node.values)
        return ["".join(map(str, parts))]
    if isinstance(node, ast.IfExp):
        return [*_texts(node.body, function), *_texts(node.orelse, function)]
    if isinstance(node, ast.BinOp):
        before, after = _texts(node.left, function), _texts(node.right, function)
        return [left + right for left in before for right in after or ["…"]]
    if isinstance(node, ast.Name):
        assigned = [
            each.value
            for each in ast.walk(function)
            if isinstance(each, ast.Assign)
            and any(isinstance(to, ast.Name) and to.id == node.id for to in each.targets)
        ]
        return [
            text
            for value in assigned
            if isinstance(value, ast.Constant | ast.JoinedStr)
            for text in _texts(value, function)
        ]
    return []


def claims(message: Message) -> set[str]:
    """Return the codes whose templates the message matches."""
    return {
        entry.code
        for entry in error_entries().values()
        if entry.exit == message.kind.exit_code
        for template in entry.messages
        if message_pattern(template).match(message.text)
    }


def test_no_message_is_claimed_by_two_codes() -> None:
    assert len(messages()) > 600
    several = {
        f"{each.file}:{each.line} {each.text}": codes
        for each in messages()
        if each.code is None and len(codes := claims(each)) > 1
    }
    assert several == {}


# Where the messages of each code come from: a message of another place that looks like one of them
# has the wrong code. Files or folders below rlctl.
PLACES = """
E-ACCESS plugins/console causes.py runs write_errors.py
E-ASYNC runtime/algorithms runtime/planning
E-ATTENTION runtime/model
E-BATCH-SIZE runtime/planning
E-CHECKPOINT-DAMAGED runtime/training runtime/workers
E-DATA-COLUMN data_prep
E-DATA-FILE data_prep
E-DEVICES runtime/cluster runtime/planning sweeps
E-DISK causes.py remote_files.py runtime/training runtime/export.py runtime/planning
  write_errors.py
E-DRIFT runtime/training
E-ENGINE-INSTALL runtime/rollout/vllm_engine
E-ENGINE-SETTING plugins/bridges runtime/rollout
E-EXISTS cli/commands runs runtime/training runtime/export.py plugins/bridges plugins/console
  sweeps
E-FOLDER-GONE runs
E-GROUPS plugins/objectives runtime/algorithms
E-HUB data_prep hub.py plugins/console runtime/training
E-HUB-PUSH plugins/console
E-IN-USE plugins/console runs sweeps
E-JUDGE runtime/planning runtime/rollout
E-LENGTH cli/commands plugins/agents runtime/data runtime/planning
E-MEDIA data_prep runtime/data
E-MISMATCH runtime/rollout runtime/training
E-MODEL-FOLDER gguf_model.py runtime/data runtime/model runtime/planning
E-MODEL-MEMORY runtime/planning
E-NO-CHECKPOINT runtime
E-NO-DATA-SET data_prep hub.py remote_files.py
E-NO-RUN plugins/console cli runs runtime/training
E-NO-SCORER runtime/rewards
E-NOT-FINITE runtime/training
E-NOT-SUPPORTED plugins/bridges/verl
E-NOTHING-TO-LEARN runtime/training
E-OOM causes.py runtime
E-OVERRIDE recipes
E-PICKLE runtime/planning
E-PLACEMENT runtime/model runtime/planning
E-PLUGIN causes.py cli plugins
E-RAY runtime/cluster
E-RECIPE recipes
E-REMOTE-CODE runtime/data
E-REWARD-CODE runtime/rewards
E-REWARD-COMPONENT plugins/objectives runtime/algorithms runtime/planning runtime/training
E-REWARD-ERROR cli plugins/agents runtime/rewards runtime/training
E-REWARD-FAILS cli runtime/planning
E-SEARCH-SPACE recipes sweeps
E-SECRET plugins/console recipes runs sweeps
E-SERVER-START plugins/bridges runtime/rollout runtime/sandbox tracking
E-STORAGE remote_files.py
E-TOKENIZER plugins/agents plugins/objectives runtime/data runtime/planning
E-TOOLS data_prep plugins/agents
E-TRACKER plugins/bridges tracking
E-TRUST runs
E-UNKNOWN-KEY plugins recipes
E-URL remote_files.py
E-WORKER-LOST runtime/cluster runtime/training
E-WRONG-VALUE plugins recipes runtime/algorithms
"""


def test_a_code_has_messages_of_its_own_places_only() -> None:
    places = {
        line.split()[0]: tuple(line.split()[1:])
        for line in PLACES.strip().replace("\n  ", " ").splitlines()
    }
    elsewhere = [
        f"{each.file}:{each.line} {each.text} has the code {code}"
        for each in messages()
        if each.code is None
        for code in claims(each)
        if not each.file.removeprefix(f"{ROOT}/rlctl/").startswith(places.get(code, ()))
    ]
    assert elsewhere == []
    assert set(places) <= set(error_entries())


def test_codes_that_errors_name_exist_and_have_their_exit_code() -> None:
    named = {each.code: each.kind.exit_code for each in messages() if each.code not in (None, "?")}
    assert named
    assert {code: error_entries()[code].exit for code in named} == named


@pytest.mark.plugin(*FOLDERS)
def test_each_code_has_messages() -> None:
    claimed = {code for each in messages() for code in claims(each)}
    general = {kind.code for kind in KINDS.values()}
    lacking = [
        entry.code
        for entry in error_entries().values()
        if entry.code not in claimed | general and not entry.given
    ]
    assert lacking == []
    assert not [code for code in general if code != "E-OOM" and error_entries()[code].messages]


@pytest.mark.parametrize(
    ("message", "code"),
    [
        ("the data file has no rows", "E-DATA-FILE"),
        ("unknown aggregation of losses: 'x'", "E-WRONG-VALUE"),
        ("unknown URL scheme x://", "E-URL"),
        ("unknown agent_name: x", "E-TOOLS"),
        ("the environment 'x' is of type int, not a class", "E-TOOLS"),
        ("the stored configuration is damaged: x", "E-CONFIG"),
        ("the optimizer torch.optim.LBFGS is not supported: its state cannot be saved", "E-CONFIG"),
    ],
)
def test_code_of_a_message_that_resembles_others(message: str, code: str) -> None:
    assert code_of(message, ConfigError) == code


def test_a_code_that_is_given_passes_through_processes_and_the_command_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    error = ConfigError("x", hint="y", code="E-TOOLS")
    assert pickle.loads(pickle.dumps(error)).problems == error.problems
    assert error_from_json(json.loads(json.dumps(error_to_json(error)))).problems == error.problems
    monkeypatch.chdir(tmp_path)
    for noun, code in (("reward", "E-REWARD-CODE"), ("environment", "E-TOOLS")):
        (tmp_path / "own.py").write_text("1 / 0")
        with pytest.raises(ConfigError) as caught:
            load_named(f"{noun}s", "own.py:f", noun)
        assert error_document(caught.value)["error"]["code"] == code
    assert main(["train", "ppo", "--dry-run", "algorithm.adv_estimator=gea"]) == 3
    assert "see: rlctl explain E-PLUGIN" in capsys.readouterr().err
    assert failure_of(error)["code"] == "E-TOOLS"
