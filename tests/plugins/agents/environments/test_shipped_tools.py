"""Tests of the shipped tools that run programs and search texts."""

from __future__ import annotations

import asyncio
import json
import re
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rlctl.errors import ConfigError
from rlctl.plugins.agents.environments import python_tool
from rlctl.plugins.agents.environments.gridworld import MOVES, GridParams, GridWorld
from rlctl.plugins.agents.environments.protocol import Step
from rlctl.plugins.agents.environments.python_tool import PythonParams, PythonTool
from rlctl.runtime.serving.chat import Turn
from tests.plugins.agents.environments.episodes import load_here, play, play_here, turn_of

NETWORK = """
import socket
try:
    socket.create_connection(("127.0.0.1", PORT), timeout=300)
    print("connected")
except OSError as error:
    print("no network:", type(error).__name__)
"""


def settings_of(tool: str, **settings: Any) -> dict[str, Any]:
    return {"tools": [tool], "tool_params": {tool: settings}, "max_tool_response_length": 2000}


def call_python(params: PythonParams, codes: Sequence[str]) -> list[str]:
    """Return the results of programs that run from this process."""

    async def run() -> list[str]:
        tool = PythonTool(params)
        return [(await tool.call({"code": code})).text for code in codes]

    return asyncio.run(run())


@pytest.fixture(autouse=True)
def folder(here: Path) -> Path:
    return here


def test_python_programs(folder: Path) -> None:
    programs = {
        "print('a')\n2**70": f"a\n{2**70}",
        "import math\nx = math.sqrt(16)": "",
        "import sys\nsys.stderr.write('b')": "b",
        "1/0": 'Traceback (most recent call last):\n  File "<code>", line 1, in <module>\n'
        "ZeroDivisionError: division by zero",
        "x =": '  File "<code>", line 1\n    x =\n       ^\nSyntaxError: invalid syntax',
        "print(bytearray(2 * 2**30))": "MemoryError",
        "raise SystemExit(3)": "exit status 3",
        "print('x' * 10**6)": "x" * 100 + "...(truncated)",
        f"open({str(folder / 'outside')!r}, 'w')": "Error: [Errno",
        "import os\nopen('inside', 'w').write('1')\nos.listdir()": "['inside']",
        "import os\nprint(sorted(os.environ))": "HOME",
        "import subprocess\nsubprocess.Popen(['sleep', '3600'])\nprint('left')": "left",
    }
    params = settings_of("python", output_chars=100, time_limit_s=300)
    with socket.create_server(("127.0.0.1", 0)) as server:
        connect = NETWORK.replace("PORT", str(server.getsockname()[1]))
        codes = [*programs, connect]
        played = play("tools", params, [turn_of("python", code=code) for code in codes])
        allowed = call_python(PythonParams(allow_network=True), [connect])
    *texts, denied = played.texts
    for expected, text in zip(programs.values(), texts, strict=True):
        shown = expected[:100]
        assert text.startswith(shown) if "Traceback" in expected else shown in text, text
    assert denied.startswith("no network: ")
    assert allowed == ["connected"]
    assert all(step.uses[0].error is None for step in played.steps)
    assert not (folder / "outside").exists()


def test_python_programs_have_a_time_limit() -> None:
    code = "print('so far', flush=True)\nimport os, time\nif os.fork(): time.sleep(600)\nelse: "
    late = turn_of("python", code=code + "os.setsid(); time.sleep(600)")
    [step] = play("tools", settings_of("python", time_limit_s=4), [late]).steps
    assert step.messages[0]["content"] == "error: timed out after 4 s\nso far"
    assert step.uses[0].error == "timeout"


def test_files_that_nothing_protects_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(python_tool, "has_bubblewrap", lambda: False)
    without = (
        "from rlctl.runtime.sandbox import process_limits, namespaces; "
        "process_limits._version = lambda: -1; "
        "namespaces.enter_namespaces = lambda *_, **__: namespaces.Namespaces.NONE; "
    )
    start, end = python_tool._BOOT.split("from rlctl", 1)
    monkeypatch.setattr(python_tool, "_BOOT", f"{start}{without}from rlctl{end}")
    with pytest.raises(ConfigError, match="kept from writing to your files") as raised:
        PythonTool(PythonParams())
    assert "allow_writes=true" in str(raised.value.problems[0].hint)
    assert "2" in call_python(PythonParams(allow_writes=True), ["1 + 1"])[0]


