"""Python API: what the `rlctl` command does, as functions. `import rlctl` offers all of them.

    import rlctl
    run = rlctl.train("ppo", ["trainer.total_training_steps=2"], inline=True)
    print(run.path, run.history()[-1]["critic/score/mean"])

Functions raise the errors of `rlctl.errors` and print nothing; the logger `rlctl` gets remarks.
"""

from __future__ import annotations

import dataclasses
import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from rlctl import plugins
from rlctl.causes import raising_rlctl_errors
from rlctl.errors import UsageError

if TYPE_CHECKING:
    from rlctl.recipes.layers import Recipe
    from rlctl.runs.run import Run
    from rlctl.runs.run_comparison import Comparison
    from rlctl.runtime.evaluate import Answer
    from rlctl.runtime.launch import OnEnd
    from rlctl.runtime.planning.plan import Plan
    from rlctl.runtime.start import StartPlan
    from rlctl.runtime.training.validation import Validation
    from rlctl.sweeps.results import SweepResult
    from rlctl.sweeps.sweep_launch import View
    from rlctl.sweeps.sweep_record import SweepDir

LOG = logging.getLogger(__name__)

Overrides = Sequence[str] | Mapping[str, Any]  # texts as on a command line, or values by key
State = Literal["starting", "running", "finished", "failed", "stopped", "lost", "broken"]


def compose(recipe: str | Path = "ppo", overrides: Overrides = ()) -> Recipe:
    """Compose a recipe, by name or file, with overrides, and validate it.

    They are texts in Hydra's grammar, or a mapping from keys, with dots or in sections, to values.

    Raises NotFoundError for an unknown recipe and ConfigError with all problems of its values.

        rlctl.compose("ppo", ["trainer.total_epochs=1"]).config.trainer.total_epochs  # 1
        rlctl.compose("ppo", {"trainer.total_epochs": 1})  # the same
    """
    from rlctl.recipes.compose import compose

    return compose(recipe, _texts(overrides))


@raising_rlctl_errors()
def train(
    recipe: str | Path | Recipe = "ppo",
    overrides: Overrides = (),
    *,
    name: str | None = None,
    logger: str | Sequence[str] | None = None,
    reward: Callable[..., Any] | None = None,
    inline: bool = False,
    strict: bool = False,
    progress: bool = False,
    end_by: float | None = None,
    on_end: OnEnd | None = None,
) -> Run:
    """Train a model and return its run; `trainer.resume_mode` may make it resume an earlier one.

    `name` is that of the run, `logger` names trackers beside the console, `reward` is a function
    with the signature of verl's `compute_score`. `inline` runs in this process, without Ray.
    `strict` refuses keys that have no effect. `progress` prints the console tracker's lines; in a
    notebook it shows one block. `end_by`, a time of `time.monotonic`, saves and stops the run in
    time. `on_end` is called with the run, its final state and its seconds.

        run = rlctl.train("ppo", {"trainer.total_training_steps": 2}, name="first", inline=True)
        run.state  # "finished"
    """
    from rlctl.recipes.unused_keys import report_unused_keys
    from rlctl.runtime.planning.early_checks import check_early, resumed_run

    texts = _texts(overrides, name=name, logger=logger, reward=reward)
    composed = compose(recipe, texts) if isinstance(recipe, str | Path) else recipe
    if texts and composed is recipe:
        raise UsageError("a composed recipe takes no overrides", hint="give them to rlctl.compose")
    if (run := resumed_run(composed.config.trainer)) is None:
        check_early(composed)
    else:
        from rlctl.runtime.planning.early_resume import check_resume

        check_resume(run, composed)
    from rlctl.runtime.start import plan_new, prepare_start

    prepare_start(composed, inline)
    plan = plan_new
    if run is not None or composed.config.trainer.resume_mode == "resume_path":
        from rlctl.runtime.resume import plan_restart as plan
    planned = plan(composed, inline)
    for line in report_unused_keys(composed, planned.plan.roles, strict=strict):
        LOG.warning(line)
    trainer = composed.config.trainer
    folder = Path(trainer.run_dir) / trainer.project_name / (trainer.experiment_name or "")
    return _run(planned, folder, progress, end_by, on_end)


