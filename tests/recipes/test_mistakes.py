"""Each mistake in a recipe or on the command line is one problem; all are reported at once."""

from __future__ import annotations

import random
import re
import shlex
from pathlib import Path

import pytest
import yaml

from rlctl.errors import ConfigError, NotFoundError, Problem
from rlctl.recipes.compose import compose
from rlctl.recipes.keys import known_key, schema_keys
from rlctl.recipes.layers import leaves


def problems(recipe: str | Path, *overrides: str) -> list[Problem]:
    with pytest.raises(ConfigError) as caught:
        compose(recipe, overrides)
    assert caught.value.exit_code == 3
    return caught.value.problems


def only(recipe: str | Path, *overrides: str) -> Problem:
    [problem] = problems(recipe, *overrides)
    return problem


def write(folder: Path, text: str, name: str = "mine.yaml") -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


@pytest.mark.parametrize("value", [2**63, -(2**63), 10**30, 10**400])
@pytest.mark.parametrize("key", ["data.max_prompt_length", "data.seed", "trainer.save_freq"])
def test_whole_numbers_that_no_array_holds_are_refused(key: str, value: int) -> None:
    found = only("ppo", f"{key}={value}")
    assert (found.message.startswith(f"{key} should be a "), f"not {value}" in found.message) == (
        True,
        True,
    )
    assert found.fix is None or str(value) not in found.fix[1]


NULLABLE = [key.name for key in schema_keys().values() if key.nullable]


@pytest.mark.parametrize("written", ["''", "", '""', "${oc.env:NOT_SET_HERE,''}"])
def test_an_empty_text_is_null_for_every_nullable_key(written: str) -> None:
    assert len(NULLABLE) > 80
    base = ["data.train_files=x", "actor_rollout_ref.model.path=y"]
    recipe = compose("ppo_trainer", [*base, *(f"{name}={written}" for name in NULLABLE)])
    values = leaves(recipe.container)
    assert {name: values[name] for name in NULLABLE} == dict.fromkeys(NULLABLE)


@pytest.mark.plugin("bridges")
def test_an_empty_text_is_null_in_files_and_under_names_of_verl(tmp_path: Path) -> None:
    text = "defaults: [ppo, _self_]\ntrainer:\n  mirror: ''\n  default_hdfs_dir: ''\n"
    recipe = compose(write(tmp_path, text), ["custom_reward_function.path=''"])
    assert recipe.config.trainer.mirror is None
    assert recipe.config.reward.custom_reward_function.path is None
    assert only("ppo", "trainer.project_name=''").message == (
        "trainer.project_name should be text, not ''"
    )


@pytest.mark.parametrize(
    "written", ["{entropy_coeff: ${trainer.seed}}", "{\n    entropy_coeff: ${trainer.seed}\n  }"]
)
def test_a_reference_inside_braces_is_to_be_quoted(written: str, tmp_path: Path) -> None:
    text = f"defaults: [ppo, _self_]\nactor_rollout_ref:\n  actor: {written}\n"
    hint = only(write(tmp_path, text)).hint
    assert hint == 'quote a reference inside braces: {key: "${other.key}"}'
    repaired = text.replace("${trainer.seed}", '"${trainer.seed}"')
    composed = compose(write(tmp_path, repaired)).config
    assert composed.actor_rollout_ref.actor.entropy_coeff == composed.trainer.seed
    other = only(write(tmp_path, text.replace("${trainer.seed}", "[1")))
    assert other.hint == "check indentation, colons and quotes there"


