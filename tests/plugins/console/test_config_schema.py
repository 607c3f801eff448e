"""JSON schema of recipes: what it accepts, and what it names."""

from __future__ import annotations

from typing import Any

import jsonschema
import pytest
import yaml

from rlctl.plugins.console.commands.config_schema import recipe_schema
from rlctl.recipes.keys import schema_keys
from tests.architecture.source import ROOT

SCHEMA = recipe_schema()
VALIDATOR = jsonschema.Draft202012Validator(SCHEMA)


def test_every_bundled_recipe_is_valid():
    for file in sorted((ROOT / "recipes").glob("*.yaml")):
        errors = [
            f"{file.name}: {error.json_path}: {error.message[:80]}"
            for error in VALIDATOR.iter_errors(yaml.safe_load(file.read_text()))
        ]
        assert errors == []


@pytest.mark.parametrize(
    ("text", "where"),
    [
        ("trainer: {sead: 1}", "$.trainer"),
        ("trainer: {seed: one}", "$.trainer.seed"),
        ("algorithm: {gamma: -1}", "$.algorithm.gamma"),
    ],
)
def test_a_mistake_is_found(text: str, where: str):
    (error,) = VALIDATOR.iter_errors(yaml.safe_load(text))
    assert error.json_path == where


def test_interpolations_and_parts_are_accepted():
    text = "defaults: [ppo_trainer, _self_]\n_x: 1\ntrainer: {seed: '${data.seed}'}\n"
    assert not list(VALIDATOR.iter_errors(yaml.safe_load(text)))


def test_every_key_has_its_help():
    for name, key in schema_keys().items():
        if key.kind == "section" or "*" in name:
            continue
        found = recipe_schema_at(name)
        assert found["description"], name


def recipe_schema_at(name: str) -> dict[str, Any]:
    found = SCHEMA
    for part in name.split("."):
        found = found["properties"][part]
    return found
