"""`rlctl import verl`, verl's configuration names, and the guard of the tables of verl's keys."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from rlctl.__main__ import main
from rlctl.errors import ConfigError, NotFoundError
from rlctl.plugins.bridges.verl.config_names import recipe_of, settings_of
from rlctl.plugins.bridges.verl.script import import_script
from rlctl.plugins.bridges.verl.shell import Shell
from rlctl.plugins.bridges.verl.translate import translate
from rlctl.recipes.compose import compose
from rlctl.recipes.keys import schema_keys

SCRIPT = r"""
set -x
project=${PROJECT:-demo}   # a comment
prompt=$((1024 * 2)); response=$((prompt * 4))
ARGS=(
    data.max_prompt_length=${prompt}  # a comment
    "data.truncation='left'"
)
train="['$HOME/train.parquet']"
ray job submit --no-wait -- python3 -m verl.trainer.main_ppo \
    "${ARGS[@]}" data.train_files="$train" data.max_response_length=$response \
    actor_rollout_ref.model.path=m actor_rollout_ref.rollout.load_format=auto \
    +reward_model.reward_kwargs.max_resp_len=${response} \
    actor_rollout_ref.actor.optim.clip_grad=0.5 trainer.project_name="${project}" $@ 2>&1 | tee log
"""


def test_script_becomes_a_recipe(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "run.sh").write_text(SCRIPT)
    recipe = tmp_path / "mine.yaml"
    assert main(["import", "verl", str(tmp_path / "run.sh"), "-o", str(recipe)]) == 0
    assert yaml.safe_load(recipe.read_text())["data"] == {
        "max_prompt_length": 2048,
        "truncation": "left",
        "train_files": ["${oc.env:HOME}/train.parquet"],
        "max_response_length": 8192,
    }
    config = compose(recipe).config
    assert config.trainer.project_name == "demo"
    assert config.actor_rollout_ref.actor.grad_clip == 0.5
    assert main(["import", "verl", str(tmp_path / "run.sh"), "-o", str(recipe)]) == 5
    capsys.readouterr()
    assert main(["import", "verl", str(tmp_path / "run.sh"), "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["settings"]
    assert [row["kind"] for row in rows] == ["dropped", "dropped", "renamed"]


@pytest.mark.parametrize(
    ("settings", "method", "note"),
    [
        ("data.train_files=$HOME/data/gsm8k/train.parquet", "verl_strict", "scores GSM8K as verl"),
        ("data.train_files=math.parquet", None, "accuracies are not comparable"),
        ("data.seed=3", None, "accuracies are not comparable"),
        ("data.train_files=gsm8k.parquet custom_reward_function.path=f.py", None, None),
        ("data.train_files=gsm8k.parquet reward.gsm8k.method=flexible", "flexible", None),
    ],
)
def test_scores_of_gsm8k_remain_those_of_verl(
    settings: str, method: str | None, note: str | None, tmp_path: Path
) -> None:
    (tmp_path / "run.sh").write_text(f"python3 -m verl.trainer.main_ppo {settings}")
    imported = import_script(tmp_path / "run.sh")
    assert imported.values.get("reward.params.gsm8k.method") == method
    assert bool(imported.notes) == (note is not None)
    assert not note or note in f"{imported.notes}"
    assert not note or f"# {imported.notes[0]}" in imported.text()


@pytest.mark.parametrize(
    ("settings", "number"),
    [
        ("data.seed=3", 0),
        ("trainer.log_val_generations=10", 10),
        ("trainer.log_val_generations=-1", 0),
    ],
)
def test_the_number_of_logged_samples_remains_that_of_verl(
    settings: str, number: int, tmp_path: Path
) -> None:
    (tmp_path / "run.sh").write_text(f"python3 -m verl.trainer.main_ppo {settings}")
    assert import_script(tmp_path / "run.sh").values["trainer.log_val_generations"] == number


def test_values_without_effect_are_notes(tmp_path: Path) -> None:
    actor = "actor_rollout_ref.actor"
    settings = (
        f"algorithm.adv_estimator=grpo {actor}.policy_loss.loss_mode=sapo algorithm.gamma=0.9 "
        f"{actor}.loss_agg_mode=token-sum {actor}.clip_ratio=0.3 {actor}.optim.lr=1e-6"
    )
    (tmp_path / "run.sh").write_text(f"python3 -m verl.trainer.main_ppo {settings}\n")
    notes = import_script(tmp_path / "run.sh").notes
    unused = [note.partition(" has no effect: ")[0] for note in notes if "no effect" in note]
    assert set(unused) == {f"{actor}.loss_agg_mode", f"{actor}.clip_ratio", "algorithm.gamma"}


def test_refused_keys_of_a_script_are_listed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run.sh").write_text("python3 -m verl.trainer.main_ppo trainer.device=npu a=$(b)")
    assert main(["import", "verl", str(tmp_path / "run.sh")]) == 3
    shown = capsys.readouterr()
    assert "# refused: Ascend NPUs are not supported" in shown.out
    assert "# not expanded: a=$(b)" in shown.out
    (tmp_path / "run.sh").write_text("python3 -m recipe.prime.main_prime a=1")
    assert main(["import", "verl", str(tmp_path / "run.sh")]) == 3
    (tmp_path / "run.sh").write_text("echo")
    assert main(["import", "verl", str(tmp_path / "run.sh")]) == 4


ONE_STEP_OFF = """
python3 -m verl.experimental.one_step_off_policy.main_ppo \\
    --config-path=config --config-name=one_step_off_ppo_trainer.yaml \\
    actor_rollout_ref.hybrid_engine=False trainer.nnodes=1 trainer.n_gpus_per_node=6 \\
    rollout.nnodes=1 rollout.n_gpus_per_node=2 data.train_files=t actor_rollout_ref.model.path=m
