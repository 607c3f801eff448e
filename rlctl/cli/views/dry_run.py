"""`rlctl train … --dry-run`: what a start would do, as tables or JSON."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

from rlctl.cli.console import print_json, stdout, table, warn
from rlctl.errors import ConfigError, RlctlError

if TYPE_CHECKING:
    from rlctl.recipes.compose import Recipe
    from rlctl.runtime.planning.dry_run import DryRun


def show(recipe: Recipe, *, inline: bool, strict: bool, as_json: bool) -> None:
    """Print the report. Whatever is wrong is a ConfigError with all problems; with `as_json` they are on stdout too."""
    from rlctl.runtime.planning.dry_run import dry_run

    try:
        report = dry_run(recipe, inline=inline, strict=strict)
    except RlctlError as error:
        if as_json:
            print_json({"ok": False, "problems": [asdict(each) for each in error.problems]})
        raise ConfigError(*error.problems) from error
    if as_json:
        print_json({"ok": True, "problems": [], **asdict(report)})
        return
    _print(report)
    for line in report.idle:
        warn(line)
    for pool, peak in report.pool_peaks.items():
        if peak > report.device_memory:
            warn(
                f"the pool {pool} needs about {_size(peak)} on each device, which has {_size(report.device_memory)}"
            )
    if (report.disk.checkpoint or 0) * report.disk.num_checkpoints > report.disk.free:
        warn(
            f"all {report.disk.num_checkpoints} checkpoints take more than the {_size(report.disk.free)} that are free"
        )


def _print(report: DryRun) -> None:
    from rlctl.recipes.reference import as_text

    out, batches, disk = stdout(), report.batches, report.disk
    _heading(f"Changed by {report.recipe} and the command line")
    out.print(
        table(
            ["key", "value", "from"],
            [(each.key, as_text(each.value), each.where) for each in report.changed],
        )
    )
    _heading("Placement")
    placed = [
        (each.role, each.pool, str(each.processes), each.device, str(each.threads), each.strategy)
        for each in report.placement
    ]
    out.print(
        table(
            ["role", "pool", "processes", "device", "threads", "strategy"],
            placed,
            right=["processes", "threads"],
        )
    )
    _heading("Batches")
    lengths = f"mean length {batches.mean_prompt_length:.0f}, {batches.dropped_prompts} dropped as too long"
    steps = [
        (
            "prompts",
            f"{batches.train_prompts} for training ({lengths}), {batches.val_prompts} for validation",
        ),
        (
            "a step",
            f"{batches.prompts} prompts × {batches.answers_a_prompt} answers = {batches.rows} rows",
        ),
        ("steps", f"{batches.total_steps} ({batches.steps_per_epoch} an epoch)"),
    ]
    out.print(table(["what", "how many"], steps))
    updates = [
        (
            each.role,
            f"{each.mini_batches} × {each.rows} rows",
            str(each.rows_a_rank),
            f"{each.micro_batches_half} to {each.micro_batches_full}",
            str(each.epochs),
            str(each.updates),
        )
        for each in batches.updates
    ]
    out.print(
        table(
            ["role", "mini-batches", "rows a rank", "micro-batches", "epochs", "updates a step"],
            updates,
        )
    )
    out.print("micro-batches: for answers half as long as allowed, and as long", style="dim")
    _print_memory(report)
    _heading("Also")
    checkpoint = "size unknown" if disk.checkpoint is None else _size(disk.checkpoint)
    also = [
        (
            "checkpoint",
            f"{checkpoint} × {disk.num_checkpoints}; {_size(disk.free)} free",
        ),
        ("trackers", ", ".join(report.trackers) or "none"),
        (
            "reward",
            f"{', '.join(report.reward_functions)}: called on {report.reward_rows} training rows",
        ),
        ("prompt", repr(report.prompt)),
    ]
    out.print(table(["what", "found"], also))


def _print_memory(report: DryRun) -> None:
    columns = [
        "parameters",
        "moments",
        "gathered",
        "engine_copy",
        "gradients",
        "activations",
        "logits",
        "kv_cache",
        "peak",
    ]
    rows = [
        (each.role, f"{each.num_parameters:,}", *(_size(getattr(each, name)) for name in columns))
        for each in report.memory
    ]
    _heading("Memory of one device, estimated")
    names = [name.replace("_", " ") for name in columns]
    stdout().print(table(["role", "numbers", *names], rows, right=["numbers", *names]))
    for pool, peak in report.pool_peaks.items():
        stdout().print(
            f"pool {pool}: {_size(peak)} at its peak, of {_size(report.device_memory)}",
            markup=False,
        )


def _heading(text: str) -> None:
    stdout().print(f"\n{text}", style="bold", markup=False)


def _size(count: int) -> str:
    """Bytes with the unit that leaves one to four digits before the point."""
    value, units = float(count), ["B", "KiB", "MiB", "GiB", "TiB"]
    while value >= 1024 and len(units) > 1:
        value, units = value / 1024, units[1:]
    return f"{value:.0f} B" if units[0] == "B" else f"{value:.1f} {units[0]}"
