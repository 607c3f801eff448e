"""A board of the runs in `root`, which each file makes, and a browser that looks at it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.plugins.console.board.serving import Served, serving

if TYPE_CHECKING:  # other tests of the board need no browser
    from playwright.sync_api import BrowserContext, Page


@pytest.fixture(scope="module")
def board(root: Path) -> Iterator[Served]:
    with serving(root) as served:
        yield served


@pytest.fixture(scope="module")
def context() -> Iterator[BrowserContext]:
    """One for all tests of a file: it keeps the compiled scripts."""
    from tests.browser import chromium

    with chromium() as browser:
        yield browser.new_context()


@pytest.fixture
def page(context: BrowserContext) -> Iterator[Page]:
    """A page that must not cause an error, a warning or a dialog of the browser."""
    from playwright.sync_api import expect

    from tests.browser import problems_of

    page = context.new_page()
    page.set_viewport_size({"width": 1300, "height": 900})
    page.set_default_timeout(60_000)
    expect.set_options(timeout=60_000)
    problems = problems_of(page)
    yield page
    page.close()
    assert problems == []
