"""Rungs of steps: PPO and GRPO at the shape of Qwen2.5-0.5B, by phase.

Two steps of 256 responses of at most 512 tokens, as verl's example of PPO on GSM8K. The weights are
random, so that nearly all responses have the longest length; scores do not matter. The second step
counts: kernels are loaded in the first. With Ray where it is installed, whose workers draw the
weights on a CPU, else in this process.
"""

from __future__ import annotations

import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import rlctl
from benchmarks.child import metric_rows
from benchmarks.gpu.recorder import Recorder, Settings
from benchmarks.gpu.shapes import built_on, write_config
from benchmarks.gpu.work import ACTOR, release
from benchmarks.gpu.work import settings as model_settings
from benchmarks.memory import PEAK_METRIC
from rlctl.recipes.compose import compose
from rlctl.runtime.planning.plan import Plan, make_plan
from rlctl.runtime.rollout.auto import load_engine

SHAPE = "Qwen2.5-0.5B"
PHASES = ("gen", "update_weights", "old_log_prob", "ref", "values", "update_critic", "update_actor")
_NEEDED_S = {True: 60.0, False: 180.0}  # inline, on Ray


def measure(settings: Settings, recorder: Recorder) -> None:
    """Measure a step of each algorithm."""
    for recipe in ("ppo", "grpo"):
        _measure(recipe, recipe, settings, recorder)


def lora(settings: Settings, recorder: Recorder) -> None:
    """Measure a step of GRPO with adapters."""
    _measure("grpo, LoRA", "grpo", settings, recorder, "actor_rollout_ref.model.lora_rank=16")


def _measure(
    name: str, recipe: str, settings: Settings, recorder: Recorder, *overrides: str
) -> None:
    inline = find_spec("ray") is None
    if not settings.tiny and not recorder.enough(name, _NEEDED_S[inline]):
        return
    with recorder.attempt(name), tempfile.TemporaryDirectory() as folder:
        shape = write_config(Path(folder), SHAPE, settings.tiny)
        every = [*_overrides(recipe, settings, shape, Path(folder)), *overrides]
        plan = make_plan(compose(recipe, every), inline=inline)
        engine = load_engine(plan.config.actor_rollout_ref.rollout.name, settings.device)
        with built_on(settings.device):
            run = rlctl.train(recipe, every, inline=inline)
        facts = {"engine": engine.__name__, "planned_gib": planned_gib(plan)}
        _write(name, metric_rows(Path(run.path))[-1], facts, recorder)
    release(settings.device)


def _overrides(recipe: str, settings: Settings, shape: Path, folder: Path) -> list[str]:
    """Return 256 responses a step in four mini-batches; fewer and shorter ones if tiny."""
    rows, length = (16, 16) if settings.tiny else (256, 512)
    n = 8 if recipe == "grpo" else 1
    critic = [
        f"critic.model.path={shape}",
        "critic.model.init=random",
        "critic.model.dtype=bf16",
        "critic.model.enable_gradient_checkpointing=true",
        f"critic.ppo_mini_batch_size={rows // 4}",
        "trainer.critic_warmup=0",
    ]
    return model_settings(
        shape,
        settings.device,
        *(critic if recipe == "ppo" else ()),
        "actor_rollout_ref.model.dtype=bf16",
        "actor_rollout_ref.model.enable_gradient_checkpointing=true",
        "trainer.n_gpus_per_node=1",
        f"actor_rollout_ref.rollout.n={n}",
        f"{ACTOR}.ppo_mini_batch_size={rows // n // 4 or 1}",
        f"data.train_batch_size={rows // n}",
        f"data.max_response_length={length}",
        f"trainer.run_dir={folder}",
        f"trainer.experiment_name={recipe}",
        "trainer.total_training_steps=2",
        "trainer.val_before_train=false",
        "trainer.test_freq=-1",
        "trainer.save_freq=-1",
    )


def _write(name: str, row: dict[str, Any], facts: dict[str, Any], recorder: Recorder) -> None:
    """Write the phases of a step, and its memory."""
    recorder.row(
        "steps",
        recipe=name,
        **facts,
        step_s=row["timing_s/step"],
        **{f"{name}_s": row.get(f"timing_s/{name}") for name in PHASES},
        tokens_per_s=row["perf/throughput"],
        mean_response=row["response_length/mean"],
        mfu_percent=_percent(row.get("perf/mfu/actor")),
        probs_diff_mean=row["training/rollout_probs_diff_mean"],
        peak_gib=row.get(PEAK_METRIC),
    )


def _percent(share: float | None) -> float | None:
    return None if share is None else 100 * share


def planned_gib(plan: Plan) -> float:
    """Return the memory that the plan expects on the device: `held` of all, one role's passes."""
    known = plan.memory.known()
    most = sum(each.held for each in known) + max(each.passing for each in known)
    return most / 2**30
