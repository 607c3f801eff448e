"""Plain English in docstrings, comments, messages and docs: the rules that a machine can check."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.architecture.source import (
    BENCHMARKS,
    FILES,
    ROOT,
    TEST_FILES,
    Function,
    name_of,
    nodes,
    parsed,
)

DOCS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"]
DOCS += sorted((ROOT / "docs").rglob("*.md"))
YAML = sorted((ROOT / "recipes").rglob("*.yaml"))

# Phrases that are not English as engineers write it; CONTRIBUTING.md and the glossary have better.
PRIVATE = re.compile(
    r"\b(hangs? on|anew|takes? up|took up|taken up|(is|are|be|was) told|tells? of|goes on|went on|"
    r"stands? (beside|there|in for|behind)|lies (in|there|beside)|mend(s|ed)?|dealt out|"
    r"hand-overs?|hand(s|ed)? over|of ours|knows nothing of|says so)\b",
    re.IGNORECASE,
)
RIDDLE = re.compile(r"(What|Whether|Where|Whatever|Of|By|As|To|Which|How|Who)\b")
RIDDLE_BEGINS = re.compile(rf'"\s*{RIDDLE.pattern}')
NO_VERB = re.compile(
    r"(The|A|An|This|That|It|Its|All|Every|Each|No|None|One|Same|Some|Only|Not|In|On|With|Without|From|"
    r"For|At|If|When|True|False|So|There|Like|Two|More|Here)\b"
)
OUTSIDE = re.compile(
    r"house rule|research/\w+\.md|the plan of|review-\w+\.md|shared/(design|research|data)|/work/"
)
SHAPE = re.compile(
    r"\([A-Z0-9][A-Za-z0-9_·+*/−\-]*(, ?[A-Za-z0-9_·+*/.…−\-]+)*,?\)|\b[Ss]calars?\b|0-d|ragged"
)


def texts(path: Path) -> Iterator[tuple[int, str]]:
    """Yield line and text of every string and comment of a Python file."""
    for token in tokenize.generate_tokens(io.StringIO(path.read_text(encoding="utf-8")).readline):
        if token.type in (tokenize.STRING, tokenize.COMMENT):
            yield token.start[0], token.string


def docstrings(path: Path) -> Iterator[tuple[str, ast.AST, str]]:
    """Yield qualified name, node and docstring of every documented definition of a file."""
    tree = parsed(path)
    for name, node in [("", tree), *nodes(tree)]:
        if isinstance(node, Function | ast.ClassDef | ast.Module) and (
            text := ast.get_docstring(node)
        ):
            yield f"{name_of(path)}::{name}", node, text


def is_property(node: ast.AST) -> bool:
    decorators = node.decorator_list if isinstance(node, Function) else []
    return any("property" in ast.unparse(each) for each in decorators)


def private_phrases(path: Path) -> list[str]:
    if not PRIVATE.search(path.read_text(encoding="utf-8")):
        return []
    lines = (
        texts(path)
        if path.suffix == ".py"
        else enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
    )
    found = ((line, match[0]) for line, text in lines for match in PRIVATE.finditer(text))
    return [f"{name_of(path)}:{line}: {phrase}" for line, phrase in found]


def test_no_private_phrases():
    places = [*FILES, *TEST_FILES, *BENCHMARKS, *DOCS, *YAML]
    found = [each for path in places if path != Path(__file__) for each in private_phrases(path)]
    assert not found, "\n".join(found)


def test_docstrings_are_no_riddles():
    found = [
        f"{name}: {text.splitlines()[0]}"
        for path in [*FILES, *TEST_FILES, *BENCHMARKS]
        if RIDDLE_BEGINS.search(path.read_text())
        for name, _, text in docstrings(path)
        if RIDDLE.match(text)
    ]
    assert not found, "\n".join(found)


def test_function_docstrings_start_with_a_verb():
    found = [
        f"{name}: {text.splitlines()[0]}"
        for path in FILES
        for name, node, text in docstrings(path)
        if isinstance(node, Function) and not is_property(node) and NO_VERB.match(text)
    ]
    assert not found, "\n".join(found)


def public(path: Path) -> Iterator[tuple[str, ast.AST]]:
    """Yield the module and its public classes, functions and methods."""
    tree = parsed(path)
    if tree.body:
        yield name_of(path), tree
    definitions = Function | ast.ClassDef
    for outer in (node for node in tree.body if isinstance(node, definitions)):
        if outer.name.startswith("_"):
            continue
        yield f"{name_of(path)}::{outer.name}", outer
        for inner in outer.body if isinstance(outer, ast.ClassDef) else ():
            if isinstance(inner, definitions) and not inner.name.startswith("_"):
                yield f"{name_of(path)}::{outer.name}.{inner.name}", inner


def test_public_names_have_docstrings():
    texts = {name: ast.get_docstring(node) for path in FILES for name, node in public(path)}  # type: ignore[arg-type]
    missing = [name for name, text in texts.items() if not text]
    assert len(missing) <= 0.05 * len(texts), "\n".join(missing)
    placeholders = [name for name, text in texts.items() if text and len(text.split()) < 2]
    assert not placeholders, "\n".join(placeholders)


def is_tensor_function(node: Function) -> bool:
    """Return True for a function that takes or returns a tensor, by its annotations."""
    arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
    annotations = [each.annotation for each in arguments] + [node.returns]
    return any(re.search(r"\bTensor\b", ast.unparse(each)) for each in annotations if each)


def test_tensor_functions_state_shapes():
    """Also through an overridden method of that name, whose docstring a method inherits."""
    texts = {
        name: ast.get_docstring(node)
        for path in sorted((ROOT / "rlctl" / "runtime").rglob("*.py"))
        for name, node in public(path)
        if isinstance(node, Function) and is_tensor_function(node)
    }
    stated = {name for name, text in texts.items() if text and SHAPE.search(text)}
    methods = {name.rpartition(".")[2] for name in stated}
    found = [
        name
        for name, text in texts.items()
        if name not in stated and (text or name.rpartition(".")[2] not in methods)
    ]
    assert not found, "\n".join(found)


def test_no_reference_to_documents_outside_the_repository():
    found = [
        f"{name_of(path)}:{number}: {line.strip()}"
        for path in [*FILES, *TEST_FILES, *BENCHMARKS, *DOCS, *YAML]
        if path != Path(__file__)
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if OUTSIDE.search(line)
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("text", "found"),
    [("It hangs on the seed", True), ("drawn anew", True), ("depends on the seed", False)],
)
def test_the_check_of_phrases_finds_them(text, found):
    assert bool(PRIVATE.search(text)) == found


@pytest.mark.parametrize(
    ("text", "found"),
    [("Scores (B,) of", True), ("(B, R) -> (B,)", True), ("a scalar", True), ("some text", False)],
)
def test_the_check_of_shapes_finds_them(text, found):
    assert bool(SHAPE.search(text)) == found
