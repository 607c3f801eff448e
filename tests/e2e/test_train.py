"""Complete runs through the command line: real Ray, real FSDP2 over gloo, real files."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.e2e.command import metrics, reproducible, rlctl, train
from tests.settings import given


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [2, pytest.param(1, marks=pytest.mark.soak)])
def test_ppo_inline_and_on_ray(num_ranks: int, folder: Path, settings: list[str]) -> None:
    """Run one seed twice: equal bit for bit on one rank of Ray, nearly so on two."""
    settings = [
        *settings,
        "algorithm.use_kl_in_reward=true",
        "algorithm.kl_ctrl.type=adaptive",
        "actor_rollout_ref.actor.use_kl_loss=true",
        "actor_rollout_ref.actor.entropy_coeff=0.01",
    ]
    name = f"ray-{num_ranks}"
    ranks = f"trainer.n_gpus_per_node={num_ranks}"
    here = train("ppo", f"{name}-inline", "--inline", *settings, cwd=folder)
    there = train("ppo", name, *settings, ranks, cwd=folder)
    inline, on_ray = metrics(here), metrics(there)
    if num_ranks == 1:
        assert reproducible(here) == reproducible(there)
    assert len(inline) == len(on_ray) == 3
    for metric in """
        critic/score/mean response_length/mean actor/pg_loss actor/grad_norm critic/grad_norm
        critic/vf_loss
    """.split():
        assert on_ray[1][metric] == pytest.approx(inline[1][metric], rel=1e-3, abs=1e-6), metric
    record = json.loads((there / "run.json").read_text())
    assert (record["state"], record["exit_code"], record["total_steps"]) == ("finished", 0, 2)
    files = {"config.yaml", "origins.json", "metrics.jsonl", "events.jsonl", "generations"}
    assert {*files, "attempts"} <= {path.name for path in there.iterdir()}
    check_metrics(inline)


def check_metrics(steps: list[dict[str, Any]]) -> None:
    """Check the names of a step's metrics, and that its phases take most of its time."""
    step = steps[2]
    wanted = """
        actor/entropy actor/pg_loss actor/pg_clipfrac actor/pg_clipfrac_lower actor/ppo_kl
        actor/kl_loss actor/kl_coef actor/loss actor/grad_norm actor/lr
        actor/skipped_updates critic/vf_loss critic/vf_clipfrac critic/vpred_mean
        critic/grad_norm critic/lr critic/vf_explained_var critic/score/mean
        critic/rewards/max critic/advantages/min critic/returns/mean critic/values/mean
        response_length/mean response_length/clip_ratio prompt_length/mean timing_s/step
        timing_s/gen timing_s/reward timing_s/old_log_prob timing_s/update_weights
        timing_s/ref timing_s/values timing_s/adv timing_s/update_critic
        timing_s/update_actor timing_s/testing timing_per_token_ms/gen perf/throughput
        perf/time_per_step perf/total_num_tokens global_seqlen/mean training/global_step
        training/epoch training/rollout_probs_diff_mean training/rollout_probs_diff_max
        rollout_corr/kl
    """.split()
    assert [name for name in wanted if name not in step] == []
    assert any(name.startswith("val-core/rlctl/arithmetic/") for name in step)
    phases = [
        sum(
            value
            for name, value in row.items()
            if name.startswith("timing_s/") and name not in ("timing_s/step", "timing_s/testing")
        )
        / row["timing_s/step"]
        for row in steps[1:]
    ]
    assert max(phases) > 0.8  # the machine may be busy with something else between two phases
    assert max(phases) <= 1 + 1e-6
    assert step["training/rollout_probs_diff_max"] < 1e-4


