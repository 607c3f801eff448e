"""Evaluation on tasks of lm-evaluation-harness (package `lm_eval`), in this process."""

from __future__ import annotations

import math
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from importlib import import_module
from numbers import Real
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import constants

from rlctl.causes import as_rlctl_error
from rlctl.errors import (
    ConfigError,
    MissingExtraError,
    NotFoundError,
    Problem,
    ResourceError,
    RlctlError,
    raise_problems,
)
from rlctl.hub import hub_answers
from rlctl.plugins.console.lm_eval.task_scores import TaskArguments
from rlctl.recipes import schema
from rlctl.recipes.role_table import ACTOR
from rlctl.runtime.base.budget import is_oom
from rlctl.runtime.data.tokenizer import tokenizer_of
from rlctl.runtime.evaluate import generating_algorithm
from rlctl.runtime.model.load import compute_dtype
from rlctl.runtime.planning.devices import inline_rank_info
from rlctl.runtime.planning.preflight import read_model_config
from rlctl.storage import local
from rlctl.suggest import nearest, question

_MODEL_TYPE = "huggingface"  # lm-eval's class of models that transformers loads
_CPU_BATCH = 8  # rows; on a GPU lm-eval finds the largest batch that fits
# The HTTP library changes with the hub's client, so the errors of the system are looked for.
_NO_NETWORK = (ConnectionError, TimeoutError, socket.gaierror)
_NUM_LISTED = 5  # tasks of a folder in a hint


@dataclass(frozen=True)
class TaskScore:
    """Metric of a task or group; `filter` extracts the final text. None: lm-eval has no number."""

    task: str
    metric: str
    filter: str
    value: float | None
    stderr: float | None
    num_fewshot: int | None
    num_samples: int | None


def evaluate_tasks(config: schema.Config, options: TaskArguments) -> list[TaskScore]:
    """Return the metrics of the policy of `config` on tasks, by lm-eval's model class.

    It uses the device, dtype and threads of the run. Output of lm-eval goes to stderr. Raises
    NotFoundError for unknown tasks, ResourceError for data that cannot be downloaded,
    MissingExtraError for packages of single tasks, and ConfigError for other errors of tasks.
    """
    generating_algorithm(config)
    model = ACTOR.model(config)
    rank = inline_rank_info(config.trainer)
    read_model_config(model, f"{ACTOR.model_key}.path")
    arguments: dict[str, Any] = {
        **model.override_config,
        "pretrained": local(model.path),
        "dtype": compute_dtype(model, rank.device),
        "trust_remote_code": model.trust_remote_code,
    }
    if options.chat_template:
        arguments["tokenizer"] = tokenizer_of(model)
        arguments["chat_template_args"] = config.data.apply_chat_template_kwargs
    elif model.tokenizer_path is not None:
        arguments["tokenizer"] = local(model.tokenizer_path)
    torch.set_num_threads(rank.num_threads)
    with redirect_stdout(sys.stderr), _cache_if_offline():
        with _explained("load lm-eval"):
            lm_eval = import_module("lm_eval.evaluator")
            manager = lm_eval.TaskManager(
                include_path=options.folder, metadata={"pretrained": arguments["pretrained"]}
            )
        _check_names(manager, options)
        tasks = [task for name in options.names for task in _load(manager, name)]
        with _explained(f"evaluate {', '.join(options.names)}"):
            found = lm_eval.simple_evaluate(
                model=_MODEL_TYPE,
                model_args=arguments,
                tasks=tasks,
                task_manager=manager,
                num_fewshot=options.num_fewshot,
                limit=options.limit,
                device=rank.device,
                batch_size="auto" if rank.device == "cuda" else _CPU_BATCH,
                apply_chat_template=options.chat_template,
                log_samples=False,
            )
    return list(_scores(found))


