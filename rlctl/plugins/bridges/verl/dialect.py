"""verl as a dialect. Each composition imports this module, so the tables are imported when used."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

from rlctl.recipes.keys import known_key

if TYPE_CHECKING:
    from rlctl.plugins.bridges.verl.translate import VerlTranslation
    from rlctl.plugins.bridges.verl.verl_settings import VerlSettings

# Words of verl by the ends of rlctl's keys that take them; None: any value. Keys in mappings that
# other libraries read may be verl's, too.
_WORDS: dict[str, tuple[Any, ...] | None] = {
    ".fsdp_config.model_dtype": ("bfloat16", "float32", "float16"),
    ".model.dtype": ("bf16", "fp32", "fp16"),
    ".rollout_correction.rollout_rs": ("token", "sequence", "geometric"),
    ".optim.optimizer": ("adamw", "adam"),
    ".optim.override_optimizer_config": (None, ""),
    "trainer.log_val_generations": (-1,),
    "trainer.device": ("npu",),
    ".checkpoint_engine.backend": ("naive", "hccl"),
    "actor_rollout_ref.rollout.name": ("trtllm",),
    "actor_rollout_ref.ref.model": None,
}
_OPEN = re.compile(r".*\.(?:override_optimizer_config|override_config|engine_kwargs)\.")


class Verl:
    """verl's keys, words, configurations and settings that are translated together."""

    def reads(self, key: str, value: Any) -> bool:
        """Return True if `value` may be a word of verl for a key of rlctl."""
        end = next((end for end in _WORDS if key.endswith(end)), None)
        if end is None:
            return bool(_OPEN.match(key))
        words = _WORDS[end]
        return words is None or value in words

    def translate(self, key: str, value: Any) -> VerlTranslation:
        """Return a setting under its present name."""
        from rlctl.plugins.bridges.verl.translate import translate

        return translate(key, value)

    def translator(self, bases: Collection[str]) -> VerlSettings:
        """Return the translator of a configuration; SFT's base adds keys of verl's SFT trainer."""
        from rlctl.plugins.bridges.verl.verl_settings import VerlSettings

        return VerlSettings("sft_trainer" in bases)

    def has_part(self, group: str, name: Any) -> bool:
        """Return True for a part that only verl has, such as `optim=fsdp`: dropped or refused."""
        translated = self.translate(group, name)
        return translated.kind == "dropped" or translated.feature is not None

    def is_library(self, folder: str) -> bool:
        """Return True for the folder or package of verl's configuration files."""
        from rlctl.plugins.bridges.verl.config_names import is_verls_library

        return is_verls_library(folder)

    def check_part(self, name: str, where: str) -> None:
        """Raise ConfigError if `name` is a configuration of a feature that rlctl lacks."""
        from rlctl.plugins.bridges.verl.config_names import check_name

        check_name(name, where)

    def recipe(self, verb: str, folder: str | None, name: str | None) -> tuple[str, list[str]]:
        """Return the recipe and overrides of `--config-path=folder --config-name=name`."""
        from rlctl.plugins.bridges.verl.config_names import recipe_of, settings_of

        found = recipe_of(verb, folder, name)
        return found, settings_of(name, found)

    def explain(self, name: str) -> tuple[str, str, Mapping[str, str]] | None:
        """Return kind, explanation and facts of a key that is renamed, dropped or refused."""
        found = self.translate(name, "VALUE")
        kind = "key of verl"
        if found.key not in (None, name) and known_key(found.key):
            return kind, "It has another name here.", {"use": found.key}
        if found.kind == "refused":
            text = found.text if found.feature else "Some values of it are not supported."
            return kind, text, {"instead": found.hint or ""}
        return (kind, f"It is not needed: {found.text}.", {}) if found.kind else None

    def aliases(self, key: str) -> Mapping[str, str]:
        """Return verl's names of a key of rlctl."""
        from rlctl.plugins.bridges.verl.translate import aliases

        return {"verl": ", ".join(aliases(key))}
