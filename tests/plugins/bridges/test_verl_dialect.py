"""verl's tables are loaded for verl's keys and words, and for nothing else."""

from __future__ import annotations

import subprocess
import sys
from itertools import product

import pytest

from rlctl.plugins.bridges.verl import tables
from rlctl.plugins.bridges.verl.dialect import Verl
from rlctl.plugins.bridges.verl.translate import translate
from rlctl.recipes.compose import base_settings
from rlctl.recipes.keys import known_key, schema_keys
from rlctl.recipes.patterns import alternatives

COMPOSE = """
import sys
from rlctl.recipes.compose import compose

compose("ppo", sys.argv[1:])
print("rlctl.plugins.bridges.verl.tables" in sys.modules)
"""


@pytest.mark.parametrize(
    ("overrides", "is_loaded"),
    [
        ([], False),
        (["trainer.device=cpu", "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4"], False),
        (["reward.params.gsm8k.method=verl_strict", "data.truncation=left"], False),
        (["actor_rollout_ref.hybrid_engine=true"], True),
        (["critic.model.dtype=bf16"], True),
    ],
)
def test_tables_are_loaded_for_settings_of_verl(overrides: list[str], is_loaded: bool) -> None:
    printed = subprocess.check_output([sys.executable, "-c", COMPOSE, *overrides], text=True)
    assert printed.split() == [str(is_loaded)]


def test_the_dialect_reads_all_words_of_the_tables() -> None:
    words = [None, "", -1, 0, True, "x"]
    words += [word for _, here in tables.WORDS for word in here]
    words += [word for rule in tables.RULES for word in rule.words or ()]
    pairs = (*tables.WORDS, *tables.RENAMED, *tables.PLUGIN_SETTINGS)
    patterns = [*(rule.keys for rule in tables.RULES), *(pattern for pattern, _ in pairs)]
    names = {name.replace("*", "x") for pattern in patterns for name in alternatives(pattern)}
    keys = [*schema_keys(), *filter(known_key, names)]
    missed = [
        (key, word)
        for key, word in product(keys, words)
        if translate(key, word).kind and not Verl().reads(key, word)
    ]
    assert not missed


def test_no_default_is_a_word_of_verl() -> None:
    assert not [key for key, origin in base_settings().items() if Verl().reads(key, origin.value)]
