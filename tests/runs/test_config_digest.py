"""Digest of a configuration: equal to what YAML says, however the text is written."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from rlctl.recipes.compose import compose
from rlctl.runs import digests as module
from rlctl.runs.digests import config_digest


def digest(folder: Path, text: str) -> dict:
    file = folder / "config.yaml"
    file.write_text(text)
    return config_digest(file)


@pytest.mark.parametrize("verb", ["ppo", "grpo", "sft"])
def test_digest_of_a_recipe_equals_that_of_the_parsed_file(verb: str, tmp_path: Path) -> None:
    given = ["trainer.tracking.description='two lines:\n  a: 1\n\nb'", "trainer.project_name='yes'"]
    text = yaml.safe_dump(compose(verb, given).recorded, sort_keys=False, allow_unicode=True)
    found = digest(tmp_path, text)
    assert found == module._parse(text)
    assert found["trainer.tracking.description"] == "two lines:\n  a: 1\n\nb"


@pytest.mark.parametrize(
    "text",
    [
        "a: &x [1, 2]\nb: *x\n",  # the reference is in another section
        "a:\n    b: 1\n    c:\n        d: 2\n",
        "---\na:\n  b: 1\n",
        "# mine\na:\n  # of b\n  b: 1  # one\n\n  c: 2\n",
        "a:\n  b: |\n    x: 1\n    y: 2\n  c: >-\n    x\n\n    y\nd: 1",
        "a:\n  'b c': 1\n  \"d\": 2\n  3: 4\n  e-f/g: 5\n",
        "a:\n  b: |2-\n      x: 1\n\n    y\n  c: 2\n",
        "a: {b: 1,\nc: 2}\nd: 3\n",
        'a: "x\ny: z"\nb: 1\n',
        "a:\n  plain text\n  of two lines\nb: 1\n",
        "a:\n- b: 1\n  c: 2\n- 3\nd: {}\ne: []\n",
        "a:\n  b: 1\na:\n  c: 2\n",
        "a:\n  b: 1\r\n  c: 2\r\n",
        "a:\n  b: 1\n  c:\n    d: 2",
        "".join(f"{'  ' * depth}a{depth}:\n" for depth in range(20)),
    ],
)
def test_digest_of_other_texts_equals_that_of_the_parsed_file(text: str, tmp_path: Path) -> None:
    assert digest(tmp_path, text) == module._parse(text)


@pytest.mark.parametrize("text", ["", "a: [1\n", "- 1\n", "text", "a: b: c\n", "\x00"])
def test_unreadable_text_has_an_empty_digest(text: str, tmp_path: Path) -> None:
    assert digest(tmp_path, text) == {}
