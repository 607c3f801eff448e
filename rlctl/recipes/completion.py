"""What the TAB key offers for recipes and overrides. Imports neither Hydra nor anything else that is slow."""

from __future__ import annotations

from pathlib import Path

from rlctl.plugins import names
from rlctl.recipes.keys import schema_keys
from rlctl.recipes.sources import library_recipes

# Keys whose values are plug-ins, and the kind of plug-in.
_PLUGINS = {
    "algorithm.name": "algorithms",
    "actor_rollout_ref.rollout.name": "engines",
    "reward.functions": "rewards",
    "trainer.logger": "loggers",
    "data.sampler": "samplers",
}
# Keys whose values register themselves in modules that import torch, which would take seconds: a test compares these lists with those.
REGISTERED = {
    "algorithm.adv_estimator": (
        "gae", "grpo", "rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "remax", "opo", "gpg", "grpo_passk", "gdpo",
        "optimal_token_baseline",
    ),
    "actor_rollout_ref.actor.policy_loss.loss_mode": (
        "vanilla", "gspo", "cispo", "sapo", "gpg", "geo_mean", "dro", "clip_cov", "kl_cov", "dppo_tv", "dppo_kl",
    ),
}  # fmt: skip


def complete_override(incomplete: str) -> list[str]:
    """What may stand in place of a half-typed override: `trainer.to` gives `trainer.total_epochs=`, `trainer.device=` gives its values.

    Sections are offered one level at a time (`tr` gives `trainer.`). A leading `+` or `++` stays.
    """
    bare = incomplete.lstrip("+")
    sign = incomplete[: len(incomplete) - len(bare)]
    key, equals, value = bare.partition("=")
    if equals:
        return [
            f"{sign}{key}={choice}" for choice in _values(key, value) if choice.startswith(value)
        ]
    depth = key.count(".")
    entries = [
        entry
        for name, entry in schema_keys().items()
        if name.startswith(key) and name.count(".") == depth
    ]
    return [f"{sign}{entry.name}{'=' if entry.kind == 'value' else '.'}" for entry in entries]


def complete_key(incomplete: str) -> list[str]:
    """Full dotted keys that begin with what was typed, or else whose last part does."""
    keys = [name for name, entry in schema_keys().items() if entry.kind != "section"]
    return [name for name in keys if name.startswith(incomplete)] or [
        key for key in keys if key.rpartition(".")[2].startswith(incomplete)
    ]


def complete_recipe(incomplete: str) -> list[str]:
    """Names of shipped recipes, and YAML files and folders at the path that was begun."""
    shipped = [
        name
        for name in library_recipes()
        if name.startswith(incomplete) and not name.endswith("_trainer")
    ]
    head, slash, start = incomplete.rpartition("/")
    folder = Path(f"{head}{slash}").expanduser()
    entries = sorted(folder.iterdir()) if folder.is_dir() else []
    begun = [
        entry
        for entry in entries
        if entry.name.startswith(start) and (start or not entry.name.startswith("."))
    ]
    files = [f"{head}{slash}{entry.name}" for entry in begun if entry.suffix in (".yaml", ".yml")]
    return (
        shipped
        + files
        + [f"{head}{slash}{entry.name}/" for entry in begun if entry.is_dir() and (slash or start)]
    )


def _values(key: str, begun: str) -> list[str]:
    """Values of a key: its choices, plug-ins, null. In a list, what may follow the last comma."""
    entry = schema_keys().get(key)
    if entry is None:
        return []
    choices = list(entry.choices or REGISTERED.get(key, ())) or (
        names(_PLUGINS[key]) if key in _PLUGINS else []
    )
    if begun.startswith("["):
        head = begun[: max(begun.rfind(","), 0) + 1]
        taken = begun[1:].split(",")[:-1]
        return [f"{head}{choice}" for choice in choices if choice not in taken]
    return [*choices, "null"] if entry.nullable else choices
