"""Choice of a source whose rollouts are ahead of learning."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlctl.runtime.training.rollout_source import CollectionSetup, RolloutSource

if TYPE_CHECKING:
    from rlctl.runtime.training.trainer import RunContext, TrainerState


def source_ahead(
    context: RunContext, state: TrainerState, collection: CollectionSetup
) -> RolloutSource:
    """Return the eager source if the run has a stream, and else one that is a step ahead."""
    if context.stream is None:
        from rlctl.runtime.training.one_step_ahead import OneStepAhead

        return OneStepAhead(collection, in_thread=context.engines_apart)
    from rlctl.runtime.training.eager import Eager

    return Eager(
        collection,
        context.stream,
        seed=context.sampling_seed,
        max_staleness=context.max_staleness,
        step=state.step,
        state=state.stream,
    )
