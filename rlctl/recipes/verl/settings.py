"""Settings of one configuration that were given under verl's names, and what became of them."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from rlctl.errors import Problem
from rlctl.log import warn_once
from rlctl.recipes.verl import asynchronous, distillation
from rlctl.recipes.verl.agreements import Agreement
from rlctl.recipes.verl.rules import Feature
from rlctl.recipes.verl.translate import Translation, translate, written


@dataclass(frozen=True, slots=True)
class VerlSetting:
    """One setting: `key`=`value` at `where`, what happened to it, and the reason or new name."""

    kind: Literal["renamed", "dropped", "unused", "refused"]
    key: str
    value: Any
    where: str
    text: str

    @property
    def given(self) -> str:
        """The setting as an override writes it."""
        return f"{self.key}={written(self.value)}"


@dataclass
class VerlSettings:
    """Translated settings in the order given. `sft` adds the keys of verl's SFT trainer.

    `paths` are the parts of dotted paths that are appended to the values of keys.
    """

    sft: bool = False
    found: list[VerlSetting] = field(default_factory=list)
    paths: dict[str, Any] = field(default_factory=dict)
    _problems: list[tuple[str, Problem]] = field(default_factory=list)  # each with verl's key
    _combined: list[Problem] = field(default_factory=list)  # of settings that belong together
    _missing: dict[Feature, list[VerlSetting]] = field(default_factory=dict)
    _agreements: list[tuple[VerlSetting, Agreement]] = field(default_factory=list)
    _renamed: dict[tuple[str, str], VerlSetting] = field(default_factory=dict)

    def translate(self, key: str, value: Any, where: str) -> Translation:
        """Translate one setting and record it if its name or value is verl's."""
        result = translate(key, value, where, sft=self.sft)
        if result.problem is not None or result.missing is not None:
            text = result.missing.sentence if result.missing else f"{result.problem}"
            setting = VerlSetting("refused", key, value, where, text)
            if result.missing is not None:
                self._missing.setdefault(result.missing, []).append(setting)
            else:
                assert result.problem is not None
                self._problems.append((key, result.problem))
        elif result.extends is not None:
            self.paths[result.extends] = value
            text = f"{key} is now part of {result.extends}"
            setting = VerlSetting("renamed", key, value, where, text)
        elif result.unused is not None:
            setting = VerlSetting("unused", key, value, where, result.unused)
        elif result.dropped is not None:
            setting = VerlSetting("dropped", key, value, where, result.dropped)
            if result.agreement is not None:
                self._agreements.append((setting, result.agreement))
        elif result.renamed is not None:
            setting = VerlSetting("renamed", key, value, where, result.renamed)
            self._warn_of_another(result.key, setting)
        else:
            return result
        self.found.append(setting)
        return result

    def _warn_of_another(self, target: str | None, setting: VerlSetting) -> None:
        """Warn if another key of the same file or command line gives `target` another value."""
        if target is None:
            return
        source = re.split("[: ]", setting.where)[0]  # "override …" or "FILE:LINE"
        before = self._renamed.setdefault((target, source), setting)
        self._renamed[target, source] = setting
        if before.key != setting.key and before.value != setting.value:
            warn_once(f"{setting.given} replaces {before.given}: rlctl has {target} for both")

    def combined(
        self, look: Callable[[str], Any], is_set: Callable[[str], bool]
    ) -> dict[str, tuple[Any, str]]:
        """Return values and places by key of rlctl of the settings that are translated together.

        `look` returns the value of a key of rlctl, and `is_set` is True if the user set it.
        """
        given = {each.key: (each.value, each.where) for each in self.found}
        combination = asynchronous.combine(given, look, is_set)
        self._combined += combination.problems
        for key, reason in combination.unused.items():
            self.add_unused(key, *given[key], reason)
        return combination.values

    def add_unused(self, key: str, value: Any, where: str, reason: str) -> None:
        """Record a setting of a plug-in that is not selected."""
        self.found = [each for each in self.found if each.key != key]
        self.found.append(VerlSetting("unused", key, value, where, reason))

    def problems(self, container: dict[str, Any]) -> list[Problem]:
        """Return the refused settings, one problem per missing feature, for resolved values."""
        problems = self._distillation(container)
        problems += [problem for _, problem in self._problems] + self._combined
        for feature, settings in self._missing.items():
            asked = settings[0].given
            if len(settings) > 1:
                asked += f" and {len(settings) - 1} more"
            message = f"{feature.sentence} (given: {asked})"
            problems.append(Problem(message, settings[0].where, feature.hint))
        for setting, agreement in self._agreements:
            if not agreement.holds(setting.value, container):
                hint = f"remove it: rlctl uses {agreement.expression}"
                message = (
                    f"{setting.given} differs from {agreement.expression}"
                    f"={agreement.value(container)}"
                )
                problems.append(Problem(message, setting.where, hint))
        return problems

    def _distillation(self, container: dict[str, Any]) -> list[Problem]:
        """Return the problems of verl's distillation; if it is off, its settings are unused."""
        own = [each for each in self.found if each.key.startswith(f"{distillation.SECTION}.")]
        given = {each.key: each.value for each in own}
        if distillation.is_on(given, container):
            return distillation.problems(given, own[0].where, container) if own else []
        refused = {each.key: each for each in own if each.kind == "refused"}
        for each in refused.values():
            self.add_unused(each.key, each.value, each.where, "distillation is off")
        self._problems = [each for each in self._problems if each[0] not in refused]
        self._missing = {
            feature: kept
            for feature, settings in self._missing.items()
            if (kept := [each for each in settings if each.key not in refused])
        }
        return []

    def notices(self) -> list[str]:
        """Return lines for the user: one per renamed key, one per reason of dropped settings."""
        renamed = [each.text for each in self.found if each.kind == "renamed"]
        dropped: dict[str, list[str]] = {}
        for each in self.found:
            if each.kind == "dropped":
                keys = dropped.setdefault(each.text, [])
                keys += [each.given] if each.given not in keys else []
        return [
            *dict.fromkeys(renamed),
            *(
                f"{', '.join(given)} {'is' if len(given) == 1 else 'are'} dropped: {reason}"
                for reason, given in dropped.items()
            ),
        ]
