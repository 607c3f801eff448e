"""Tests of the shipped tools that run programs and search texts."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rlctl.errors import ConfigError
from rlctl.runtime.agents.environments.pool import EnvironmentPool, Timeouts
from rlctl.runtime.agents.environments.protocol import Step, ToolCall, Turn
from rlctl.runtime.agents.environments.search_tool import Index

NETWORK = """
import socket
try:
    socket.create_connection(("127.0.0.1", PORT), timeout=300)
    print("connected")
except OSError as error:
    print("no network:", type(error).__name__)
"""


def play(tool: str, settings: dict[str, Any], calls: Sequence[dict[str, Any]]) -> list[Step]:
    params = {
        "tools": [tool],
        "tool_params": {tool: settings},
        "max_tool_response_length": 2000,
    }

    async def run() -> list[Step]:
        remote = await pool.open({}, "k")
        turns = [Turn("", (ToolCall("1", tool, arguments),)) for arguments in calls]
        steps = [await remote.step(turn) for turn in turns]
        await remote.close()
        return steps

    with EnvironmentPool("tools", params, timeouts=Timeouts(300, 300), logs=Path()) as pool:
        return asyncio.run(run())


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


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
        f"open({str(folder / 'outside')!r}, 'w')": "PermissionError",
        "import os\nopen('inside', 'w').write('1')\nos.listdir()": "['inside']",
        "import os\nprint(sorted(os.environ))": "HOME",
        "import subprocess\nsubprocess.Popen(['sleep', '3600'])\nprint('left')": "left",
    }
    settings = {"output_chars": 100, "time_limit_s": 300}
    steps = play("python", settings, [{"code": code} for code in programs])
    found = [step.messages[0]["content"] for step in steps]
    for expected, text in zip(programs.values(), found, strict=True):
        shown = expected[:100]
        assert text.startswith(shown) if "Traceback" in expected else shown in text, text
    assert all(step.uses[0].error is None for step in steps)
    assert not (folder / "outside").exists()


def test_python_programs_have_no_network_and_a_time_limit() -> None:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as server:
        code = NETWORK.replace("PORT", str(server.getsockname()[1]))
        [denied] = play("python", {}, [{"code": code}])
        [allowed] = play("python", {"allow_network": True}, [{"code": code}])
    assert denied.messages[0]["content"].startswith("no network: ")
    assert allowed.messages[0]["content"] == "connected"
    started = time.monotonic()
    code = "print('so far', flush=True)\nimport os, time\nif os.fork(): time.sleep(600)\nelse: "
    [late] = play("python", {"time_limit_s": 8}, [{"code": code + "os.setsid(); time.sleep(600)"}])
    assert late.messages[0]["content"] == "error: timed out after 8 s\nso far"
    assert late.uses[0].error == "timeout"
    assert time.monotonic() - started < 300


def test_search(folder: Path) -> None:
    texts = ["The cat sat.", "A dog and a cat: cat!", "Dogs bark at night.", "Nothing here."]
    Path("texts.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in texts))
    pq.write_table(pa.table({"contents": texts, "id": [1, 2, 3, 4]}), "texts.parquet")
    queries = [{"query": "CAT"}, {"query": "unicorn"}, {"query": "bark, dog"}]
    for settings in (
        {"path": "texts.jsonl", "top_k": 2},
        {"path": "texts.parquet", "text_key": "contents", "top_k": 2},
    ):
        steps = play("search", settings, queries)
        assert [step.messages[0]["content"] for step in steps] == [
            "[1] A dog and a cat: cat!\n[2] The cat sat.",
            "no text matches",
            "[1] Dogs bark at night.\n[2] A dog and a cat: cat!",
        ]


def test_index_prefers_rare_words_and_short_texts() -> None:
    index = Index(
        ["common rare", "common", "common common other words", "common and long " + "long " * 20]
    )
    assert index.search("common rare", 1) == [0]
    assert index.search("common", 4)[-1] == 3
    assert index.search("", 3) == []
    assert Index([]).search("x", 3) == []


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "search needs a value for path"),
        ({"path": "missing.jsonl"}, "does not exist"),
        ({"path": "wrong.jsonl"}, "row 2 has no text 'text'"),
        ({"path": "broken.jsonl"}, "no JSON"),
    ],
)
def test_wrong_texts(settings: dict[str, Any], message: str) -> None:
    Path("wrong.jsonl").write_text('"a"\n{"txt": "b"}\n')
    Path("broken.jsonl").write_text("{")
    with pytest.raises(ConfigError, match=message):
        play("search", settings, [])