@contextmanager
def _cache_if_offline() -> Iterator[None]:
    """Let the hub's client use its cache alone if the hub does not respond: it retries for 40 s."""
    before = constants.HF_HUB_OFFLINE
    constants.HF_HUB_OFFLINE = before or not hub_answers()
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = before


def _check_names(manager: Any, options: TaskArguments) -> None:
    """Raise NotFoundError for unknown tasks, with the nearest names."""
    unknown = [name for name in options.names if name not in manager.task_index]
    if not unknown:
        return
    near = {name: nearest(name, manager.all_tasks) for name in unknown}
    others = "`python -m lm_eval ls tasks` lists lm-eval's tasks; --task-dir DIR adds yours"
    if options.folder is not None:
        places = {name: entry.yaml_path for name, entry in manager.task_index.items()}
        found = [name for name in places if _is_below(places[name], options.folder)]
        listed = ", ".join(found[:_NUM_LISTED]) or "none: a task is a YAML file with the key `task`"
        others = f"tasks in {options.folder}: {listed}"
    fix = None
    if all(near.values()):
        fixed = (near[name][0] if name in near else name for name in options.names)
        fix = (",".join(options.names), ",".join(fixed))
    raise_problems(
        [
            Problem(f"lm-eval has no task {name!r}", "--tasks", question(near[name]) or others, fix)
            for name in unknown
        ],
        NotFoundError,
    )


def _is_below(path: Path | None, folder: Path) -> bool:
    return path is not None and path.is_relative_to(folder)


def _load(manager: Any, name: str) -> list[Any]:
    """Return the group of that name, or else the task, or the tasks of a tag, with their data."""
    with _explained(f"load the task {name!r}"):
        loaded = manager.load(name)
    if (group := loaded["groups"].get(name)) is not None:
        return [group]
    return list(loaded["tasks"].values())


@contextmanager
def _explained(doing: str) -> Iterator[None]:
    """Turn the errors of the block into one of rlctl: tasks are code and templates of others."""
    try:
        yield
    except Exception as error:
        raise _explanation(doing, error) from error


def _explanation(doing: str, error: Exception) -> RlctlError:
    if (known := as_rlctl_error(error)) is not None:
        return known
    reason = (str(error).strip() or type(error).__name__).splitlines()[0]
    if any(isinstance(cause, _NO_NETWORK) for cause in _causes(error)):
        return ResourceError(
            f"cannot {doing}: its data cannot be downloaded: {reason}",
            hint="copy the cache of Hugging Face (HF_HOME) from a machine with a network, or use "
            "--task-dir DIR with tasks whose data are local files",
        )
    if isinstance(error, ImportError):
        hint = f"pip install {error.name}" if error.name else "install the package that it names"
        return MissingExtraError(f"cannot {doing}: {reason}", hint=hint)
    if isinstance(error, RuntimeError) and is_oom(error):
        return ResourceError(
            f"cannot {doing}: the memory of the device is exhausted",
            hint="-s actor_rollout_ref.model.dtype=bfloat16 halves the size of the weights",
        )
    return ConfigError(
        f"cannot {doing}: {type(error).__name__}: {reason}",
        hint="`rlctl --debug eval …` prints the traceback",
    )


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yield the error and the errors that led to it."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _scores(found: dict[str, Any]) -> Iterator[TaskScore]:
    """Yield the metrics of lm-eval's results; their keys are `metric,filter`."""
    for task, metrics in found["results"].items():
        for key, value in metrics.items():
            metric, comma, kind = key.partition(",")
            if comma and not metric.endswith("_stderr"):
                yield TaskScore(
                    task,
                    metric,
                    kind,
                    _number(value),
                    _number(metrics.get(f"{metric}_stderr,{kind}")),
                    found["n-shot"].get(task),
                    found["n-samples"].get(task, {}).get("effective"),
                )


def _number(value: object) -> float | None:
    """Return a finite number as it is; None for others and for text such as N/A."""
    return float(value) if isinstance(value, Real) and math.isfinite(value) else None
