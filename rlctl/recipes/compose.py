"""One recipe, its parts and the command line become one judged configuration. The only user of Hydra and OmegaConf.

Hydra brings what its users know: defaults lists with groups and packages, the override grammar, interpolation. Files are read here
(not by Hydra's config sources), so that each value keeps its line, search paths may stand in any recipe, and nothing global is set up.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hydra._internal.config_repository import ConfigRepository
from hydra._internal.defaults_list import create_defaults_list
from hydra.core.object_type import ObjectType
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, QuotedString
from hydra.errors import HydraException, MissingConfigException
from hydra.plugins.config_source import ConfigResult, ConfigSource
from omegaconf import OmegaConf
from omegaconf.errors import (
    InterpolationKeyError,
    InterpolationResolutionError,
    InterpolationToMissingValueError,
    MissingMandatoryValue,
    OmegaConfBaseException,
)

from rlctl.errors import ConfigError, Problem, RlctlError
from rlctl.recipes.keys import known_key, schema_keys
from rlctl.recipes.layers import MISSING, Layers, Origin, Recipe, Setting, leaves
from rlctl.recipes.sources import (
    Source,
    find_part,
    find_recipe,
    folder,
    level_of,
    read,
    search_folders,
    shown,
)
from rlctl.recipes.validate import dangling, load_config, validate
from rlctl.suggest import did_you_mean, quote_hint, quoted

__all__ = ["Origin", "Recipe", "base_settings", "compose", "load_config"]

_KEY = re.compile(r"[~+]{0,2}[A-Za-z_$][\w/@.:$-]*")


def compose(recipe: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """Compose a shipped recipe (by name) or a file with overrides in Hydra's grammar.

    Raises NotFoundError when there is no such recipe and ConfigError with every problem that was found: unknown keys, wrong types and
    bounds, missing values, parts that do not exist, overrides that cannot be parsed.
    """
    path = find_recipe(recipe)
    layers, files = _lay(path, overrides)
    container = _resolve(layers)
    config, verdict = validate(container, layers.origins, layers.faulty)
    problems = layers.problems + verdict
    if problems or config is None:
        raise ConfigError(*problems)
    return Recipe(
        path.stem,
        path,
        config,
        container,
        layers.origins,
        layers.notices,
        [(source.path, package) for source, package in files],
    )


def compose_unvalidated(recipe: str | Path) -> dict[str, Any]:
    """The values of a recipe that may lack some: `???` where one is required, and as written where a value is taken from there."""
    return _resolve(_lay(find_recipe(recipe), ())[0])


def base_settings(base: str = "ppo_trainer") -> dict[str, Origin]:
    """Every key of a base with its default as written (`???` where a recipe must set it, an interpolation as one) and its place."""
    layers, _ = _lay(find_recipe(base), ())
    return {key: chain[-1] for key, chain in layers.origins.items()}


def _lay(path: Path, overrides: Sequence[str]) -> tuple[Layers, list[tuple[Source, str]]]:
    """All files and settings laid over each other, and the files in that order. Raises what leaves nothing to compose."""
    parsed, problems = _parse(overrides)
    try:
        primary = read(path)
        shelf = _YamlRepository(primary, search_folders(primary, _search_override(parsed)))
        settings, groups = _sort(parsed, shelf, problems)
        files = _layer_files(shelf, groups)
        if not any(level_of(source.path) == 1 for source, _ in files):
            hint = "begin it with `defaults: [ppo_trainer, _self_]`: the base holds the default of every key"
            raise ConfigError(
                "this recipe is not built on a base", where=f"{primary.name}:1", hint=hint
            )
    except RlctlError as error:
        raise type(error)(*problems, *error.problems) from error
    layers = Layers(problems=problems)
    for source, package in files:
        layers.add_file(source, package, level_of(source.path))
    for setting in settings:
        layers.add_setting(setting)
    return layers, files


class _YamlRepository(ConfigRepository):
    """Hydra's view of the YAML files: answers which parts exist and what their defaults lists say, from files that are read once."""

    def __init__(self, primary: Source, folders: list[Path]) -> None:
        self.primary = primary
        self.name = primary.path.stem
        self.folders = folders
        self._sources: dict[str, Source | None] = {self.name: primary}
        self._results: dict[str, ConfigResult] = {}

    def source(self, config_path: str) -> Source | None:
        """The file of a part by Hydra's name for it, or None."""
        name = config_path.removesuffix(".yaml").lstrip("/")
        if name not in self._sources:
            path = find_part(name, self.folders)
            self._sources[name] = None if path is None else read(path)
        return self._sources[name]

    def mention(self, name: str) -> str:
        """`file:line` of the defaults list that names a part which does not exist."""
        word = re.compile(rf"(?<![\w/]){re.escape(name.rpartition('/')[2])}(?!\w)")
        for source in filter(None, self._sources.values()):
            if any(word.search(str(entry)) for entry in source.defaults):
                line = next(
                    i for i, text in enumerate(source.text.splitlines(), 1) if word.search(text)
                )
                return f"{source.name}:{line}"
        return self.primary.where("defaults")

    def load_config(self, config_path: str) -> ConfigResult | None:
        if config_path in self._results:
            return self._results[config_path]
        if ".." in config_path.split("/"):
            hint = "write /group/part, or name the folder in hydra.searchpath"
            raise ConfigError(
                f"`..` has no meaning in a defaults list: {config_path}",
                where=self.mention(config_path),
                hint=hint,
            )
        source = self.source(config_path)
        if source is None:
            return None
        if source.data and source.defaults and "_self_" not in source.defaults:
            raise ConfigError(
                "the defaults list lacks _self_",
                where=source.where("defaults"),
                hint="end it with `- _self_`: this file's values come last",
            )
        config = OmegaConf.create({"defaults": source.defaults, "content": bool(source.data)})
        defaults = self._extract_defaults_list(config_path, config)
        header = ConfigSource._get_header_dict(source.text)
        result = ConfigResult(provider="rlctl", path=str(source.path), config=config, header=header)
        result.defaults_list = self._create_defaults_list(config_path, defaults)
        self._results[config_path] = result
        return result

    def config_exists(self, config_path: str) -> bool:
        return self.source(config_path) is not None

    def group_exists(self, config_path: str) -> bool:
        return any((base / config_path).is_dir() for base in self.folders) if config_path else True

    def get_group_options(
        self, group_name: str, results_filter: ObjectType | None = ObjectType.CONFIG
    ) -> list[str]:
        found = [entry for base in self.folders for entry in (base / group_name).glob("*")]
        files = (
            {entry.stem for entry in found if entry.suffix == ".yaml"}
            if results_filter != ObjectType.GROUP
            else set()
        )
        groups = (
            {entry.name for entry in found if entry.is_dir()}
            if results_filter != ObjectType.CONFIG
            else set()
        )
        return sorted(files | groups)

    def get_sources(self) -> list[ConfigSource]:
        return []


