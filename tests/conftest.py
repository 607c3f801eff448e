from __future__ import annotations

import tempfile
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="session", autouse=True)
def temporary_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What processes that tests start and kill leave behind goes with the tests. Sockets in it may have 107 characters, so it is short."""
    tmp_path_factory.getbasetemp()  # pytest's own stays where it is
    with (
        tempfile.TemporaryDirectory(prefix="t-", ignore_cleanup_errors=True) as folder,
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setenv("TMPDIR", folder)
        yield