# Override, message and hint.
MISTAKES = """
trainer.total_epoch=3
  unknown key trainer.total_epoch
  did you mean trainer.total_epochs?
lr=3
  unknown key lr
  did you mean actor_rollout_ref.actor.optim.lr or critic.optim.lr or reward.reward_model.optim.lr?
+zzzz.yyyyyyyy=1
  unknown key zzzz.yyyyyyyy
  `rlctl config keys WORD` finds keys
~zzzz.yyyyyyyy
  unknown key zzzz.yyyyyyyy
  `rlctl config keys WORD` finds keys
~trainer.sed
  unknown key trainer.sed
  did you mean trainer.seed
trainer=3
  part trainer/3 does not exist
  parts in trainer/: local; to set a key of the section trainer: trainer.total_epochs=…
trainer.keep_best=x
  trainer.keep_best is a section, not a value (given: 'x')
  such as trainer.keep_best.metric
trainer.keep_best=null
  trainer.keep_best is an empty section
  such as trainer.keep_best.metric
trainer.total_epochs=abc
  trainer.total_epochs should be a whole number ≥ 1, not 'abc'
  passes over
actor_rollout_ref.actor.optim.lr=nan
  actor_rollout_ref.actor.optim.lr should be a number ≥ 0, not nan
  rate
trainer.experiment_name=None
  trainer.experiment_name is the text 'None'
  trainer.experiment_name=null
trainer.logger.0=x
  trainer.logger is a list of text: it has no keys below it
  as a whole
trainer.placement.pools={a: 0}
  trainer.placement.pools.a should be a whole number ≥ 1, not 0
  devices
trainer.placement.pools=3
  trainer.placement.pools should be a mapping, not 3
  {name: value}
trainer.total_epochs
  'trainer.total_epochs' is not key=value
  trainer.total_epochs=VALUE
=3
  '' is not a key
  write key=VALUE
trainer.total_epochs=1,2
  trainer.total_epochs=1,2 has several values
  rlctl sweep
data.seed=range(1,3)
  data.seed=range(1,3) has several values
  rlctl sweep
nogroup@critic.optim=adamw
  group nogroup does not exist
  optim
~trainer
  trainer cannot be removed
  trainer=local
~trainer.seed
  trainer.seed cannot be removed
  set a different value
hydra.run.dir=x
  hydra.run.dir is not supported
  hydra.searchpath
hydra.searchpath=[nowhere]
  the search path nowhere is not a folder
  nowhere
trainer.seed=${trainer.sed}
  trainer.seed refers to trainer.sed, which does not exist
  did you mean trainer.seed
trainer.run_dir=${oc.env:RLCTL_NOPE}
  the environment variable RLCTL_NOPE is not set (trainer.run_dir needs it)
  export
data.val_files=["a.parquet","${oc.env:RLCTL_NOPE}/b.parquet"]
  the environment variable RLCTL_NOPE is not set (data.val_files needs it)
  export
data.train_files=[{path: a, wieght: 1}]
  data.train_files should be a list of text or {path, weight}, not [{'path': 'a', 'wieght': 1}]
  {path: FILE, weight: NUMBER}
data.train_files={path: a.parquet, weight: 1}
  data.train_files is a list of text or {path, weight}: it has no keys below it
  set data.train_files=[…] as a whole
"""
OF_VERL = """
trainer.default_hdfs_dir=hdfs://x
  trainer.default_hdfs_dir=hdfs://x is not supported
  trainer.mirror=hdfs://x
actor_rollout_ref.rollout.dtype=float16
  actor_rollout_ref.rollout.dtype=float16 is not supported
  set actor_rollout_ref.model.dtype=float16
"""


def cases(mistakes: str) -> list[str]:
    return re.split(r"\n(?! )", mistakes.strip())


@pytest.mark.parametrize(
    "mistake",
    [
        *cases(MISTAKES),
        *(pytest.param(case, marks=pytest.mark.plugin("bridges")) for case in cases(OF_VERL)),
    ],
)
def test_mistake_on_the_command_line_is_reported(mistake: str) -> None:
    override, message, hint = mistake.split("\n  ")
    problem = only("ppo", override)
    assert problem.message == message
    assert problem.where == f"override {override}"
    assert hint in (problem.hint or "")


@pytest.mark.parametrize("value", ["s3://x/y?z=1", "it's", "a=b", 'say "hi" = \\now', "#y"])
def test_unparsable_override_has_a_quoted_hint(value: str) -> None:
    problem = only("ppo", "trainer.seed=2", f"data.train_files={value}")
    assert problem.message == "the value of data.train_files cannot be parsed"
    quoted = (problem.hint or "").removeprefix("quote it: ")
    assert compose("ppo", shlex.split(quoted)).config.data.train_files == (value,)


@pytest.mark.parametrize(
    ("value", "items"),
    [("[größe]", ("größe",)), ("[größe, a b,x-1]", ("größe", "a b", "x-1")), ("[a#]", ("a#",))],
)
def test_the_hint_for_a_list_is_a_list(value: str, items: tuple[str, ...]) -> None:
    problem = only("ppo", f"trainer.tracking.tags={value}")
    quoted = (problem.hint or "").removeprefix("quote it: ")
    assert compose("ppo", shlex.split(quoted)).config.trainer.tracking.tags == items