def test_search(folder: Path) -> None:
    texts = ["The cat sat.", "A dog and a cat: cat!", "Dogs bark at night.", "Nothing here."]
    Path("texts.jsonl").write_text(
        "\n".join(json.dumps({"text": text}) for text in texts), encoding="utf-8"
    )
    pq.write_table(pa.table({"contents": texts, "id": [1, 2, 3, 4]}), "texts.parquet")
    turns = [turn_of("search", query=query) for query in ("CAT", "unicorn", "bark, dog")]
    for settings in (
        {"path": "texts.jsonl", "top_k": 2},
        {"path": "texts.parquet", "text_key": "contents", "top_k": 2},
    ):
        assert play_here("tools", settings_of("search", **settings), turns).texts == [
            "[1] A dog and a cat: cat!\n[2] The cat sat.",
            "no text matches",
            "[1] Dogs bark at night.\n[2] A dog and a cat: cat!",
        ]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "search needs a value for path"),
        ({"path": "missing.jsonl"}, "does not exist"),
        ({"path": "wrong.jsonl"}, "row 2 has no text 'text'"),
        ({"path": "broken.jsonl"}, "not JSON"),
    ],
)
def test_wrong_texts(settings: dict[str, Any], message: str) -> None:
    Path("wrong.jsonl").write_text('"a"\n{"txt": "b"}\n', encoding="utf-8")
    Path("broken.jsonl").write_text("{", encoding="utf-8")
    with pytest.raises(ConfigError, match=message):
        load_here("tools", settings_of("search", **settings))


def started(extra: dict[str, Any], prompt: Any = (), **params: Any) -> tuple[GridWorld, Any]:
    grid = GridWorld(GridParams(**params))
    return grid, asyncio.run(grid.reset({"prompt": list(prompt), "extra_info": extra}))


def step(grid: GridWorld, text: str) -> Step:
    return asyncio.run(grid.step(Turn(text)))


def way(grid: GridWorld) -> list[str]:
    """Return the words of a shortest way to the goal."""
    words, at, distances = [], grid._at, grid._distances
    while at != grid._goal:
        for word, (dx, dy) in MOVES.items():
            to = (at[0] + dx, at[1] + dy)
            if distances.get(to, 99) < distances[at]:
                words.append(word)
                at = to
                break
    return words


def test_equal_rows_have_equal_grids_and_need_four_turns() -> None:
    observed = [started({"seed": seed}, walls=3)[1][0]["content"] for seed in range(30)]
    assert observed == [started({"seed": seed}, walls=3)[1][0]["content"] for seed in range(30)]
    assert len(set(observed)) > 20
    assert all(re.fullmatch(r"at \d \d, goal \d \d", each) for each in observed)
    assert observed[7] == started({"index": 7, "seed": None}, walls=3)[1][0]["content"]
    for seed in range(30):
        grid, _ = started({"seed": seed}, walls=3)
        words = way(grid)
        assert 4 <= len(words) <= 12
        steps = [step(grid, f"I go {word}!") for word in words]
        assert [each.done for each in steps] == [False] * (len(words) - 1) + [True]
        assert asyncio.run(grid.score()) == {"score": 1.0, "turns": len(words)}


def test_walls_unknown_words_and_the_end() -> None:
    grid, observed = started({"seed": 0, "size": 3, "walls": 0}, prompt=[{"role": "user"}])
    assert isinstance(observed, str)  # added to the row's prompt
    texts = [step(grid, "left").messages[0]["content"] for _ in range(3)]
    assert texts[-1] == "wall"
    assert step(grid, "jump").messages[0]["content"] == "up, down, left, right?"
    while not (last := step(grid, "left")).done:
        pass
    assert last == Step([], done=True)
    assert asyncio.run(grid.score()) == {"score": 0.0, "turns": 12.0}


def test_rewards_of_steps_cancel_out() -> None:
    grid, _ = started({"seed": 3}, step_reward=0.5)
    there = way(grid)[0]
    back = {"up": "down", "down": "up", "left": "right", "right": "left"}[there]
    assert [step(grid, word).reward for word in (there, back, "jump")] == [0.5, -0.5, 0.0]


def test_grid_without_a_far_start_is_refused() -> None:
    with pytest.raises(ValueError, match="no grid of size 2"):
        started({"seed": 0}, size=2, min_distance=5)