def _parse(overrides: Sequence[str]) -> tuple[list[Override], list[Problem]]:
    """Parse each override alone, so that the one at fault is named."""
    parser = OverridesParser.create()
    parsed: list[Override] = []
    problems: list[Problem] = []
    for text in overrides:
        key, equals, value = text.partition("=")
        where = f"override {text}"
        if not _KEY.fullmatch(key):
            problems.append(
                Problem(f"{key!r} is not a key", where, "write key=VALUE, such as trainer.seed=2")
            )
            continue
        if not equals and not text.startswith("~"):
            problems.append(Problem(f"{text!r} is not key=value", where, f"write {text}=VALUE"))
            continue
        try:
            override = parser.parse_overrides([text])[0]
        except HydraException:
            problems.append(
                Problem(f"the value of {key} cannot be parsed", where, quote_hint(key, value))
            )
            continue
        if override.is_sweep_override():
            one = (
                f"a list is {key}=[{value}]; one value with a comma is {quoted(key, value)}; "
                if "(" not in value
                else ""
            )
            hint = f"{one}`rlctl sweep` tries several values"
            problems.append(Problem(f"{text} names several values", where, hint))
            continue
        parsed.append(override)
    return parsed, problems


def _search_override(parsed: list[Override]) -> list[Path]:
    """Folders of `hydra.searchpath=[…]` on the command line, relative ones below the current folder."""
    for override in parsed:
        if override.key_or_group == "hydra.searchpath":
            entries = _plain(override.value())
            if not isinstance(entries, list):
                raise ConfigError(
                    "hydra.searchpath must be a list of folders",
                    where=f"override {override.input_line}",
                )
            return [
                folder(str(entry), Path.cwd(), f"override {override.input_line}")
                for entry in entries
            ]
    return []


def _sort(
    parsed: list[Override], shelf: _YamlRepository, problems: list[Problem]
) -> tuple[list[Setting], list[Override]]:
    """Part the overrides into settings of keys and choices of parts (`optim@critic.optim=adamw`), which go to Hydra."""
    settings: list[Setting] = []
    groups: list[Override] = []
    for override in parsed:
        name, text, value = override.key_or_group, override.input_line or "", override.value()
        where = f"override {text}"
        if name.split(".")[0] == "hydra":
            if name != "hydra.searchpath":
                problems.append(
                    Problem(f"{name} has no meaning here", where, "only hydra.searchpath is read")
                )
            continue
        if (
            isinstance(value, dict)
            or not shelf.group_exists(name)
            or (override.package is None and "." in name)
        ):
            if override.package is not None:
                problems.append(
                    Problem(f"there is no group of parts named {name}", where, _groups_hint(shelf))
                )
                continue
            settings.append(Setting(name, _plain(value), text, override.is_delete()))
        elif override.is_delete():
            if known_key(override.package or name) is None:
                groups.append(override)
            else:
                hint = f"choose another part: {override.get_key_element().lstrip('~')}={'|'.join(shelf.get_group_options(name))}"
                problems.append(
                    Problem(f"{override.package or name} cannot be taken out", where, hint)
                )
        elif str(value) not in shelf.get_group_options(name):
            options = ", ".join(shelf.get_group_options(name))
            section = next((key for key in schema_keys() if key.startswith(f"{name}.")), None)
            hint = f"parts in {name}/: {options}" + (
                f"; to set a key of the section {name}: {section}=…" if section else ""
            )
            problems.append(Problem(f"there is no part {name}/{value}", where, hint))
        else:
            groups.append(override)
    return settings, _known_groups(groups, shelf, problems)