# Line of the mistake and text of the recipe (BASE has three lines), message and hint.
RECIPES = r"""
5 BASE trainer:\n  total_epoch: 3\n
  unknown key trainer.total_epoch
  did you mean trainer.total_epochs?
4 BASE data:\n
  data is an empty section
  data.train_files
4 BASE data: {seed: {a: 1}}\n
  data.seed is a whole number ≥ 0 and ≤ 4294967295: it has no keys below it
  as a whole
5 BASE data:\n  trainer.seed: 1\n
  unknown key data.trainer.seed
  trainer.seed
4 BASE trainer.seed: 1\n
  the key trainer.seed contains dots
  nested
4 BASE trainer: {seed: 1, seed: 2}\n
  the key `trainer.seed` occurs twice
  first on line 4
4 BASE data: {on: 1}\n
  the key `on` is not text
  quotes
4 BASE hydra: {run: {dir: x}}\n
  unknown key hydra.run
  hydra.searchpath
4 BASE hydra: {searchpath: ['file://${oc.env:RLCTL_NOPE}']}\n
  the environment variable RLCTL_NOPE is not set
  export RLCTL_NOPE
1 \n
  this recipe does not include a base
  defaults: [ppo_trainer, _self_]
1 - a\n
  a recipe must be a mapping of keys, not list
1 defaults: ppo\n
  `defaults` must be a list
  [ppo_trainer, _self_]
1 defaults: [ppo]\ntrainer: {seed: 1}\n
  the defaults list lacks _self_
  - _self_
2 defaults:\n  - grop\n  - _self_\n
  part grop does not exist
  did you mean grpo?
3 defaults:\n  - ppo\n  - override optim@critic.optim: sgd\n  - _self_\n
  part optim/sgd does not exist
  existing parts: adamw
1 defaults: [../ppo, _self_]\n
  `..` is not allowed in a defaults list: ../ppo
  hydra.searchpath
"""
BASE = r"defaults:\n  - ppo\n  - _self_\n"


@pytest.mark.parametrize("mistake", re.split(r"\n(?! )", RECIPES.strip()))
def test_mistake_in_a_recipe_is_reported_with_its_line(tmp_path: Path, mistake: str) -> None:
    recipe, message, *hints = mistake.split("\n  ")
    line, _, text = recipe.replace("BASE ", BASE).partition(" ")
    path = write(tmp_path, text.replace(r"\n", "\n"))
    problem = only(path)
    assert problem.message.startswith(message)
    assert problem.where == f"{path}:{line}"
    assert all(hint in (problem.hint or "") for hint in hints)


def test_duplicate_and_circular_includes_are_reported(tmp_path: Path) -> None:
    twice = write(
        tmp_path, "defaults: [ppo, optim@critic.optim: adamw, _self_]\ntrainer: {seed: 1}\n"
    )
    assert "override GROUP: PART" in (only(twice).hint or "")
    a = write(tmp_path, "defaults: [b, _self_]\n", "a.yaml")
    write(tmp_path, "defaults: [a, _self_]\n", "b.yaml")
    assert only(a).message == f"a recipe includes itself: {a} -> {tmp_path / 'b.yaml'} -> {a}"


@pytest.mark.parametrize("text", ["a: [1\nb: 2\n", "trainer:\n\tseed: 1\n", "a: b: c\n"])
def test_invalid_yaml_is_reported(tmp_path: Path, text: str) -> None:
    path = write(tmp_path, text)
    problem = only(path)
    assert problem.message.startswith("invalid YAML: ")
    assert (problem.where or "").startswith(f"{path}:")


def test_missing_required_values_are_reported(tmp_path: Path) -> None:
    first, second = problems("ppo_trainer")
    assert (first.message, second.message) == (
        "data.train_files is not set",
        "actor_rollout_ref.model.path is not set",
    )
    assert "pass data.train_files=…" in (first.hint or "")


def test_incomplete_part_is_reported(tmp_path: Path) -> None:
    write(tmp_path, "lr: 1.0\nweight_decay: 0.5\n", "optim/mine.yaml")
    path = write(tmp_path, "defaults: [ppo, override optim@critic.optim: mine, _self_]\n")
    problem = only(path)
    assert (
        problem.message
        == "critic.optim lacks betas, lr_warmup_steps, lr_warmup_steps_ratio, lr_scheduler_type "
        "and 5 more"
    )
    assert problem.where == str(tmp_path / "optim" / "mine.yaml")


