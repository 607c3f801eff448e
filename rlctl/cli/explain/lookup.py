"""Explanation of a name: code of an error, exit code, alarm, metric, key, or key of a library."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from rlctl import plugins
from rlctl.cli.explain.metric_entries import MetricEntry, metric_entries, metric_entry, read_table
from rlctl.error_codes import error_entries
from rlctl.errors import NotFoundError
from rlctl.recipes.dialects import dialects
from rlctl.recipes.key_reference import KeyRow, key_rows, setting_rows
from rlctl.recipes.keys import known_key, schema_keys
from rlctl.recipes.slots import SLOTS, slot_with_setting
from rlctl.suggest import nearest, question
from rlctl.tracking.alarm_rules import RULES

_LONGEST = 200  # characters of a name
_MOST_NAMES = 8  # that a hint lists
LIBRARIES = {"trl": "TRL", "openrlhf": "OpenRLHF"}


@dataclass(frozen=True)
class Explanation:
    """Meaning of a name, and facts about it by label; empty facts are left out."""

    name: str
    kind: str
    text: str
    facts: dict[str, str] = field(default_factory=dict)


def explain(name: str) -> list[Explanation]:
    """Return the explanations of a name: one, or those of the keys and metrics that it is part of.

    Raises NotFoundError with the nearest names, else those whose description has the word.
    """
    if len(name) > _LONGEST:
        raise NotFoundError(
            f"nothing has a name of {len(name)} characters", hint=f"at most {_LONGEST}"
        )
    sources = (_error, _exit_code, _alarm, _metric, _label, _keys, _metrics, _option, _foreign)
    for source in (*sources, _plugin):
        if found := source(name):
            # The end of a key may be an option of another library with another meaning.
            if source is _keys and "." not in name:
                found = found + _option(name)
            return found
    raise NotFoundError(f"nothing is named {name!r}", hint=question(_nearest(name)) or _about(name))


_SEARCHED = "codes, alarms, metrics, keys, plug-ins, options of TRL and OpenRLHF"


def _about(word: str) -> str:
    """Return the names whose description has the word, else what was searched."""
    errors = error_entries().values()
    texts = {entry.code: f"{entry.title} {entry.cause} {entry.fix}" for entry in errors}
    texts |= {rule.name: f"{rule.message} {rule.hint}" for rule in RULES}
    texts |= {name: entry.means for entry in metric_entries() for name in entry.names()}
    texts |= {key.name: key.help for key in schema_keys().values() if key.kind != "section"}
    pattern = re.compile(rf"\b{re.escape(word)}", re.IGNORECASE)
    found = [name for name, text in texts.items() if pattern.search(text)]
    if not found:
        return f"no description has the word, either; searched are {_SEARCHED}"
    shown = found[:_MOST_NAMES]
    text = f"described with it: {', '.join(shown)}"
    if more := len(found) - len(shown):
        text += f" and {more} more"
    return text


def _nearest(name: str) -> list[str]:
    """Return names similar to `name`, else those whose part after the last slash is."""
    names = known_names()
    if found := nearest(name, names):
        return found
    ends = nearest(name, {name.rpartition("/")[2] for name in names}, limit=1)
    return [name for name in names if name.rpartition("/")[2] in ends][:3]


def known_names() -> list[str]:
    """Return all codes, alarms, metrics and keys."""
    metrics = (name for entry in metric_entries() for name in entry.names())
    keys = (key.name for key in schema_keys().values() if key.kind != "section")
    return [*error_entries(), *(rule.name for rule in RULES), *metrics, *keys]


def _error(name: str) -> list[Explanation]:
    entry = error_entries().get(name.upper())
    if entry is None:
        return []
    facts = {"remedy": entry.fix, "exit code": str(entry.exit)}
    more = {
        "messages": "; ".join((*entry.messages, *entry.given)),
        "docs": entry.page and f"docs/{entry.page}",
    }
    return [Explanation(entry.code, "error", entry.cause, facts | _given(**more))]


def _exit_code(name: str) -> list[Explanation]:
    """Explain a number by the entry for all other errors of that exit code."""
    entries = [entry for entry in error_entries().values() if str(entry.exit) == name]
    general = next((entry for entry in entries if not (entry.messages or entry.given)), None)
    if general is None:
        return []
    codes = ", ".join(entry.code for entry in entries)
    facts = {"remedy": general.fix, "errors": codes}
    return [Explanation(name, "exit code", f"{general.title}: {general.cause}", facts)]


def _alarm(name: str) -> list[Explanation]:
    rule = next((rule for rule in RULES if rule.name == name), None)
    if rule is None:
        return []
    key = known_key(f"trainer.alarms.{name}") or known_key("trainer.mismatch.warn")
    assert key is not None, "each alarm has a limit in the schema"
    text = rule.message.replace("{value:", "{").replace("{value", "{")
    facts = {"remedy": rule.hint, "limit": f"{key.name}: {key.help}"}
    return [Explanation(name, "alarm", text.partition(":")[0], facts)]


def _metric(name: str) -> list[Explanation]:
    entry = metric_entry(name)
    if entry is None:
        return []
    return [_described(name, entry)]


_LABELS = {"acc": "val-core/x/acc/mean@1", "reward": "val-core/x/reward/mean@1", "loss": "val/loss"}


def _label(name: str) -> list[Explanation]:
    """Explain the figure `val acc`, `val reward` or `val loss` of the console."""
    kind, _, what = name.replace("_", " ").partition(" ")
    if kind != "val" or what not in _LABELS:
        return []
    return _metric(_LABELS[what])


def _plugin(name: str) -> list[Explanation]:
    """Explain a plug-in by the key that selects it."""
    found: list[Explanation] = []
    for slot in SLOTS:
        if name in plugins.names(slot.kind):
            value = name
            if slot.several:
                value = f"[{name}]"
            facts = {"select": f"{slot.key}={value}", "settings": slot.section(name) or "none"}
            kind = slot.kind.removesuffix("s").replace("_", " ")
            help_text = schema_keys()[slot.key].help
            found.append(Explanation(name, kind, f"Plug-in of {slot.key}: {help_text}.", facts))
    return found


def _metrics(beginning: str) -> list[Explanation]:
    """Explain the metrics of a group, such as `perf/mfu`."""
    start = f"{beginning.rstrip('/')}/"
    return [
        _described(name, entry)
        for entry in metric_entries()
        for name in entry.names()
        if name.startswith(start)
    ]


def _described(name: str, entry: MetricEntry) -> Explanation:
    facts = _given(unit=entry.unit, usual=entry.normal, otherwise=entry.advice)
    return Explanation(name, "metric", entry.means, facts)


def _keys(name: str) -> list[Explanation]:
    """Explain the key, the keys with that end, or the keys of a section."""
    names = list(schema_keys())
    chosen = [key for key in names if key.endswith(f".{name}")]
    if name in names:
        chosen = [name]
    if len(chosen) == 1 and schema_keys()[chosen[0]].kind == "section":
        chosen = [key for key in names if key.rpartition(".")[0] == chosen[0]]
    found: list[Explanation] = []
    if chosen:
        rows = {row.key.name: row for row in key_rows()}
        found = [_key(rows[key]) for key in chosen if key in rows]
    slot = slot_with_setting(name)
    if not found and slot is not None:
        settings = (
            row for plugin in plugins.names(slot.kind) for row in setting_rows(slot, plugin)
        )
        found = [_key(row) for row in settings if row.key.name == name]
    return found


def _key(row: KeyRow) -> Explanation:
    key = row.key
    facts = {"type": key.type, "default": row.default}
    for dialect in dialects():
        facts |= _given(**dialect.aliases(key.name))
    facts["set by"] = f"rlctl config why {key.name} --recipe NAME"
    return Explanation(key.name, "key", key.help, facts)


def _option(name: str) -> list[Explanation]:
    """Explain an option of TRL or OpenRLHF."""
    bare = name.lstrip("-").partition("=")[0]
    found: list[Explanation] = []
    for library, title in LIBRARIES.items():
        if (option := library_options(library).get(bare)) is not None:
            facts = _given(use=", ".join(option.keys))
            text = option.note or "It has another name here."
            found.append(Explanation(bare, f"option of {title}", text, facts))
    return found


@dataclass(frozen=True)
class LibraryOption:
    """Option of another library: the keys that replace it, and a note."""

    keys: tuple[str, ...]
    note: str


def library_options(library: str) -> dict[str, LibraryOption]:
    """Return the options of a library by name, without the dashes."""
    return {
        name: LibraryOption(tuple(words[:-1]), words[-1])
        for section in read_table(library).values()
        for name, words in section.items()
    }


def _foreign(name: str) -> list[Explanation]:
    """Explain a key of another library, which a dialect translates."""
    found = (dialect.explain(name) for dialect in dialects() if "." in name)
    return [
        Explanation(name, kind, text, _given(**facts)) for kind, text, facts in filter(None, found)
    ]


def _given(**facts: str | None) -> dict[str, str]:
    """Return the facts that are not empty."""
    return {label: text for label, text in facts.items() if text}
