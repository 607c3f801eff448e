"""Chromium, if it is installed."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser, ConsoleMessage, Dialog, Page

CHROMIUM = (
    shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
)


@contextmanager
def chromium() -> Iterator[Browser]:
    """Start Chromium; skip the test if it is not installed."""
    from playwright.sync_api import sync_playwright  # 0.3 s, for the sessions that need it

    if CHROMIUM is None:
        pytest.skip("there is no Chromium here")
    with sync_playwright() as playwright:
        yield playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])


def wait_for(page: Page, expression: str) -> None:
    """Wait until an expression is true; `wait_for_function` is stopped by the page's policy."""
    for _ in range(1200):
        if page.evaluate(expression):
            return
        page.wait_for_timeout(50)
    pytest.fail(f"not true within a minute: {expression}")


def problems_of(page: Page) -> list[str]:
    """Return the list to which errors, warnings and dialogs of the page are appended."""
    problems: list[str] = []

    def note(message: ConsoleMessage) -> None:
        # A refused expression is a response 400, which Chromium reports by itself.
        if message.type in ("error", "warning") and "status of 400" not in message.text:
            problems.append(message.text)

    def refuse(dialog: Dialog) -> None:
        problems.append(dialog.message)
        dialog.dismiss()

    page.on("console", note)
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("dialog", refuse)
    return problems
