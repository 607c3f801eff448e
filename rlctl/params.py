"""Settings of plug-ins (`rlctl.plugins.Params`), apart: pydantic takes 70 ms to import."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Params(BaseModel):
    """Base class of a plug-in's settings: fields with defaults, bounds and a `description`."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, protected_namespaces=())