def _known_groups(
    groups: list[Override], shelf: _YamlRepository, problems: list[Problem]
) -> list[Override]:
    """Drop the choices of parts that the recipe does not have, with the names it has."""
    if not groups:
        return []
    known = create_defaults_list(
        shelf, shelf.name, [], prepend_hydra=False, skip_missing=False
    ).overrides.known_choices
    kept: list[Override] = []
    for override in groups:
        name = override.get_key_element().lstrip("+~")
        if override.is_add() or name in known:
            kept.append(override)
            continue
        same = [choice for choice in known if choice.split("@")[0] == override.key_or_group]
        hint = (
            f"write {' or '.join(f'{choice}={override.value()}' for choice in same)}"
            if same
            else did_you_mean(name, known)
        )
        problems.append(
            Problem(f"the recipe has no part at {name}", f"override {override.input_line}", hint)
        )
    return kept


def _groups_hint(shelf: _YamlRepository) -> str:
    return f"groups: {', '.join(shelf.get_group_options('', ObjectType.GROUP))}"


def _layer_files(shelf: _YamlRepository, groups: list[Override]) -> list[tuple[Source, str]]:
    """The files in the order in which they are laid over each other, each with its package."""
    try:
        defaults = create_defaults_list(
            shelf, shelf.name, groups, prepend_hydra=False, skip_missing=False
        ).defaults
    except RecursionError:
        raise ConfigError(
            "the defaults lists include each other in a circle", where=shown(shelf.primary.path)
        ) from None
    except MissingConfigException as error:
        name = error.missing_cfg_file or ""
        options = error.options if error.options is not None else shelf.get_group_options("")
        hint = did_you_mean(name.rpartition("/")[2], options) or f"there are: {', '.join(options)}"
        raise ConfigError(
            f"there is no part {name}", where=shelf.mention(name), hint=hint
        ) from error
    except (HydraException, ValueError, AssertionError, OmegaConfBaseException) as error:
        first, *more = [
            line.strip() for line in str(error.__cause__ or error).splitlines() if line.strip()
        ] or [type(error).__name__]
        hint = (
            "a part of an included recipe is replaced with `override GROUP: PART`"
            if "more than once" in first
            else None
        )
        raise ConfigError(
            first, where=shelf.primary.where("defaults"), hint=hint or " ".join(more) or None
        ) from error
    found = [
        (shelf.source(default.config_path), default.package or "")
        for default in defaults
        if default.config_path is not None
    ]
    return [(source, package) for source, package in found if source is not None]


def _plain(value: Any) -> Any:
    """Hydra's parsed value as plain data."""
    if isinstance(value, QuotedString):
        return value.text
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return (
        {str(_plain(k)): _plain(v) for k, v in value.items()} if isinstance(value, dict) else value
    )


def _resolve(layers: Layers) -> dict[str, Any]:
    """Resolve interpolations. What is missing or points nowhere becomes a problem and is left as written."""
    config = OmegaConf.create(layers.tree)
    for name, value in leaves(layers.tree).items():
        if value == MISSING:
            help_text = schema_keys()[name].help if name in schema_keys() else ""
            layers.add_problem(
                name,
                f"{name} is not set",
                layers.origins[name][-1].where,
                f"pass {name}=… ({help_text})",
            )
    try:
        return OmegaConf.to_container(config, resolve=True)  # type: ignore[return-value]
    except OmegaConfBaseException:
        pass
    for name, written in leaves(layers.tree).items():
        if any(f"${{{other}}}" in str(written) for other in layers.faulty):
            layers.faulty.add(
                name
            )  # what is wrong has been said of the key that it takes its value from
            continue
        where = layers.origins[name][-1].where
        try:
            value = OmegaConf.select(config, name, throw_on_missing=True)
        except (InterpolationToMissingValueError, MissingMandatoryValue):
            layers.faulty.add(name)
        except (InterpolationKeyError, InterpolationResolutionError) as error:
            layers.add_problem(name, *dangling(name, str(error), where))
        else:
            OmegaConf.update(config, name, value, merge=False)
    return OmegaConf.to_container(config, resolve=False)  # type: ignore[return-value]
