"""Key of W&B in a netrc file, found as W&B finds it."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlctl.tracking.netrc_key import netrc_key

URL = "https://api.wandb.ai"


@pytest.mark.parametrize("name", [".netrc", "_netrc", "elsewhere"])
def test_the_entry_of_the_host_is_found(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("NETRC", raising=False)
    if name == "elsewhere":
        monkeypatch.setenv("NETRC", str(tmp_path / name))
    assert netrc_key(URL) is None
    entry = "machine api.wandb.ai\n  login user\n  password k123\n"
    (tmp_path / name).write_text(f"{entry}machine localhost:8080\n  login user\n  password k8\n")
    assert netrc_key(URL) == "k123"
    assert netrc_key("http://localhost:8080") == "k8"
    assert netrc_key("http://localhost:8081") is None


def test_a_file_that_cannot_be_read_has_no_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NETRC", str(tmp_path))
    assert netrc_key(URL) is None
    (tmp_path / "broken").write_text("machine\n\n'")
    monkeypatch.setenv("NETRC", str(tmp_path / "broken"))
    assert netrc_key(URL) is None
