"""`rlctl runs sync` of a run whose logger wrote offline files."""

from __future__ import annotations

from tests.plugins.console.test_sync import RunStore, run, sync  # noqa: F401

MODES = """
from noted_down import Notes

class Moded(Notes):
    apart = ()
    def start(self, run):
        self.mode, self.reason = (run.folder / "mode").read_text(), "no key"
        return super().start(run)
    @classmethod
    def preflight(cls, mode):
        return "online: key found"
"""


def test_steps_in_offline_files_are_sent_once_the_server_can_be_used(run, tmp_path):  # noqa: F811
    (tmp_path / "moded.py").write_text(MODES)
    name = "moded:Moded"
    run.finish("finished", 0)
    store = RunStore(run.path.parent.parent)
    (run.path / "mode").write_text("offline")
    assert str(sync(store.find("first"), name)).endswith("10 steps sent to offline files: no key")
    (run.path / "mode").write_text("online")
    assert sync(store.find("first"), name).num_steps == 10
    assert sync(store.find("first"), name).num_steps == 0
