"""Settings of one configuration that were given under verl's names, and what became of them.

verl's section `distillation` adds the divergence to the policy loss unless `use_task_rewards` is
false, and its default estimator is k3. Both are refused, also where a default asks for them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from rlctl.errors import Problem
from rlctl.log import warn_once
from rlctl.plugins.bridges.verl import tables
from rlctl.plugins.bridges.verl.asynchronous import Combination
from rlctl.plugins.bridges.verl.tables import Feature
from rlctl.plugins.bridges.verl.translate import VerlTranslation, translate
from rlctl.recipes.dialects import Foreign, Kind
from rlctl.recipes.slots import lookup
from rlctl.suggest import written

_CODE = "E-NOT-SUPPORTED"
_SECTION = "distillation"
_LOSS = f"{_SECTION}.distillation_loss"
_ALGORITHM = "algorithm.name=distill"


@dataclass(frozen=True, slots=True)
class VerlSetting:
    """One setting: `key`=`value` at `where`, and its translation."""

    key: str
    value: Any
    where: str
    result: VerlTranslation

    @property
    def kind(self) -> Kind:
        """Kind of the translation."""
        return self.result.kind

    @property
    def text(self) -> str:
        """The reason or the new name; of a refused setting without a feature, the whole problem."""
        if self.kind == "refused" and self.result.feature is None:
            return str(self.problem)
        return self.result.text

    @property
    def given(self) -> str:
        """The setting as an override writes it."""
        return f"{self.key}={written(self.value)}"

    @property
    def problem(self) -> Problem:
        """The problem of a refused setting."""
        return Problem(self.result.text, self.where, self.result.hint, code=_CODE)


@dataclass
class VerlSettings:
    """Translated settings in the order given. `sft` adds the keys of verl's SFT trainer.

    `paths` are the parts of dotted paths that are appended to the values of keys.
    """

    sft: bool = False
    found: list[VerlSetting] = field(default_factory=list)
    paths: dict[str, Any] = field(default_factory=dict)
    _combined: list[Problem] = field(default_factory=list)  # of settings that belong together
    _renamed: dict[tuple[str, str], VerlSetting] = field(default_factory=dict)
    _meant: list[str] = field(default_factory=list)  # lines about settings that belong together

    def translate(self, key: str, value: Any, where: str) -> VerlTranslation:
        """Translate one setting and record it if its name or value is verl's."""
        result = translate(key, value, sft=self.sft)
        if result.kind:
            setting = VerlSetting(key, value, where, result)
            self.found.append(setting)
            if result.rule is not None and result.rule.extends:
                self.paths[result.rule.extends] = value
            elif result.key is not None:
                self._warn_of_another(result.key, setting)
        return result

    def _warn_of_another(self, target: str, setting: VerlSetting) -> None:
        """Warn if another key of the same file or command line gives `target` another value."""
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
        given = {setting.key: (setting.value, setting.where) for setting in self.found}
        combination = Combination(given, look, is_set)
        self._combined += combination.problems
        for key, reason in combination.unused.items():
            self.add_unused(key, *given[key], reason)
        values = {**combination.values, **self._reader(is_set)}
        if meant := [f"{key}={written(value)}" for key, (value, _) in values.items()]:
            self._meant.append(f"verl's settings mean {', '.join(meant)}")
        return values

    def _reader(self, is_set: Callable[[str], bool]) -> dict[str, tuple[Any, str]]:
        """Return the reader that the given settings belong to, unless the user selects one."""
        found = (
            (tables.READERS.get(str(setting.result.key).rpartition(".")[2]), setting)
            for setting in self.found
            if setting.value and str(setting.result.key).startswith("data.reader_params.")
        )
        readers = [(reader, setting.where) for reader, setting in found if reader]
        if not readers or is_set("data.reader"):
            return {}
        return {"data.reader": readers[-1]}

    def add_unused(self, key: str, value: Any, where: str, reason: str) -> None:
        """Record a setting that has no effect, such as one of a plug-in that is not selected."""
        self.found = [setting for setting in self.found if setting.key != key]
        self.found.append(
            VerlSetting(key, value, where, VerlTranslation(None, None, "unused", reason))
        )

    def problems(self, container: dict[str, Any]) -> list[Problem]:
        """Return the refused settings, one problem per missing feature, for resolved values."""
        problems = list(self._distillation(container))
        missing: dict[Feature, list[VerlSetting]] = {}
        for setting in self.found:
            if setting.result.feature is not None:
                missing.setdefault(setting.result.feature, []).append(setting)
            elif setting.kind == "refused":
                problems.append(setting.problem)
        problems += self._combined
        for feature, (first, *others) in missing.items():
            asked = first.given
            if others:
                asked += f" and {len(others)} more"
            message = f"{feature.sentence} (given: {asked})"
            problems.append(Problem(message, first.where, feature.hint, code=_CODE))
        for setting in self.found:
            rule = setting.result.rule
            if rule is not None and not rule.agrees(setting.value, container):
                message = f"{setting.given} differs from {rule.equals}={rule.expected(container)}"
                hint = f"remove it: rlctl uses {rule.equals}"
                problems.append(Problem(message, setting.where, hint))
        return problems

    def _distillation(self, container: dict[str, Any]) -> Iterator[Problem]:
        """Yield the problems of verl's distillation; if it is off, its settings are unused."""
        settings = [setting for setting in self.found if setting.key.startswith(f"{_SECTION}.")]
        given = {setting.key: setting.value for setting in settings}
        name = lookup(container, "algorithm.name")
        is_selected = f"algorithm.name={name}" == _ALGORITHM
        if given.get(f"{_SECTION}.enabled") is not True:
            refused = {setting.key: setting for setting in settings if setting.kind == "refused"}
            if is_selected:
                return
            for setting in refused.values():
                self.add_unused(setting.key, setting.value, setting.where, "distillation is off")
            return
        where = settings[0].where
        if not is_selected:
            message = f"{_SECTION}.enabled=true, but algorithm.name is {name}"
            hint = f"`rlctl train distill`, or {_ALGORITHM} with rollout.n=4"
            yield Problem(message, where, hint)
        for key, works, default in (
            ("use_task_rewards", "use_task_rewards=false", "true, which adds the policy loss"),
            ("loss_mode", "loss_mode=k1 or forward_kl_topk", "k3, which rlctl lacks"),
        ):
            if f"{_LOSS}.{key}" not in given:
                message = f"{_LOSS}.{key} is not set; verl's default is {default}"
                yield Problem(message, where, f"+{_LOSS}.{works}")
        gradient = given.get(f"{_LOSS}.use_policy_gradient")
        mode = given.get(f"{_LOSS}.loss_mode")
        if gradient is not None and mode is not None and gradient is not (mode in ("k1", "kl")):
            message = f"{_LOSS}.use_policy_gradient={str(gradient).lower()} with loss_mode={mode}"
            hint = "true belongs to loss_mode=k1, false to forward_kl_topk"
            yield Problem(f"{message} is not supported", where, hint, code=_CODE)

    def notices(self) -> list[str]:
        """Return lines for the user: one per renamed key, one per reason of dropped settings."""
        renamed = [setting.text for setting in self.found if setting.kind == "renamed"]
        dropped: dict[str, dict[str, None]] = {}
        for setting in self.found:
            if setting.kind == "dropped":
                dropped.setdefault(setting.text, {})[setting.given] = None
        lines = list(dict.fromkeys(renamed))
        for reason, given in dropped.items():
            verb = "is" if len(given) == 1 else "are"
            lines.append(f"{', '.join(given)} {verb} dropped: {reason}")
        return [*lines, *self._meant]

    def settings(self) -> list[Foreign]:
        """Return the recorded settings."""
        return [
            Foreign(setting.key, setting.value, setting.where, setting.kind, setting.text)
            for setting in self.found
        ]
