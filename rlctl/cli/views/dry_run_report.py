"""Report of `rlctl train … --dry-run` as tables or JSON."""

from __future__ import annotations

from dataclasses import asdict
from operator import attrgetter
from typing import TYPE_CHECKING

from rlctl.cli.console import print_json, print_table, stdout
from rlctl.cli.stderr import notice, warn
from rlctl.recipes.search_path import place
from rlctl.text import counted, plural, size

if TYPE_CHECKING:
    from rlctl.recipes.compose import Recipe
    from rlctl.runtime.planning.dry_run import DryRun


def show(
    recipe: Recipe,
    *,
    inline: bool,
    strict: bool,
    as_json: bool,
    start: str = "the same command without --dry-run",
) -> None:
    """Print the report; `start` starts the run. Raises all problems at once."""
    from rlctl.runtime.planning.early_checks import check_early

    check_early(recipe)
    from rlctl.runtime.planning.dry_run import dry_run

    report = dry_run(recipe, inline=inline, strict=strict)
    if as_json:
        print_json({"ok": True, "problems": [], **asdict(report)})
        return
    _print(report)
    for line in report.idle:
        warn(line)
    for pool, peak in report.pool_peaks.items():
        if report.device_memory is not None and peak > report.device_memory:
            warn(
                f"pool {pool} needs about {size(peak)} per device, "
                f"but a device has {size(report.device_memory)}"
            )
    notice(f"no errors: {start} starts the run")


def _print(report: DryRun) -> None:
    _print_changes(report)
    _print_placement(report)
    _print_batches(report)
    _print_memory(report)
    _print_rest(report)


def _print_changes(report: DryRun) -> None:
    from rlctl.recipes.key_reference import as_text

    _heading(f"Changed by {report.recipe} and the command line")
    rows = [(change.key, as_text(change.value), place(change.where)) for change in report.changed]
    print_table(["key", "value", "from"], rows)


def _print_placement(report: DryRun) -> None:
    _heading("Placement")
    rows = [
        (row.role, row.pool, str(row.processes), row.device, str(row.threads), row.strategy)
        for row in report.placement
    ]
    columns = ["role", "pool", "processes", "device", "threads", "strategy"]
    print_table(columns, rows, right=["processes", "threads"])


def _print_batches(report: DryRun) -> None:
    batches = report.batches
    _heading("Batches")
    dropped = f"{batches.dropped_prompts} dropped as too long"
    training = f"{batches.train_prompts} for training"
    lengths = f"mean length {batches.mean_prompt_length:.0f}, {dropped}"
    steps = [
        ("prompts", f"{training} ({lengths}), {batches.val_prompts} for validation"),
        (
            "a step",
            f"{plural(batches.prompts, 'prompt')} × "
            f"{plural(batches.answers_a_prompt, 'response')} = {plural(batches.rows, 'row')}",
        ),
        ("steps", f"{batches.total_steps} ({batches.steps_per_epoch} an epoch)"),
    ]
    if batches.skipped_rows:
        steps.insert(-1, ("skipped", counted(batches.skipped_rows)))
    print_table(["quantity", "value"], steps)
    updates = [
        (
            row.role,
            f"{row.mini_batches} × {plural(row.rows, 'row')}",
            str(row.rows_a_rank),
            f"{row.micro_batches_half} to {row.micro_batches_full}",
            str(row.epochs),
            str(row.updates),
        )
        for row in batches.updates
    ]
    columns = ["role", "mini-batches", "rows a rank", "micro-batches", "epochs", "updates a step"]
    print_table(columns, updates)
    stdout().print(
        "micro-batches: for responses of half the allowed length, and of the full length",
        style="dim",
    )


def _print_rest(report: DryRun) -> None:
    disk = report.disk
    _heading("Also")
    checkpoint = "size unknown"
    if disk.checkpoint is not None:
        checkpoint = size(disk.checkpoint)
    rows = [
        (
            "checkpoint",
            f"{checkpoint} × {disk.num_checkpoints}; {size(disk.free)} free",
        ),
        ("trackers", ", ".join(report.trackers) or "none"),
        (
            "reward",
            f"{', '.join(report.reward_functions)}: called on {plural(report.reward_rows, 'row')}",
        ),
        ("prompt", repr(report.prompt)),
    ]
    print_table(["item", "value"], rows)


def _print_memory(report: DryRun) -> None:
    columns = [
        "parameters",
        "moments",
        "gathered",
        "gradients",
        "activations",
        "logits",
        "engine.weights",
        "engine.cache",
        "engine.graphs",
        "peak",
    ]
    rows = [
        (role.role, f"{role.num_parameters:,}", *map(size, attrgetter(*columns)(role)))
        for role in report.memory
    ]
    _heading("Memory of one device, estimated")
    names = [name.replace(".", " ") for name in columns]
    print_table(["role", "numbers", *names], rows, right=["numbers", *names])
    for pool, peak in report.pool_peaks.items():
        parts = [f"pool {pool}: {size(peak)} at its peak"]
        if overhead := report.overheads[pool]:
            parts.append(f"with {size(overhead)} for CUDA and NCCL")
        if report.device_memory:
            parts.append(f"of {size(report.device_memory)}")
        stdout().print(", ".join(parts))
    if report.host:
        of = "for offloaded state and the copy of a checkpoint; mapped files do not count"
        stdout().print(f"host memory of a node: {size(report.host)} {of}")


def _heading(text: str) -> None:
    stdout().print(f"\n{text}", style="bold")