@raising_rlctl_errors()
def resume(
    run: str | Path | Run = "@last",
    overrides: Overrides = (),
    *,
    from_step: int | None = None,
    fork: str | None = None,
    force: bool = False,
    inline: bool = False,
    progress: bool = False,
    end_by: float | None = None,
    on_end: OnEnd | None = None,
    root: Path | None = None,
) -> Run:
    """Resume a run from its latest complete checkpoint, or from that of `from_step`.

    `fork` starts a new run of that name from the checkpoint; `force` accepts changes of settings or
    data that make it a different run. A finished run is returned as it is, unless `overrides` make
    it longer. Other arguments are those of `train` and `open_run`.

        rlctl.resume("@last", ["trainer.total_training_steps=4"], inline=True)
    """
    from rlctl.runtime.planning.early_resume import check_resume, compose_resumed

    folder = _run_of(run, root).path
    composed = compose_resumed(folder, _texts(overrides), fork)
    check_resume(folder, composed, from_step, fork, force)
    from rlctl.runtime.resume import ResumeOptions, plan_resume
    from rlctl.runtime.start import prepare_start

    prepare_start(composed, inline)
    planned = plan_resume(folder, composed, ResumeOptions(from_step, fork, force, inline))
    return _run(planned, folder, progress, end_by, on_end)


@raising_rlctl_errors()
def evaluate(
    target: str | Path | Run = "@last",
    overrides: Overrides = (),
    *,
    recipe: str | Path = "ppo",
    step: int | None = None,
    root: Path | None = None,
) -> Validation:
    """Generate and score responses to the validation prompts; write nothing.

    `target` is a run (its checkpoint of `step`, the latest by default, with its settings and
    data) or a model folder or `quickstart` (with the settings of `recipe`).

        validation = rlctl.evaluate("@last", ["data.val_max_samples=8"])
        validation.metrics, validation.samples[0].response
    """
    from rlctl.runtime.evaluate import evaluate
    from rlctl.runtime.planning.evaluation import target_config

    return evaluate(target_config(target, _texts(overrides), recipe, step, root))


@raising_rlctl_errors()
def generate(
    target: str | Path | Run,
    prompts: Sequence[str],
    overrides: Overrides = (),
    *,
    n: int = 1,
    temperature: float = 0.0,
    max_tokens: int | None = None,
    seed: int = 0,
    images: Sequence[str | bytes] = (),
    recipe: str | Path = "ppo",
    step: int | None = None,
    root: Path | None = None,
) -> list[Answer]:
    """Generate `n` responses to each prompt through the chat template of the model.

    Temperature 0 is greedy. Each prompt has all `images`, files or their content, which it may
    refer to by `<image>`. `target`, `recipe`, `step` and `root` are those of `evaluate`.

        rlctl.generate("quickstart", ["Tom has 2 apples and buys 3. How many has he?"])[0].text
    """
    from rlctl.runtime.evaluate import answer
    from rlctl.runtime.planning.evaluation import target_config

    sampling = {"n": n, "temperature": temperature, "do_sample": str(temperature > 0).lower()}
    settings = [
        f"actor_rollout_ref.rollout.val_kwargs.{key}={value}" for key, value in sampling.items()
    ]
    if max_tokens:
        settings.append(f"data.max_response_length={max_tokens}")
    config = target_config(target, [*settings, *_texts(overrides)], recipe, step, root)
    return answer(config, prompts, seed, images)


def sweep(
    recipe: str | Path = "ppo",
    overrides: Sequence[str] = (),
    *,
    verb: str = "ppo",
    view: View | None = None,
) -> SweepResult:
    """Train with several settings on one Ray cluster and return the trials, best first.

    Overrides with several values (`key=1,2`, `key=interval(0,1)`) are searched; `sweep.*` keys set
    sampler, number of trials and metric. `verb` is the command of the trials, `rlctl train VERB`.
    `view` is called with the study and all runs after each change.

        trials = rlctl.sweep("ppo", ["actor_rollout_ref.actor.optim.lr=1e-5,1e-4"]).trials
        trials[0].overrides, trials[0].value
    """
    from rlctl.sweeps.results import results
    from rlctl.sweeps.sweep_plan import make_sweep_plan

    plan = make_sweep_plan(verb, str(recipe), overrides)
    from rlctl.sweeps import sweep_launch

    return results(sweep_launch.start(plan, view or (lambda *_: None)))


def resume_sweep(sweep: SweepDir, *, view: View | None = None) -> SweepResult:
    """Resume unfinished trials.

    Raises ConflictError if the sweep is running or its recipe has changed.
    """
    from rlctl.sweeps import sweep_launch
    from rlctl.sweeps.results import results

    return results(sweep_launch.resume(sweep, view or (lambda *_: None)))


