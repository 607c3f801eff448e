"""Conversion of a shell script that starts verl into a recipe."""

from __future__ import annotations

import logging
import re
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from rlctl.errors import ConfigError, NotFoundError, Problem, RlctlError
from rlctl.plugins.bridges.verl.config_names import check_name, recipe_of, settings_of
from rlctl.plugins.bridges.verl.shell import Shell
from rlctl.plugins.bridges.verl.tables import DEFAULT_CONFIGURATIONS, PPO_MODULES
from rlctl.plugins.bridges.verl.verl_settings import VerlSetting, VerlSettings
from rlctl.recipes.keys import known_key, suggest_key
from rlctl.recipes.layers import Origin, leaves, nested
from rlctl.recipes.overrides import parse, plain
from rlctl.recipes.slots import lookup
from rlctl.terminal import visible

_log = logging.getLogger(__name__)

_MODULE = re.compile(r"(?:[\w.]+\.)?(?:main_\w+|\w*sft_trainer|async_main_ppo|fully_async_main)\Z")
_MOST_SETTINGS = 2000
_NOT_YAML = re.compile("[\ufffe\uffff]")
_DATA_FILES = ("data.train_files", "data.val_files")
_OWN_REWARDS = {"reward.custom_reward_function.path", "reward.functions"}
_GSM8K_METHOD = "reward.params.gsm8k.method"


@dataclass
class Imported:
    """Recipe of one script: its verb, base and values, and what became of each setting."""

    script: str
    verb: str
    base: str
    values: dict[str, Any]
    settings: list[VerlSetting]
    problems: list[Problem]
    unread: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def text(self) -> str:
        """Return the recipe as YAML, with comments about its origin and refused settings."""
        notes = [f"Imported from {self.script}: `rlctl train {self.verb} --recipe THIS_FILE`."]
        notes += [f"refused: {problem.message}" for problem in self.problems]
        notes += [f"not expanded: {text}" for text in self.unread]
        # Texts of a script may have lines, also such as only YAML separates.
        lines = [line for note in [*notes, *self.notes] for line in note.splitlines()]
        head = [f"# {_NOT_YAML.sub('?', visible(line))}" for line in lines]
        body = yaml.safe_dump(nested(self.values), sort_keys=False, allow_unicode=True, width=100)
        width = len(self.base) + 100
        base = yaml.safe_dump([self.base, "_self_"], default_flow_style=True, width=width).strip()
        return "\n".join([*head, f"defaults: {base}", "", body])


