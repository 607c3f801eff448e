"""Headless Chromium, controlled through the DevTools protocol on a pipe.

Supports what the tests need: open a page, evaluate an expression, press a button.
"""

from __future__ import annotations

import json
import os
import select
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any, Self

TIMEOUT_S = 300
CHROMIUM = (
    shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
)


class Browser:
    """`errors` are the exceptions, errors and warnings that the page has caused so far."""

    def __init__(self, program: str, profile: Path, *switches: str) -> None:
        commands, self.write = os.pipe()
        self.read, answers = os.pipe()
        options = [
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--no-first-run",
            f"--user-data-dir={profile}",
            *switches,
        ]
        self.process = subprocess.Popen(
            [
                "bash",
                "-c",
                f'exec "$0" "$@" 3<&{commands} 4>&{answers}',
                program,
                "--remote-debugging-pipe",
                *options,
            ],
            pass_fds=(commands, answers),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(commands)
        os.close(answers)
        self.buffer, self.number, self.session = b"", 0, None
        self.errors: list[str] = []
        self.events: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.call("Target.attachToTarget", targetId=target, flatten=True)[
            "sessionId"
        ]
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self.read)
        os.close(self.write)

    def open(self, page: Path | str) -> None:
        """Open a file or a URL and wait until it is loaded."""
        self.events.clear()
        self.call("Page.navigate", url=page if isinstance(page, str) else page.resolve().as_uri())
        deadline = time.monotonic() + TIMEOUT_S
        while "Page.loadEventFired" not in self.events:
            self._receive(deadline)

    def ask(self, expression: str) -> Any:
        """The value of a JavaScript expression, awaited."""
        answer = self.call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        self.number += 1
        message = {"id": self.number, "method": method, "params": params} | (
            {"sessionId": self.session} if self.session else {}
        )
        os.write(self.write, json.dumps(message).encode() + b"\0")
        deadline = time.monotonic() + TIMEOUT_S
        while (answer := self._receive(deadline)).get("id") != self.number:
            pass
        assert "error" not in answer, answer
        return answer["result"]

    def _receive(self, deadline: float) -> dict[str, Any]:
        while b"\0" not in self.buffer:
            ready, _, _ = select.select([self.read], [], [], max(0.0, deadline - time.monotonic()))
            assert ready, f"Chromium said nothing for {TIMEOUT_S} s"
            part = os.read(self.read, 1 << 20)
            assert part, "Chromium ended"
            self.buffer += part
        line, _, self.buffer = self.buffer.partition(b"\0")
        message = json.loads(line)
        self._note(message)
        return message

    def _note(self, message: dict[str, Any]) -> None:
        method, params = message.get("method", ""), message.get("params", {})
        self.events.append(method)
        loud = params.get("type") in ("error", "warning") or params.get("entry", {}).get(
            "level"
        ) in ("error", "warning")
        if method == "Runtime.exceptionThrown" or (
            method in ("Runtime.consoleAPICalled", "Log.entryAdded") and loud
        ):
            self.errors.append(json.dumps(params))