"""


def test_one_step_off_script_becomes_a_recipe(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run.sh").write_text(ONE_STEP_OFF)
    recipe = tmp_path / "mine.yaml"
    assert main(["import", "verl", str(tmp_path / "run.sh"), "-o", str(recipe)]) == 0
    config = compose(recipe).config
    assert config.async_training.max_staleness == 1
    assert config.trainer.placement.pools == {"main": 6, "rollout": 2}
    assert config.algorithm.rollout_correction.bypass_mode is True
    fully = "python -m verl.experimental.fully_async_policy.fully_async_main rollout.test_freq=5"
    (tmp_path / "run.sh").write_text(fully)
    capsys.readouterr()
    assert main(["import", "verl", str(tmp_path / "run.sh")]) == 0
    shown = capsys.readouterr().out
    assert "schedule: eager" in shown
    assert "test_freq: 5" in shown


def test_shell_reads_quotes_arrays_and_defaults() -> None:
    text = "A=(1 '2 3')\nA+=(x)\nf \"${A[@]}\" ${B:-$HOME} 'a $b' \"${C:-q}\"\\ z; g"
    assert Shell(text).read() == [
        ["f", "1", "2 3", "x", "${oc.env:HOME}", "a $b", "q z"],
        ["g"],
    ]


def test_shell_gives_up_on_what_is_too_deep_to_compute() -> None:
    parts = [f"$(({'1+' * 20_000}1))", "$((7 / 0))"]
    shell = Shell(f"f {' '.join(parts)}")
    assert shell.read() == [["f", *parts]]
    assert shell.unread == parts


def test_conditions_and_loops_on_one_line_set_variables() -> None:
    text = """
        : "${MODEL:=Qwen/Qwen3-8B}"
        if [ -z "${FILE:-}" ]; then FILE="$HOME/a.parquet"; fi
        case $1 in
          big) SIZE=1024;;
          *) SIZE=64;;
        esac
        for lr in 1e-6 1e-5; do f $MODEL $FILE $SIZE $lr $(( ${WORLD:-8} / 4 )); done
    """
    shell = Shell(text)
    expected = ["f", "Qwen/Qwen3-8B", "${oc.env:HOME}/a.parquet", "64", "1e-6", "2"]
    assert expected in shell.read()
    assert "for lr in 1e-6 1e-5" in shell.unread


def test_values_that_only_a_shell_knows_are_left_out(tmp_path: Path) -> None:
    (tmp_path / "run.sh").write_text(
        "NAME=run_$(date)\n"
        "python3 -m verl.trainer.main_ppo data.seed=3 trainer.experiment_name=$NAME "
        "trainer.nnodes=${NODES:-$(count)}\n"
    )
    imported = import_script(tmp_path / "run.sh")
    assert imported.values == {"data.seed": 3, "trainer.log_val_generations": 0}
    assert imported.unread == ["trainer.experiment_name=run_$(date)", "trainer.nnodes=$(count)"]


def test_keys_of_verl_that_become_one_are_compared(caplog: pytest.LogCaptureFixture) -> None:
    words = ["trainer.max_actor_ckpt_to_keep=1", "trainer.max_critic_ckpt_to_keep={}"]
    assert compose("ppo", [words[0], words[1].format(1)]).config.trainer.max_ckpt_to_keep == 1
    assert not caplog.text
    assert compose("ppo", [words[0], words[1].format(2)]).config.trainer.max_ckpt_to_keep == 2
    assert "trainer.max_critic_ckpt_to_keep=2 replaces trainer.max_actor_ckpt_to_keep=1" in (
        caplog.text
    )


def test_configuration_names(tmp_path: Path) -> None:
    assert recipe_of("ppo", "config", "ppo_trainer.yaml") == "ppo_trainer"
    assert recipe_of("sft", None, None) == "sft_trainer"
    assert recipe_of("ppo", None, "one_step_off_ppo_trainer") == "ppo_trainer"
    assert "async_training.max_staleness=1" in settings_of(
        "one_step_off_ppo_trainer", "ppo_trainer"
    )
    assert settings_of("one_step_off_ppo_trainer", "own/one_step_off_ppo_trainer.yaml") == []
    (tmp_path / "megatron_mine.yaml").write_text("")
    assert recipe_of("ppo", str(tmp_path), "megatron_mine").endswith("megatron_mine.yaml")
    assert recipe_of("ppo", "./config", "ppo_megatron_trainer") == "ppo_trainer"
    with pytest.raises(NotFoundError, match="no configuration 'nope'"):
        recipe_of("ppo", None, "nope")


def test_file_of_a_user_may_search_verls_folder(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(
        "hydra: {searchpath: [file://verl/trainer/config]}\ndefaults: [ppo_trainer, _self_]\n"
        "data: {train_files: [a]}\nactor_rollout_ref: {hybrid_engine: true, model: {path: m}}\n"
    )
    assert compose(tmp_path / "mine.yaml").config.data.train_files == ("a",)
    (tmp_path / "other.yaml").write_text("defaults: [ppo_veomni_trainer, _self_]\n")
    with pytest.raises(ConfigError, match="VeOmni"):
        compose(tmp_path / "other.yaml")


@pytest.mark.parametrize("sft", [False, True])
def test_no_table_of_verl_hides_a_key_of_the_schema(sft: bool) -> None:
    for key in schema_keys().values():
        if key.kind != "section":
            assert translate(key.name, 7, sft=sft).key == key.name


def test_empty_texts_of_a_script_are_null(tmp_path: Path) -> None:
    (tmp_path / "run.sh").write_text(
        "OUT=\npython3 -m verl.trainer.main_ppo data.train_files=x actor_rollout_ref.model.path=m "
        'trainer.default_local_dir="$OUT" trainer.resume_from_path=\'\' data.val_files=""'
    )
    (tmp_path / "own.yaml").write_text(import_script(tmp_path / "run.sh").text())
    config = compose(tmp_path / "own.yaml").config
    assert config.trainer.default_local_dir is config.trainer.resume_from_path is None
    assert config.data.val_files is None
