"""Limits of processes that run users' code."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from rlctl.recipes.schema.fields import PositiveFloat, Section


class ProcessLimits(Section):
    """Limits of each process that runs rewards, tools or environments."""

    memory_gb: PositiveFloat | None = Field(
        description="memory in GiB; null = the machine's memory / their number"
    )
    file_gb: PositiveFloat = Field(description="size of a file that it writes, in GiB")
    open_files: Annotated[int, Field(ge=16)] = Field(description="open files and sockets")