def open_run(run: str | Path = "@last", root: Path | None = None) -> Run:
    """Return a run by name or a prefix of it, folder, id, `@last`, `@failed` or `@best:METRIC`.

    `root` is the folder of all runs, `runs` by default. Raises NotFoundError, or UsageError if
    several runs match.

        run = rlctl.open_run("@last")
        run.state, run.history(), run.samples()
    """
    from rlctl.runs.store import RunStore

    return RunStore(root).find(str(run))


def list_runs(
    root: Path | None = None,
    *,
    state: State | None = None,
    where: str | None = None,
    sort: str | None = None,
    number: int | None = None,
) -> list[Run]:
    """Return runs, active and newest first, with the filters of `rlctl runs`.

        rlctl.list_runs(where="best(val-core/gsm8k/acc/mean@1) > 0.5", sort="-best")

    Raises UsageError for an expression that cannot be read.
    """
    from rlctl.runs.listing import RunQuery
    from rlctl.runs.store import RunStore

    return list(RunQuery(state, where, sort, None, number).page(RunStore(root).runs()).runs)


def compare(
    runs: Sequence[str | Path | Run], *, changed: bool = False, root: Path | None = None
) -> Comparison:
    """Compare the settings of two or more runs, and their metrics at the same step.

    `changed` keeps only what differs. Raises UsageError for fewer than two different runs.

        rlctl.compare(["ppo-a", "ppo-b"], changed=True).settings
    """
    from rlctl.runs.run_comparison import compare, distinct

    found = distinct([_run_of(run, root) for run in runs])
    if len(found) < 2:
        raise UsageError("compare takes two different runs or more", hint="`rlctl runs` lists them")
    return compare(found, changed)


def find_run_or_sweep(selector: str, root: Path | None = None) -> Run | SweepDir:
    """Return the sweep that `selector` names, or else the run. Errors as of `open_run`."""
    from rlctl.runs.store import RunStore
    from rlctl.sweeps.sweep_record import find_sweep, names_sweep

    store = RunStore(root)
    if names_sweep(store.root, selector):
        return find_sweep(store.root, selector)
    return store.find(selector)


def _run(
    planned: StartPlan, folder: Path, progress: bool, end_by: float | None, on_end: OnEnd | None
) -> Run:
    """Log where the run starts from, train it, and return it as the registry shows it."""
    from rlctl.runs.run import read_run
    from rlctl.runtime.launch import train

    start = planned.start
    num_steps = planned.plan.num_steps
    if planned.finished:
        run = read_run(folder)
        step = (run.record and run.record.total_steps) or num_steps
        state = f"has already finished its {num_steps} step{'s' * (num_steps != 1)}"
        if step > num_steps:
            state = f"is at step {step}, after the end at step {num_steps}"
        more = f"trainer.total_training_steps={step * 2} trains on"
        LOG.info("%s %s: %s", folder.name, state, more)
        return run
    for line in planned.warnings:
        LOG.warning(line)
    for line in (*(f"changed: {change}" for change in planned.changes), *planned.notes):
        LOG.info(line)
    if start is not None:
        words = f"{planned.plan.config.trainer.experiment_name or 'the new run'} starts"
        where = "the beginning: it has no checkpoint"
        if start.checkpoint is not None:
            where = f"step {start.step} of {num_steps}"
            if start.run is not None:
                words = f"{folder.name} resumes"
        LOG.info("%s from %s", words, where)
    plan = planned.plan
    if not progress or "ipykernel" in sys.modules:
        plan = _without_console(plan, progress)
    return read_run(train(plan, start, end_by, on_end).path)


def _without_console(plan: Plan, progress: bool) -> Plan:
    """Return the plan without the tracker that prints; the stored configuration keeps it.

    With `progress`, another tracker shows the run in a notebook.
    """
    trainer = plan.config.trainer
    logger = [name for name in trainer.logger if name != "console"]
    if progress:
        points = plugins.entry_points_of("python_api")
        logger += [point.value for point in points if point.name == "progress"]
    quiet = trainer.model_copy(update={"logger": logger})
    return dataclasses.replace(plan, config=plan.config.model_copy(update={"trainer": quiet}))


def _run_of(run: str | Path | Run, root: Path | None) -> Run:
    return open_run(run, root) if isinstance(run, str | Path) else run


def _texts(overrides: Overrides, **more: Any) -> Sequence[str]:
    """Return overrides as texts, with those of other arguments."""
    if isinstance(overrides, Mapping) or any(value is not None for value in more.values()):
        from rlctl.recipes.python_values import override_texts

        return override_texts(overrides, **more)
    return overrides
