"""Trial of a new recipe: ten rows, answered by the model that is going to be trained."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from rlctl.cli.startup import announce
from rlctl.cli.stderr import notice, warn
from rlctl.errors import RlctlError
from rlctl.text import plural

if TYPE_CHECKING:
    from rlctl.recipes.schema import Config
    from rlctl.tracking.tracker import Sample

NUM_ROWS = 10
NUM_RESPONSES = 4
LIMIT_S = 60
MAX_BYTES = 2 * 2**30  # weights that a CPU runs in that time
_SHOWN = 160  # characters of a response


@dataclass(frozen=True)
class Trial:
    """Figures of a trial, or the reason why there was none."""

    rows: int = 0
    responses: int = 0
    mean_score: float | None = None
    rows_with_score: int = 0
    truncated: int = 0
    skipped: str | None = None


class _TimeIsUp(BaseException):
    """The trial takes too long."""


def run_trial(recipe: Path) -> Trial:
    """Score responses of the recipe's model to its first validation rows; report on stderr.

    They are sampled as in training. A trial that fails or takes more than a minute is skipped: the
    project is complete without it.
    """
    announce(f"trying the model on {NUM_ROWS} rows, {LIMIT_S} s at most (--no-try skips it)")
    try:
        with _limited(LIMIT_S):
            config = _config(recipe)
            reason = _reason(config)
            if reason is None:
                from rlctl.runtime.evaluate import evaluate

                return report(evaluate(config).samples, config.data.max_response_length)
    except _TimeIsUp:
        reason = f"it took more than {LIMIT_S} s"
    except RlctlError as error:
        reason = error.problems[0].message
    notice(f"not tried: {reason}")
    return Trial(skipped=reason)


def _config(recipe: Path) -> Config:
    from rlctl.recipes.compose import compose
    from rlctl.runtime.planning.model_paths import with_models

    kwargs = "actor_rollout_ref.rollout.val_kwargs"
    settings = [
        f"data.val_max_samples={NUM_ROWS}",
        f"{kwargs}.n={NUM_RESPONSES}",
        f"{kwargs}.do_sample=true",
        f"{kwargs}.temperature=1.0",
        "actor_rollout_ref.rollout.name=hf",
        "trainer.n_gpus_per_node=1",
    ]
    return with_models(compose(str(recipe), settings).config)


def _reason(config: Config) -> str | None:
    """Return why the model cannot be tried here, or None."""
    from rlctl.runtime.cluster.nvidia import visible_gpus
    from rlctl.runtime.model.hf_files import weight_files

    model = config.actor_rollout_ref.model
    files = weight_files(model)
    if not files or not all(file.is_file() for file in files):
        return f"{model.path} is not on this machine"
    size = sum(file.stat().st_size for file in files)
    if size > MAX_BYTES and not visible_gpus():
        return f"{size / 2**30:.1f} GiB of weights are too slow on a CPU"
    return None


def report(samples: Sequence[Sample], max_length: int) -> Trial:
    """Return the figures of the samples, and print them with what stands out."""
    scores = [sample.score for sample in samples]
    groups = [
        scores[start : start + NUM_RESPONSES] for start in range(0, len(scores), NUM_RESPONSES)
    ]
    trial = Trial(
        rows=len(groups),
        responses=len(scores),
        mean_score=sum(scores) / len(scores),
        rows_with_score=sum(max(group) > 0 for group in groups),
        truncated=sum(sample.finish == "length" for sample in samples),
    )
    notice(
        f"tried the model before training: {plural(trial.responses, 'response')} to "
        f"{plural(trial.rows, 'row')} score {trial.mean_score:.3g} on average, "
        f"{trial.rows_with_score} of {trial.rows} rows have one above 0"
    )
    if len(set(scores)) == 1:
        first = samples[0]
        shown = " ".join(first.response.split())[:_SHOWN]
        warn(
            f"all of them score {scores[0]:g}, and from equal scores nothing is learned. The first "
            f"response is {shown!r}, the right answer {first.ground_truth!r}. Check that the model "
            "can solve such problems, and that prompts ask for the form that reward.py expects"
        )
    if 2 * trial.truncated > trial.responses:
        warn(
            f"{trial.truncated} of {trial.responses} responses were cut off at {max_length} "
            "tokens: data.max_response_length"
        )
    if failed := sum(sample.failed for sample in samples):
        warn(f"the reward function failed on {failed} of {trial.responses} responses")
    return trial


@contextmanager
def _limited(seconds: int) -> Iterator[None]:
    """Raise `_TimeIsUp` in the block after some seconds; in the main thread only."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(_number: int, _frame: FrameType | None) -> None:
        raise _TimeIsUp

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
