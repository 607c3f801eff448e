"""Data sources that reward plug-ins declare as entry points."""

import subprocess
import sys

from rlctl import plugins
from rlctl.runtime.rewards.specs import declared_sources

LOADED = """
import sys
from rlctl.runtime.rewards.specs import declared_sources
assert declared_sources()["gsm8k"]
print(*sorted(name for name in sys.modules if name.startswith("rlctl.runtime.rewards.")))
"""


def test_sources_of_entry_points_are_those_of_the_functions() -> None:
    declared = declared_sources()
    for name in plugins.names("rewards"):
        function = plugins.load("rewards", name)
        assert sorted(declared.get(name, ())) == sorted(getattr(function, "data_sources", ())), name


def test_sources_are_found_without_an_import_of_a_reward() -> None:
    command = [sys.executable, "-c", LOADED]
    printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    assert printed.split() == [
        "rlctl.runtime.rewards.functions",
        "rlctl.runtime.rewards.specs",
    ]
