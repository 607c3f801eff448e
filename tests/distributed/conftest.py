from __future__ import annotations

from pathlib import Path

import pytest

from tests.models import write_tiny_model


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a tiny model, which tests do not change."""
    return write_tiny_model(tmp_path_factory.mktemp("model"))
