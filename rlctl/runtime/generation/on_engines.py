"""Base of generators that ask the engines of the run."""

from __future__ import annotations

from rlctl.runtime.base.roles import Generator, Published
from rlctl.runtime.generation.policy_engines import Engines


class OnEngines(Generator):
    """Base of generators whose weights are those of their `engines`."""

    def __init__(self, engines: Engines) -> None:
        self.engines = engines

    def update_weights(self) -> None:
        self.engines.update_weights()

    def publish_weights(self) -> Published:
        return self.engines.publish_weights()
