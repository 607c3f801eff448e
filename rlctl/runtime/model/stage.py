"""Parameters of all stages of a pipeline, of which a rank may have one; or of the whole model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from torch import Tensor, nn

if TYPE_CHECKING:
    from rlctl.runtime.model.pipeline_parallel import Stage

ATTRIBUTE = "pipeline_stage"  # of modules


def stage_of(module: nn.Module) -> Stage | None:
    """Return the stage that a model, or the transformers model in it, has; None for the whole."""
    return getattr(module, ATTRIBUTE, None)


def of_all_stages(
    module: nn.Module,
    parameters: Iterator[tuple[str, Tensor]],
    name_of: Callable[[str], str | None],
) -> Iterator[tuple[str, Tensor]]:
    """Yield full tensors (N, ...) of all stages, one at a time, and then `saved_buffers`.

    `parameters` yields those of this stage, in its order; `name_of` maps the name of a parameter
    or buffer to that of its tensor, or to None if it has none. Collective.
    """
    stage = stage_of(module)
    if stage is None:
        yield from parameters
    else:
        from rlctl.runtime.model.pipeline_parallel import all_stages

        yield from all_stages(module, stage, parameters, name_of)
    for name, value in saved_buffers(module).items():
        if (given := name_of(name)) is not None:
            yield given, value


def saved_buffers(module: nn.Module) -> dict[str, Tensor]:
    """Return the buffers (N, ...) that a model's files contain, those of all stages, by name.

    Training does not change them. One is the bias with which routers of GLM-4.5 choose experts.
    """
    if (stage := stage_of(module)) is not None:
        return stage.buffers
    return {
        name: value
        for path, part in module.named_modules()
        for name, value in part.named_buffers(path, recurse=False)
        if name.rpartition(".")[2] not in part._non_persistent_buffers_set
    }


def parameter_names(module: nn.Module) -> list[str]:
    """Return the names of the parameters of all stages of a model, or of the whole."""
    stage = stage_of(module)
    if stage is not None:
        return list(stage.parameters)
    return [name for name, _ in module.named_parameters()]
