"""Values of the next trial of a study, drawn apart from its file.

They are stored together: a process that is killed while it draws leaves no part of a trial.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from optuna import Study
    from optuna.distributions import BaseDistribution


def draw(study: Study, space: Mapping[str, BaseDistribution]) -> dict[str, Any]:
    """Return what the sampler of `study` draws next, and leave both unchanged."""
    from optuna import create_study

    apart = create_study(
        study_name=study.study_name,
        directions=study.directions,
        sampler=deepcopy(study.sampler),
        pruner=study.pruner,
    )
    apart.add_trials(study.get_trials(deepcopy=False))
    return apart.ask(dict(space)).params