def import_script(path: Path) -> Imported:
    """Read the script at `path` and translate the arguments of its command of verl.

    Raises NotFoundError without a script or a command of verl in it, and ConfigError for a trainer
    that rlctl does not have.
    """
    try:
        shell = Shell(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise NotFoundError(f"cannot read the script: {reason}", where=str(path)) from error
    module, args = _command(shell.read(), path)
    verb = "sft" if "sft" in module else "ppo"
    last = module.rpartition(".")[2]
    if verb == "ppo" and last not in PPO_MODULES:
        check_name(last, module)
        raise ConfigError(f"{module} is a trainer that rlctl does not have")
    options, overrides = _options(args)
    if len(overrides) > _MOST_SETTINGS:
        raise ConfigError(
            f"the command of verl has {len(overrides)} settings, at most {_MOST_SETTINGS} are read",
            where=str(path),
        )
    defaults = (name for words, name in DEFAULT_CONFIGURATIONS.items() if words in module)
    name = options.get("n", next(defaults, None))
    base = recipe_of(verb, options.get("p"), name) if options else f"{verb}_trainer"
    unread = list(dict.fromkeys(shell.unread))
    open_ended = [word for word in overrides if any(text in word for text in unread)]
    read = [word for word in overrides if word not in open_ended]
    imported = _translate(str(path), verb, base, [*settings_of(name, base), *read])
    if verb == "ppo":
        imported.values.setdefault("trainer.log_val_generations", 0)  # the default of verl
    others = [text for text in unread if not any(text in word for word in open_ended)]
    imported.unread = [*open_ended, *others]
    return imported


def _command(commands: list[list[str]], path: Path) -> tuple[str, list[str]]:
    """Return module and arguments of the last command that starts verl; warn about others."""
    found: list[tuple[str, list[str]]] = []
    for words in commands:
        modules = [word.removesuffix(".py").replace("/", ".") for word in words]
        starts = [i for i, module in enumerate(modules) if i and _MODULE.match(module)]
        found += [(modules[i], words[i + 1 :]) for i in starts[:1]]
    if len(found) > 1:
        _log.warning("the script has %d commands of verl: this is the last one", len(found))
    if found:
        return found[-1]
    raise NotFoundError(
        "the script does not start a trainer of verl",
        where=str(path),
        hint="it should contain a line such as `python3 -m verl.trainer.main_ppo KEY=VALUE …`",
    )


def _options(args: list[str]) -> tuple[dict[str, str], list[str]]:
    """Return the config path (p) and name (n), and the other arguments without redirects."""
    options: dict[str, str] = {}
    overrides: list[str] = []
    rest = iter(args)
    for word in rest:
        if option := re.match(r"(?:--config-(?=path|name)|-c)([pn])(?:ath|ame)?(?:=(.*))?\Z", word):
            name, value = option.groups()
            options[name] = next(rest, "") if value is None else value
        elif word in (">", ">>", "2>", "<"):
            next(rest, None)
        elif word.strip() and not re.match(r"\d?>|<", word):
            overrides.append(word)
    return options, overrides


def _translate(script: str, verb: str, base: str, overrides: list[str]) -> Imported:
    """Translate the overrides into values of a recipe."""
    parsed, problems = parse(overrides)
    verl = VerlSettings(sft=verb == "sft")
    values: dict[str, Any] = {}
    for override in parsed:
        given = {override.key_or_group: plain(override.value())}
        for key, value in leaves(nested(given)).items():
            translated = verl.translate(key, value, script)
            if translated.key is not None and known_key(translated.key) is None:
                problems.append(Problem(f"unknown key {key}", script, suggest_key(key)))
            elif translated.key is not None:
                values[translated.key] = translated.value
    for key, parts in verl.paths.items():
        names = [parts] if isinstance(parts, str) else list(parts or ())
        values[key] = ".".join([str(values.get(key, "")), *map(str, names)])
    container = _container(base, values)
    combined = verl.combined(lambda key: lookup(container, key), values.__contains__)
    values |= {key: value for key, (value, _) in combined.items()}
    problems += verl.problems(container)
    notes = [] if verb == "sft" else _keep_scorer(values)
    notes += _without_effect(container, values, script)
    return Imported(script, verb, base, values, verl.found, problems, notes=notes)


def _without_effect(container: dict[str, Any], values: dict[str, Any], script: str) -> list[str]:
    """Return a line for each value that the chosen estimator or policy loss does not use."""
    from rlctl.recipes.unused_keys import unused_keys

    origins = {key: [Origin(value, script, 3)] for key, value in values.items()}
    chosen = [key for key in values if key.startswith(("algorithm.", "actor_rollout_ref.actor."))]
    return [str(unused) for unused in unused_keys(container, origins, keys=chosen)]


def _keep_scorer(values: dict[str, Any]) -> list[str]:
    """Select verl's scorer for rows of GSM8K, and return notes about accuracies."""
    if _OWN_REWARDS & values.keys() or _GSM8K_METHOD in values:
        return []
    files = str([value for key, value in values.items() if key in _DATA_FILES]).lower()
    if re.search("gsm_?8k", files):
        values[_GSM8K_METHOD] = "verl_strict"
        return [
            f"{_GSM8K_METHOD}=verl_strict scores GSM8K as verl does; "
            "strict, rlctl's default, reads more notations"
        ]
    return [
        "scorers of rlctl accept more notations than verl's, so accuracies are not comparable; "
        f"{_GSM8K_METHOD}=verl_strict scores GSM8K as verl does"
    ]


def _container(base: str, values: dict[str, Any]) -> dict[str, Any]:
    """Return the values of the base, if it can be composed, with those of the script."""
    from rlctl.recipes.compose import compose_unvalidated

    kept: dict[str, Any] = {}
    with suppress(RlctlError):
        kept = leaves(compose_unvalidated(base))
    replaced = [name for name in kept if any(key.startswith(f"{name}.") for key in values)]
    return nested({name: kept[name] for name in kept if name not in replaced} | values)
