"""Fixtures for all tests."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator

import pytest

import rlctl.runtime  # noqa: F401  # collects less often while the tests import


@pytest.fixture(scope="session", autouse=True)
def temporary_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Set TMPDIR to a folder that is deleted after the tests.

    Its path is short because that of a socket is limited to 107 characters.
    """
    tmp_path_factory.getbasetemp()  # create pytest's folder outside
    with (
        tempfile.TemporaryDirectory(prefix="t-", ignore_cleanup_errors=True) as folder,
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setenv("TMPDIR", folder)
        yield
