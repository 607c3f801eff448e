"""Environments of verifiers in an interpreter of their own, which has neither rlctl nor torch."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from rlctl.data_prep.rows import read_rows
from tests.abroad.training import AGENT, NUM_EPISODES, train, wide_model
from tests.e2e.command import rlctl

OTHER = os.environ.get("ABROAD_PYTHON", "")  # of the environment with the packages
TURNS = {"single": 1, "tool": 2, "chat": 2, "group": 2, "gym": 1}


@pytest.mark.parametrize("kind", TURNS)
def test_two_steps(kind: str, tmp_path: Path) -> None:
    arguments = json.dumps({"kind": kind, "size": 4})
    rlctl(
        *("prep", "verifiers", "abroad-quiz", "--arguments", arguments),
        *("--python", OTHER, "--out", "data"),
        cwd=tmp_path,
    )
    assert len(read_rows(tmp_path / "data/val.parquet")) >= 2
    found = train(
        tmp_path,
        *(f"{AGENT}.environment=null", f"~{AGENT}.params.tools", f"{AGENT}.program=verifiers"),
        *(
            f"+{AGENT}.params.environment=abroad-quiz",
            f"+{AGENT}.params.arguments={{kind: {kind}, size: 4}}",
        ),
        *(f"{AGENT}.python={OTHER}", "data.train_files=data/train.parquet"),
        f"actor_rollout_ref.model.path={wide_model(tmp_path)}",
        *("data.max_prompt_length=1500", "data.max_response_length=500"),
        calls=[("weather", {"city": "Ulm"})] if kind == "tool" else [],
    )
    assert len(found.episodes) == NUM_EPISODES
    turns = [sum(each["trained"] for each in play["messages"]) for play in found.episodes]
    assert max(turns) == TURNS[kind]
    if kind == "tool":
        assert list(found.replies()) == ["21 degrees in Ulm"] * NUM_EPISODES
        assert min(turns) == 2
    if kind == "gym":  # its rubric has other functions
        return
    for episode, number in zip(found.episodes, turns, strict=True):
        if all(each["text"] for each in episode["messages"]):  # verifiers ends at an empty one
            parts = episode["components"]
            assert parts["length"] == len(episode["messages"]) == 2 * number - 1
            assert episode["score"] == parts["is_known"] + parts["length"] / 8


def test_installed_environments_are_listed(tmp_path: Path) -> None:
    listed = rlctl("env", "ls", "--python", OTHER, "--json", cwd=tmp_path).stdout
    [found] = [row for row in json.loads(listed) if row["kind"] == "verifiers"]
    assert found["name"] == "abroad-quiz"


def test_the_other_interpreter_lacks_rlctl_and_torch(tmp_path: Path) -> None:
    code = "import importlib.util as u; print(u.find_spec('rlctl'), u.find_spec('torch'))"
    done = subprocess.run([OTHER, "-c", code], cwd=tmp_path, capture_output=True, check=True)
    assert done.stdout.decode().split() == ["None", "None"]
