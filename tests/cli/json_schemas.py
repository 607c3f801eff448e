"""JSON schemas of the commands with `--json`: what docs/json.md promises.

Fields may be added; one that is renamed, removed or of another type needs another `JSON_VERSION`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tests.plugin_folders import can_run, is_there

Schema = Mapping[str, Any]

_TYPES = {
    "s": "string",
    "i": "integer",
    "n": "number",
    "b": "boolean",
    "l": "array",
    "o": "object",
    "?": "null",
}
ANY: Schema = {}


def of(kinds: str | Schema) -> Schema:
    """Return the schema of `s?` (text or null), `i`, `n`, `b`, `l` (list), `o` (object)."""
    if not isinstance(kinds, str):
        return kinds
    return {"type": [_TYPES[kind] for kind in kinds]}


def record(**fields: str | Schema) -> Schema:
    """Return the schema of an object that has these fields."""
    properties = {name: of(kinds) for name, kinds in fields.items()}
    return {"type": "object", "properties": properties, "required": [*properties]}


def rows(item: str | Schema) -> Schema:
    """Return the schema of a list with at least one item."""
    return {"type": "array", "items": of(item), "minItems": 1}


def table(value: str | Schema) -> Schema:
    """Return the schema of an object whose names are those of the data."""
    return {"type": "object", "additionalProperties": of(value), "minProperties": 1}


PROBLEM = record(code="s", message="s", where="s?", hint="s?", fix="l?")
ERROR = record(
    json="i",
    error=record(code="s", message="s", where="s?", hint="s?", exit="i"),
    problems=rows(PROBLEM),
)

_SPLIT = record(
    file="s", num_rows="i", num_dropped="i", num_skipped="i", prompt_tokens="o?", sha256="s"
)
_ROW = record(
    row="i", data_source="s", prompt="l", images="l", ground_truth=ANY, style="s", extra_info="o"
)
_RUN = record(
    **dict.fromkeys(("name", "project", "path", "state", "created"), "s"),
    **dict.fromkeys(("id", "recipe", "ended", "metric", "problem"), "s?"),
    **dict.fromkeys(("exit_code", "total_steps", "step", "best_step", "tokens"), "i?"),
    **dict.fromkeys(("first", "last", "best", "seconds"), "n?"),
    tags="l",
    note="s",
    failure="o?",
)
_LABELS = record(name="s", tags="l", note="s")
_PLAN = record(
    recipe="s",
    changed=rows(record(key="s", value=ANY, where="s")),
    placement=rows(record(role="s", pool="s", processes="i", device="s", threads="i")),
    batches=record(train_prompts="i", dropped_prompts="i", prompts="i", rows="i", total_steps="i"),
    memory=rows("o"),
    disk=record(checkpoint="i?", num_checkpoints="i", free="i"),
    trackers="l",
    reward_functions="l",
    reward_rows="i",
    prompt="s",
)
_PATHS = rows(record(path="s"))
_EPISODE = record(messages="l", outcome="s", error="s?", seconds="n", score=ANY)
_TRIAL = record(
    **dict.fromkeys(("value", "error", "best", "low", "high"), "n?"),
    number="i",
    n="i",
    step="i?",
    overrides=rows("s"),
    state="s",
    runs="l",
    reason="s",
)
_IMPORT = record(
    **dict.fromkeys(("verb", "base", "recipe"), "s"),
    settings=rows(record(kind="s", key="s", value=ANY, text="s")),
    not_expanded="l",
    notes="l",
)
_ENGINE_CHANGE = record(run="s", done="b", message="s?")

_ENTRY = record(
    **dict.fromkeys(("state", "run", "path", "cwd", "reason", "log", "added"), "s"),
    **dict.fromkeys(("began", "ended"), "s?"),
    **dict.fromkeys(("id", "priority"), "i"),
    **dict.fromkeys(("command", "devices"), "l"),
    exit_code="i?",
)
_QUEUE = record(paused="b", waiting="i", running="i")


@dataclass(frozen=True)
class Example:
    """Schema of a command, and a command line that prints such a document."""

    schema: Schema
    line: str
    is_error: bool = False  # the line fails: its document is that of an error
    also_needs: str = ""  # folder of `rlctl/plugins` besides that of the command


# By the command's path. `tests/cli/test_json_documents.py` has the documents of those whose line
# fails here. Lines run in this order, in a folder with one run, data and a recipe.
_EXAMPLES: dict[str, Example] = {
    "prep arithmetic": Example(table(_SPLIT), "--out data --train 64 --val 8"),
    "data show": Example(rows(_ROW), "data/train.parquet -n 1"),
    "data from-runs": Example(
        record(file="s", rows="i", prompts="i", left_out="o"),
        "one --where 'score >= 0' --out from.parquet",
    ),
    "reward test": Example(
        record(mean="n", num_errors="i", answers=rows("o")),
        "--data data/val.parquet --responses responses.jsonl",
    ),
    "env ls": Example(rows(record(name="s", kind="s", description="s")), ""),
    "env show": Example(record(name="s", description="s", settings="l", tools="l"), "gridworld"),
    "env test": Example(rows(_EPISODE), "gridworld --data missing", is_error=True),
    "mcp": Example(
        rows(record(name="s", description="s", input_schema="o", annotations="o")), "--allow-train"
    ),
    "recipes ls": Example(rows(record(name="s", about="s", on="l", path="s")), ""),
    "recipes show": Example(record(path="s", text="s"), "grpo"),
    "recipes cp": Example(record(path="s"), "grpo copy.yaml"),
    "recipes check": Example(rows(record(recipe="s", ok="b", problems="l", no_effect="l")), "grpo"),
    "import verl": Example(_IMPORT, "verl.sh", is_error=True),
    "config show": Example(table("o"), ""),
    "config why": Example(
        record(key="s", value=ANY, origins=rows("o"), no_effect="s?"), "data.seed"
    ),
    "config keys": Example(rows(record(key="s", type="s", default=ANY, help="s")), "optim.lr"),
    "config diff": Example(rows(record(key="s", a=ANY, b=ANY)), "ppo grpo"),
    "explain": Example(rows(record(name="s", kind="s", text="s", facts="o")), "E-OOM"),
    "train ppo": Example(record(ok="b", problems="l", **_PLAN["properties"]), "--dry-run"),
    "fit": Example(record(device="o", fits=rows("o"), cheapest="i?", command="s?"), "ppo"),
    "engines list": Example(
        rows(
            record(engine="i", node="s", state="s", devices="o", responses="i", tokens_per_s="n?")
        ),
        "one",
        is_error=True,
    ),
    "engines add": Example(_ENGINE_CHANGE, "one", is_error=True),
    "engines drain": Example(_ENGINE_CHANGE, "one 1", is_error=True),
    "eval": Example(table("n"), "one data.val_max_samples=2"),
    "generate": Example(
        rows(record(prompt="s", text="s", length="i", finish="s", log_prob="n")),
        "one 'Tom has 3 apples.' --max-tokens 2",
    ),
    "sweep ppo": Example(
        record(recipe="s", fixed="l", axes="l", runs="i", steps="i", settings="o", trials="l"),
        "data.seed=1,2 --dry-run",
    ),
    "sweep best": Example(_TRIAL, "none", is_error=True),
    "sweeps": Example({"type": "array"}, ""),
    "runs": Example(rows(_RUN), ""),
    "runs tag": Example(_LABELS, "one a ^b"),
    "runs note": Example(_LABELS, "one text"),
    "runs sync": Example(
        rows(record(logger="s", id="s?", num_steps="i")), "one -l tensorboard", also_needs="bridges"
    ),
    "report": Example(record(path="s", bytes="i"), "one"),
    "export": Example(record(run="s", step="i", folder="s"), "one out"),
    "compare": Example(record(runs=rows("s")), "one two"),
    "show": Example(
        record(
            **_RUN["properties"],
            record="o?",
            changed="o",
            metrics=table(record(first="n?", last="n?", min="n?", max="n?")),
            alarms="l",
            ended_early="o?",
            generations="l",
            profiles="l",
            checkpoints="l",
            checkpoint_bytes="o",
            bytes="i",
        ),
        "one",
    ),
    "logs": Example(record(process="s", line="s"), "one", is_error=True),
    "debug": Example(
        rows(record(pid="i", name="s", status="s", cpu_s="n")), "nothing", is_error=True
    ),
    "board": Example(
        record(url="s", port="i", root="s", token="s"), "--host nowhere.invalid", is_error=True
    ),
    "loggers": Example(rows(record(name="s", package="s", state="s", message="s")), ""),
    "doctor": Example(rows(record(check="s", state="s", message="s", remedy="s?")), ""),
    "notify": Example(rows(record(receiver="s", error="s?")), "'cd .'"),
    "queue pause": Example(_QUEUE, ""),
    "queue add": Example(_ENTRY, "train ppo --inline --name queued"),
    "queue ls": Example(rows(_ENTRY), ""),
    "queue move": Example(_ENTRY, "1 1"),
    "queue rm": Example(record(removed=rows("i")), "1"),
    "queue start": Example(_QUEUE, ""),
    "version": Example(record(rlctl="s", python="s", json="i"), ""),
    "stop": Example(rows(record(name="s", state="s")), "two"),
    "runs prune": Example(
        rows(record(run="s", removed="l", would_remove="l", kept="l", bytes="i", guarded=of("o"))),
        "two --dry-run",
    ),
    "rerun": Example(record(of="s", notes="l"), "one --check"),
    "runs export": Example(record(run="s", file="s", files="i", bytes="i"), "one one.tar.gz"),
    "runs import": Example(record(run="s", path="s"), "one.tar.gz --name three"),
    "runs rm": Example(rows(record(run="s", path="s")), "two"),
    "runs trash": Example(rows(record(name="s", removed="s", bytes="i", path="s")), ""),
    "runs restore": Example(_PATHS, "two"),
    "runs pull": Example(record(path="s"), "missing/run", is_error=True),
    "new": Example(
        record(
            **dict.fromkeys(("command", "recipe", "reward", "train", "val"), "s"),
            rows=rows(_ROW),
            dry_run=_PLAN,
            trial="o?",
        ),
        "proj --data data/train.parquet --yes --no-try",
    ),
}
# Those of commands whose folders are there.
SCHEMAS = {path: example.schema for path, example in _EXAMPLES.items() if can_run(path)}
EXAMPLES = {
    path: example
    for path, example in _EXAMPLES.items()
    if path in SCHEMAS and (not example.also_needs or is_there(example.also_needs))
}
# Commands without `--json`, and why.
_WITHOUT = {
    "resume": "it trains; `runs --json` has the result",
    "watch": "it shows a terminal; `logs --json` and metrics.jsonl can be followed",
    "completion": "it prints the script of a shell",
    "config schema": "its output is JSON",
}
WITHOUT = {path: reason for path, reason in _WITHOUT.items() if can_run(path)}
# Commands whose document is that of another one, from the same code.
SAME = {"prep": "prep arithmetic", "train": "train ppo", "sweep": "sweep ppo"}
