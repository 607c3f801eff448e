"""Hints that propose quotes, typed into a real shell."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from rlctl.cli.commands.prep import _override
from rlctl.recipes.overrides import parse, plain

TAGS, FILES, PARAMS = "trainer.tracking.tags", "data.train_files", "trainer.tracking.params"

# The value that Hydra cannot parse, and what the hint's override must set.
HARD: list[tuple[str, str, Any]] = [
    *((FILES, value, value) for value in ("s3://x/y?z=1", "it's", "a=b", "#y", "a$(id)b", "`id`")),
    (FILES, 'say "hi" = \\now', 'say "hi" = \\now'),
    ("trainer.project_name", "größe!", "größe!"),
    (TAGS, "[größe, a b,x-1]", ["größe", "a b", "x-1"]),
    (TAGS, "[a,b", ["a", "b"]),
    (TAGS, '[it\'s, "a, b", $HOME]', ["it's", "a, b", "$HOME"]),
    (PARAMS, "{mlflow: {experiment: say hi!}}", {"mlflow": {"experiment": "say hi!"}}),
    (
        PARAMS,
        "{mlflow: {experiment: it's, tags: {a b: $c, x: 'y z'}}}",
        {"mlflow": {"experiment": "it's", "tags": {"a b": "$c", "x": "y z"}}},
    ),
    (PARAMS, '{"mlflow": {experiment: one}}', {"mlflow": {"experiment": "one"}}),
    (PARAMS, "{mlflow: {experiment: one}", {"mlflow": {"experiment": "one"}}),
    (PARAMS, '{"tensorboard": {log_dir: "a/b c"}}', {"tensorboard": {"log_dir": "a/b c"}}),
]


def typed(commands: Sequence[str], folder: Path) -> list[list[str]]:
    """Return the words that bash passes to each of the commands' programs."""
    script = "".join(f"printf '%s\\0' {command}; printf '\\n\\0'\n" for command in commands)
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", script],
        capture_output=True,
        text=True,
        check=True,
        cwd=folder,
        timeout=60,
    )
    return [group.split("\0")[:-1] for group in done.stdout.split("\n\0")[:-1]]


def hint_for(override: str) -> str:
    _, [problem] = parse([override])
    return problem.hint or ""


def values(words: Sequence[str]) -> dict[str, Any]:
    """Return the keys and values of overrides, which must parse."""
    parsed, problems = parse(words)
    assert not problems
    return {override.key_or_group: plain(override.value()) for override in parsed}


def test_hints_for_values_that_cannot_be_parsed(tmp_path: Path) -> None:
    hints = [hint_for(f"{key}={value}") for key, value, _ in HARD]
    commands = [re.sub("^(quote|close) it: ", "", hint) for hint in hints]
    found = [values(words) for words in typed(commands, tmp_path)]
    assert found == [{key: wanted} for key, _, wanted in HARD]


@pytest.mark.parametrize("value", ["a b,c d", "x,$HOME"])
def test_hints_for_a_value_with_a_comma(value: str, tmp_path: Path) -> None:
    hint = hint_for(f"{FILES}={value}")
    listed, single = re.findall(r"is (.*?)(?:; one value|; use)", hint)
    as_list, as_one = typed([listed, single], tmp_path)
    assert values(as_list) == {FILES: value.split(",")}
    assert values(as_one) == {FILES: value}


def test_overrides_in_the_commands_that_prep_prints(tmp_path: Path) -> None:
    names = ["a.parquet", "a,b.parquet", "a=b.parquet", "it's here.parquet", "{a}", "größe", "a:b"]
    words = typed([_override(FILES, name) for name in names], tmp_path)
    assert [values(given) for given in words] == [{FILES: name} for name in names]


def test_a_value_without_a_repair_has_no_command() -> None:
    assert (
        hint_for(f"{PARAMS}={{mlflow: }} x: [") == f"set {PARAMS} in a recipe: --recipe FILE.yaml"
    )