def test_grpo_then_eval_then_generate(folder: Path, settings: list[str], shelf: Path) -> None:
    """Check that a checkpoint matches its manifest, loads in transformers and generates."""
    run = train("grpo", "group", "--inline", *settings, *given(n=4, save=2), cwd=folder)
    checkpoint = run / "checkpoints" / "step_000002"
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    on_disk = {
        str(path.relative_to(checkpoint)) for path in checkpoint.rglob("*") if path.is_file()
    } - {"manifest.json"}
    assert set(manifest["files"]) == on_disk
    assert json.loads((checkpoint / "state.json").read_text())["step"] == 2
    from transformers import AutoModelForCausalLM

    trained = AutoModelForCausalLM.from_pretrained(checkpoint / "huggingface").state_dict()
    before = AutoModelForCausalLM.from_pretrained(shelf / "model").state_dict()
    assert all(trained[name].shape == value.shape for name, value in before.items())
    assert any(not torch.equal(trained[name], value) for name, value in before.items())
    last = metrics(run)[-1]
    accuracy = "val-core/rlctl/arithmetic/acc/mean@1"
    evaluated = json.loads(rlctl("eval", "group", "--json", cwd=folder).stdout)
    assert evaluated[accuracy] == last[accuracy]
    words = ["generate", shelf / "model", "1 + 1?", "-n", 2, "--temperature", 1, "--json"]
    responses = json.loads(rlctl(*words, cwd=folder).stdout)
    assert [response["prompt"] for response in responses] == ["1 + 1?"] * 2


def test_sft_learns_the_solutions(folder: Path, settings: list[str]) -> None:
    settings = [*settings, *given(steps=12, validate=-1, lr=4e-2, mini_batch=8)]
    rows = metrics(train("sft", "taught", "--inline", *settings, cwd=folder))
    losses = [row["train/loss"] for row in rows if "train/loss" in row]
    assert losses[-1] < 0.7 * losses[0]
    assert not [name for row in rows for name in row if name.startswith(("critic/", "reward/"))]


def test_failing_reward_function_never_stops_a_run(
    folder: Path, settings: list[str], tmp_path: Path
) -> None:
    (tmp_path / "mine.py").write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None, bonus=0):\n"
        "    print('looking at', data_source)\n"
        "    if extra_info['index'] % 2:\n"
        "        raise ValueError('odd')\n"
        "    return {'score': 1 + bonus, 'length': len(solution_str)}\n"
    )
    settings = [
        *settings,
        f"reward.custom_reward_function.path={tmp_path}/mine.py",
        "+reward.custom_reward_function.reward_kwargs.bonus=2",
    ]
    trained = rlctl("train", "ppo", "--inline", "--name", "mine", *settings, cwd=folder, fork=True)
    # After the checks, output would break the live panel.
    assert "looking at" not in trained.stderr.partition("building the actor")[2]
    log = rlctl("logs", "mine", "--role", "reward", "--rank", "0", cwd=folder).stdout
    assert "looking at rlctl/arithmetic\n" in log
    step = metrics(folder / "runs" / "quickstart" / "mine")[1]
    assert step["critic/score/max"] == 3.0
    assert 0 < step["reward/num_failed"] < 8
    assert step["critic/score/mean"] == pytest.approx(3 * (8 - step["reward/num_failed"]) / 8)
    assert "reward/length/mean" in step


@pytest.mark.slow
@pytest.mark.soak
def test_run_for_all_users_has_no_file_that_only_its_owner_reads(
    tmp_path: Path, settings: list[str]
) -> None:
    """Ray's processes do not inherit the run's umask; safetensors has a mode of its own."""
    short = ["trainer.total_training_steps=1", "trainer.save_freq=1", "trainer.run_dir_access=all"]
    before = os.umask(0o077)
    try:
        rlctl("train", "grpo", "--name", "open", *settings, *short, cwd=tmp_path, process=True)
    finally:
        os.umask(before)
    files = list((tmp_path / "runs").rglob("*"))
    assert any(file.suffix == ".safetensors" for file in files)
    assert [file for file in files if not file.stat().st_mode & 0o004] == []
