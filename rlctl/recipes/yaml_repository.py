"""Hydra's view of the YAML files of a recipe: which config groups exist and what they include."""

from __future__ import annotations

import re
from pathlib import Path

from hydra._internal.config_repository import ConfigRepository
from hydra._internal.defaults_list import DefaultsList, create_defaults_list
from hydra.core.default_element import ResultDefault
from hydra.core.object_type import ObjectType
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException, MissingConfigException
from hydra.plugins.config_source import ConfigResult, ConfigSource
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from rlctl.errors import ConfigError
from rlctl.recipes.search_path import PARENT_HINT, find_part
from rlctl.recipes.yaml_sources import Source, read, shown
from rlctl.suggest import did_you_mean

# Defaults lists by file, search folders and choices, with the texts of the files that they depend
# on (None: no file). Hydra takes half of the time of a composition to make one.
_lists: dict[tuple[object, ...], tuple[DefaultsList, dict[str, str | None]]] = {}
_MAX_LISTS = 64
# Entries of verl's files that choose how a model is sharded, which is by FSDP2 here.
_ENGINES = [{"override model_engine": name} for name in ("dp", "fsdp", "megatron")]


class YamlRepository(ConfigRepository):
    """Config repository of one recipe and its search folders. Each file is read once."""

    def __init__(self, primary: Source, folders: list[Path]) -> None:
        self.primary = primary
        self.name = primary.path.stem
        self.folders = folders
        self._sources: dict[str, Source | None] = {self.name: primary}
        self._results: dict[str, ConfigResult] = {}

    def source(self, config_path: str) -> Source | None:
        """Return the file of a part by Hydra's name for it, or None."""
        name = config_path.removesuffix(".yaml").lstrip("/")
        if name not in self._sources:
            path = find_part(name, self.folders)
            self._sources[name] = None if path is None else read(path)
        return self._sources[name]

    def mention(self, name: str) -> str:
        """Return `file:line` of the defaults list that names a missing part."""
        word = re.compile(rf"(?<![\w/]){re.escape(name.rpartition('/')[2])}(?!\w)")
        for source in filter(None, self._sources.values()):
            if any(word.search(str(entry)) for entry in source.defaults):
                lines = enumerate(source.text.splitlines(), 1)
                line = next(number for number, text in lines if word.search(text))
                return f"{source.name}:{line}"
        return self.primary.where("defaults")

    def known_choices(self) -> dict[str, str | None]:
        """Return the part that the recipe chooses for each `group@package`."""
        return self._defaults_list([]).overrides.known_choices

    def files(self, choices: list[Override]) -> list[tuple[Source, str]]:
        """Return the recipe's files in merge order, each with its package.

        `choices` are overrides that replace parts. Raises ConfigError if a part does not exist or
        the defaults lists are inconsistent.
        """
        found = [
            (self.source(default.config_path), default.package or "")
            for default in self._defaults(choices)
            if default.config_path is not None
        ]
        return [(source, package) for source, package in found if source is not None]

    def _defaults_list(self, choices: list[Override]) -> DefaultsList:
        key = (self.primary.path, *self.folders, *(choice.input_line for choice in choices))
        if key in _lists:
            defaults, texts = _lists[key]
            if all(self._text(name) == text for name, text in texts.items()):
                return defaults
        defaults = create_defaults_list(
            self, self.name, choices, prepend_hydra=False, skip_missing=False
        )
        if len(_lists) >= _MAX_LISTS:
            _lists.clear()
        _lists[key] = defaults, {name: self._text(name) for name in self._sources}
        return defaults

    def _text(self, name: str) -> str | None:
        source = self.source(name)
        return None if source is None else source.text

    def _defaults(self, choices: list[Override]) -> list[ResultDefault]:
        try:
            return self._defaults_list(choices).defaults
        except RecursionError:
            raise ConfigError(
                "the defaults lists include each other in a circle",
                where=shown(self.primary.path),
            ) from None
        except MissingConfigException as error:
            name = error.missing_cfg_file or ""
            options = error.options
            if options is None:
                options = self.get_group_options("")
            hint = did_you_mean(name.rpartition("/")[2], options)
            raise ConfigError(
                f"part {name} does not exist",
                where=self.mention(name),
                hint=hint or f"existing parts: {', '.join(options)}",
            ) from error
        except (HydraException, ValueError, AssertionError, OmegaConfBaseException) as error:
            lines = str(error.__cause__ or error).splitlines()
            first, *more = [line.strip() for line in lines if line.strip()] or [
                type(error).__name__
            ]
            hint = " ".join(more) or None
            if "more than once" in first:
                hint = "replace a part of an included recipe with `override GROUP: PART`"
            where = self.primary.where("defaults")
            raise ConfigError(first, where=where, hint=hint) from error

    # Hydra's interface

    def load_config(self, config_path: str) -> ConfigResult | None:
        """Return the defaults list of a file; its values are merged by `compose`, not by Hydra."""
        if config_path in self._results:
            return self._results[config_path]
        if ".." in config_path.split("/"):
            raise ConfigError(
                f"`..` is not allowed in a defaults list: {config_path}",
                where=self.mention(config_path),
                hint=PARENT_HINT,
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
        parts = [part for part in source.defaults if part not in _ENGINES]
        config = OmegaConf.create({"defaults": parts, "content": bool(source.data)})
        defaults = self._extract_defaults_list(config_path, config)
        header = ConfigSource._get_header_dict(source.text)
        result = ConfigResult(provider="rlctl", path=str(source.path), config=config, header=header)
        result.defaults_list = self._create_defaults_list(config_path, defaults)
        self._results[config_path] = result
        return result

    def config_exists(self, config_path: str) -> bool:
        """Return True if there is a file of this name."""
        return self.source(config_path) is not None

    def group_exists(self, config_path: str) -> bool:
        """Return True if a search folder has a subfolder of this name."""
        return not config_path or any((base / config_path).is_dir() for base in self.folders)

    def get_group_options(
        self, group_name: str, results_filter: ObjectType | None = ObjectType.CONFIG
    ) -> list[str]:
        """Return the sorted names of the parts or subgroups of a group."""
        found = [entry for base in self.folders for entry in (base / group_name).glob("*")]
        names: set[str] = set()
        if results_filter != ObjectType.GROUP:
            names |= {entry.stem for entry in found if entry.suffix == ".yaml"}
        if results_filter != ObjectType.CONFIG:
            names |= {entry.name for entry in found if entry.is_dir()}
        return sorted(names)

    def get_sources(self) -> list[ConfigSource]:
        """Return an empty list: `source` reads the files."""
        return []