def test_unknown_recipe_is_reported_with_suggestions() -> None:
    with pytest.raises(NotFoundError, match="did you mean grpo"):
        compose("grop")
    with pytest.raises(NotFoundError, match=r"no recipe '\.'"):
        compose(".")
    with pytest.raises(NotFoundError, match=r"shipped recipes: .*gridworld, grpo"):
        compose("some/where.yaml")


def test_all_problems_are_reported_at_once(tmp_path: Path) -> None:
    path = write(tmp_path, "defaults: [ppo, _self_]\ntrainer: {sed: 1, device: tpu}\ncritic:\n")
    found = problems(
        path,
        "a b=1",
        "trainer.seed=1,2",
        "data.seed=-1",
        "data.sead=1",
        "trainer.run_dir=${oc.env:RLCTL_NOPE}",
    )
    assert [problem.message.split()[0] for problem in found] == [
        "'a", "trainer.seed=1,2", "unknown", "critic", "unknown", "the", "data.seed",
        "trainer.device",
    ]  # fmt: skip


def typos(number: int) -> list[tuple[str, str]]:
    """Return (typo, key) pairs: one letter deleted, inserted, replaced or swapped."""
    rng = random.Random(7)
    letters = "abcdefghijklmnopqrstuvwxyz"
    keys = [key.name for key in schema_keys().values() if key.kind == "value"]
    found: dict[str, str] = {}
    while len(found) < number:
        key = rng.choice(keys)
        i = rng.choice([i for i, letter in enumerate(key) if letter.isalpha()])
        swap = key[:i] + key[i + 1 : i + 2] + key[i] + key[i + 2 :]
        made = rng.choice(
            [
                key[:i] + key[i + 1 :],
                key[:i] + rng.choice(letters) + key[i:],
                key[:i] + rng.choice(letters) + key[i + 1 :],
                swap,
            ]
        )
        if (
            known_key(made) is None
            and ".." not in made
            and not made.startswith(".")
            and not made.endswith(".")
        ):
            found[made] = key
    return list(found.items())


@pytest.mark.parametrize(
    "override",
    [
        "+data.apply_chat_template_kwargs={'a:b': {api_key: Qxy-11aa22}}",
        "+data.apply_chat_template_kwargs.api_key=Qxy-11aa22,b",
        "+data.apply_chat_template_kwargs.api_key=Qxy-11aa22:{",
    ],
)
def test_a_hint_does_not_repeat_a_secret(override: str) -> None:
    assert "Qxy-11aa22" not in str(only("ppo", override))


def test_a_wrong_value_is_one_problem_at_its_own_key() -> None:
    """The critic's mini-batch size refers to the actor's."""
    problem = only("ppo", "actor_rollout_ref.actor.ppo_mini_batch_size=abc")
    assert problem.message.startswith("actor_rollout_ref.actor.ppo_mini_batch_size should be")


def test_typos_in_a_recipe_get_the_right_suggestion(tmp_path: Path) -> None:
    wrong_keys: dict[str, str] = {}
    for wrong, meant in typos(250):
        names = wrong.split(".")
        depth = next(i for i in range(1, len(names) + 1) if known_key(".".join(names[:i])) is None)
        if wrong.count(".") == meant.count("."):
            wrong_keys.setdefault(".".join(names[:depth]), ".".join(meant.split(".")[:depth]))
    chosen = dict(list(wrong_keys.items())[:100])
    assert len(chosen) == 100
    tree: dict[str, object] = {"defaults": ["ppo", "_self_"]}
    for wrong in chosen:
        node = tree
        *sections, leaf = wrong.split(".")
        for section in sections:
            node = node.setdefault(section, {})  # type: ignore[assignment]
        node[leaf] = 1
    found = problems(write(tmp_path, yaml.safe_dump(tree, sort_keys=False)))
    by_key = {problem.message.removeprefix("unknown key "): problem for problem in found}
    assert set(by_key) == set(chosen)
    missed = [
        (wrong, meant, by_key[wrong].hint)
        for wrong, meant in chosen.items()
        if not first(by_key[wrong], meant)
    ]
    assert len(missed) <= 5, missed


def first(problem: Problem, meant: str) -> bool:
    """Return True if the first suggestion is the intended key."""
    return (problem.hint or "").removeprefix("did you mean ").split(" or ")[0].rstrip("?") == meant
