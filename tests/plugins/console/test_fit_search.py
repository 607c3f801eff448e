"""`rlctl fit`: meshes and micro-batches that the planner's estimate allows."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path
from typing import IO

import pytest
from transformers import Qwen2Config

from rlctl.__main__ import main
from rlctl.errors import RlctlError, UsageError
from rlctl.plugins.console.fit import fits
from rlctl.plugins.console.fit.fit_search import ENOUGH, Search
from rlctl.plugins.console.fit.fits import Mesh, meshes, try_step
from rlctl.recipes.compose import compose
from rlctl.runtime.planning.known_gpus import GPUS, MIB, find_device, parse_size

SEVEN_B = Qwen2Config(
    hidden_size=3584,
    intermediate_size=18944,
    num_hidden_layers=28,
    num_attention_heads=28,
    num_key_value_heads=4,
    vocab_size=152064,
    tie_word_embeddings=False,
    architectures=["Qwen2ForCausalLM"],
)


@pytest.fixture(scope="module")
def seven_b(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with only the config.json of a model of 7.6 billion parameters."""
    folder = tmp_path_factory.mktemp("qwen")
    SEVEN_B.save_pretrained(folder)
    return folder


def write_32b(folder: Path) -> Path:
    """Write only the config.json of a model of 32 billion parameters."""
    sizes = {"hidden_size": 5120, "intermediate_size": 27648, "num_hidden_layers": 64}
    heads = {"num_attention_heads": 40, "num_key_value_heads": 8, "layer_types": None}
    Qwen2Config(**SEVEN_B.to_dict() | sizes | heads).save_pretrained(folder)
    return folder


def search(model: Path | str, device: str, *overrides: str, verb: str = "grpo") -> Search:
    given = [f"actor_rollout_ref.model.path={model}", "data.train_files=[quickstart]", *overrides]
    recipe = compose(f"{verb}_trainer", given)
    return Search.of(recipe, recipe.config, find_device(device))


@pytest.fixture(scope="module")
def on_h100(seven_b: Path) -> Search:
    return search(seven_b, "H100", "data.max_response_length=3072")


def test_more_devices_allow_larger_micro_batches_or_faster_settings(on_h100: Search) -> None:
    fits = [on_h100.best(mesh) for mesh in meshes(8, 2)]
    assert [each.mesh.devices for each in fits] == [1, 2, 4, 8, 16]
    # Weights and moments take 12 bytes per parameter: 91 GB.
    assert "offload" in fits[0].savings
    assert "offload" not in fits[3].savings
    assert all(0 < each.peak <= on_h100.usable for each in fits)
    assert fits[4].rows >= ENOUGH // on_h100.longest


def test_the_micro_batch_is_the_largest_one(on_h100: Search) -> None:
    fit = on_h100.best(Mesh(1, 8))
    assert fit.tokens == fit.rows * on_h100.longest
    assert on_h100.with_rows(fit, fit.rows).peak == fit.peak <= on_h100.usable
    assert on_h100.with_rows(fit, fit.rows + 1).peak > on_h100.usable


def test_the_overrides_compose_to_the_same_estimate(seven_b: Path, on_h100: Search) -> None:
    fit = on_h100.best(Mesh(1, 8))
    assert f"actor_rollout_ref.actor.ppo_max_token_len_per_gpu={fit.tokens}" in fit.overrides
    assert "trainer.n_gpus_per_node=8" in fit.overrides
    again = search(seven_b, "H100", "data.max_response_length=3072", *fit.overrides)
    assert again.best(fit.mesh).peak == pytest.approx(fit.peak)


def test_vllm_of_32_billion_parameters_is_divided_over_ranks(tmp_path: Path) -> None:
    """61 GiB of weights fit no share of a GPU that also has the trainer's state."""
    wanted = search(write_32b(tmp_path), "A100", "data.max_response_length=3072")
    fit = wanted.best(Mesh(1, 8))
    assert fit.rows > 0
    assert fit.cached >= 32
    values = dict(each.split("=", 1) for each in fit.overrides)
    tensor = int(values["actor_rollout_ref.rollout.tensor_model_parallel_size"])
    share = float(values["actor_rollout_ref.rollout.gpu_memory_utilization"])
    assert tensor in (2, 4, 8)
    assert 61 / tensor < share * 80
    one = "actor_rollout_ref.rollout.tensor_model_parallel_size=1"
    whole = search(tmp_path, "A100", "data.max_response_length=3072", one).best(Mesh(1, 8))
    assert 0 < whole.cached < 32
    assert "offload" in whole.savings


def test_vllm_in_a_pool_of_its_own_leaves_memory_to_cuda_and_nccl(tmp_path: Path) -> None:
    """61 GiB of weights are divided over ranks of the pool, whose devices have no other state."""
    pools = "trainer.placement.pools={main: 8, engines: 4}"
    own = ["actor_rollout_ref.rollout.name=vllm", "trainer.placement.rollout=engines", pools]
    wanted = search(write_32b(tmp_path), "H100", *own)
    fit = wanted.best(Mesh(1, 12))
    assert fit.rows > 0
    assert fit.cached >= 32
    values = dict(each.split("=", 1) for each in fit.overrides)
    assert values["actor_rollout_ref.rollout.tensor_model_parallel_size"] in ("2", "4")
    assert values["actor_rollout_ref.rollout.gpu_memory_utilization"] == "0.85"


def test_what_fits_nowhere_is_reported_with_all_savings(tmp_path: Path) -> None:
    """Weights, gradients and moments alone take 490 GiB without savings."""
    assert search(write_32b(tmp_path), "H100").best(Mesh(1, 1)).peak < 200 * 2**30


def test_an_engine_is_on_one_node_or_on_several_whole_ones(tmp_path: Path) -> None:
    heads = {"num_attention_heads": 48, "num_key_value_heads": 48, "layer_types": None}
    Qwen2Config(**SEVEN_B.to_dict() | heads | {"hidden_size": 3072}).save_pretrained(tmp_path)
    wanted = search(tmp_path, "H100")
    assert wanted._engine_ranks(Mesh(1, 8)) == [1, 2, 4, 8]
    assert wanted._engine_ranks(Mesh(2, 8)) == [1, 2, 4, 8, 16]
    assert wanted._engine_ranks(Mesh(3, 8)) == [1, 2, 4, 8, 24]


def test_nodes_share_one_copy_before_anything_is_offloaded(seven_b: Path, tmp_path: Path) -> None:
    response = "data.max_response_length=3072"
    large = search(write_32b(tmp_path), "H100", response).best(Mesh(4, 8))
    assert large.rows > 0
    assert large.mesh.fsdp_size == -1
    assert "offload" not in large.savings
    small = search(seven_b, "H100", response).best(Mesh(2, 8))
    assert small.mesh.fsdp_size == 8, "a copy on each node fits as well"


def test_settings_of_the_user_stay(seven_b: Path) -> None:
    key = "actor_rollout_ref.model.enable_gradient_checkpointing"
    fit = search(seven_b, "H200", f"{key}=true").best(Mesh(1, 8))
    assert not any(key in each for each in fit.overrides)


def test_micro_batches_in_rows(seven_b: Path) -> None:
    fixed = "actor_rollout_ref.actor.use_dynamic_bsz=false"
    rows = "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu"
    fit = search(seven_b, "H200", fixed, f"{rows}=1").best(Mesh(1, 8))
    assert fit.rows > 1
    assert f"{rows}={fit.rows}" in fit.overrides
    assert not any("actor.ppo_max_token_len" in each for each in fit.overrides)


def test_rows_that_cannot_be_divided_are_a_reason(seven_b: Path) -> None:
    batch = ["data.train_batch_size=4", "actor_rollout_ref.actor.ppo_mini_batch_size=4"]
    fit = search(seven_b, "H100", *batch, "actor_rollout_ref.rollout.n=1", verb="ppo").best(
        Mesh(1, 8)
    )
    assert "cannot be split evenly over the 8 ranks" in fit.reason


def test_a_proposal_changes_the_training_where_nothing_fits(seven_b: Path) -> None:
    parts = ("actor_rollout_ref.actor", "actor_rollout_ref.ref")
    kept = [
        f"{part}.fsdp_config.{key}=false"
        for part in parts
        for key in ("offload_policy", "param_offload")
    ]
    one = search(seven_b, "H100", *kept)
    assert one.best(Mesh(1, 1)).rows == 0
    assert "actor_rollout_ref.model.lora_rank=32" in (one.propose(Mesh(1, 1)) or "")


def test_devices_by_name_and_size(monkeypatch: pytest.MonkeyPatch) -> None:
    assert find_device("nvidia h100").memory == GPUS["H100"] * MIB
    assert find_device("H100", "60GiB").memory == 60 * 2**30
    assert (find_device("cpu").kind, find_device("auto", "80GB").memory) == ("cpu", 80 * 10**9)
    assert parse_size("1.5 TB") == 1_500_000_000_000
    with pytest.raises(UsageError, match="unknown device 'H10O'") as caught:
        find_device("H10O")
    assert caught.value.problems[0].fix == ("H10O", "H100")
    for wrong in ("big", "0GB", "1..5GB", "-80GB"):
        with pytest.raises(UsageError, match="is not a memory size"):
            parse_size(wrong)


def test_the_command_prints_a_table_and_overrides(
    seven_b: Path, here: Path, capsys: pytest.CaptureFixture
) -> None:
    words = ["fit", "grpo", "-m", str(seven_b), "--device", "H200", "--devices", "8"]
    assert main(words) == 0
    out = capsys.readouterr().out
    assert "← cheapest" in out
    command = shlex.split(out.partition("rlctl train")[2].replace("\\\n", " "))
    assert command[:2] == ["grpo", f"actor_rollout_ref.model.path={seven_b}"]
    compose("grpo_trainer", [*command[1:], "data.train_files=[quickstart]"])
    assert main([*words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["fits"][found["cheapest"]]["rows"] > 0
    assert not list(here.iterdir())
    assert main(["fit", "grpo", "-m", str(seven_b), "--device", "T4", "--devices", "1"]) == 7
    assert "nothing fits" in capsys.readouterr().err
    assert main([*words, "--try"]) == 7
    assert "  help: leave out --try for the estimate\n" in capsys.readouterr().err


STEP = """
import json, pathlib, sys
root = next(word for word in sys.argv if word.startswith("trainer.run_dir=")).partition("=")[2]
assert "trainer.total_training_steps=1" in sys.argv
assert ("--inline" in sys.argv) == (sys.argv[1] == "cpu")
if sys.argv[2] == "fails":
    sys.exit("no such thing")
if sys.argv[2] == "starves":
    sys.exit(7)
run = pathlib.Path(root, "trial", "trial")
run.mkdir(parents=True)
row = {"step": 1, "perf/max_memory_allocated_gb": 3.0}
(run / "metrics.jsonl").write_text(json.dumps(row) + "\\n")
held = bytearray(300 << 20)
import time
time.sleep(0.3)
"""


@pytest.fixture
def step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace `rlctl train` in trials by a small process, which takes 300 MiB."""

    def start(words: list[str], log: IO[bytes]) -> subprocess.Popen[bytes]:
        return subprocess.Popen([sys.executable, "-c", STEP, *words], stdout=log, stderr=log)

    monkeypatch.setattr(fits, "start_rlctl", start)


@pytest.mark.usefixtures("step")
def test_a_trial_measures_the_peak_of_the_process_or_of_the_gpu() -> None:
    peak = try_step(["cpu", "works"], cuda=False).peak or 0
    assert 300 << 20 < peak < 600 << 20
    assert try_step(["cuda", "works"], cuda=True).peak == 3 * 2**30
    assert try_step(["cpu", "starves"], cuda=False).peak is None
    with pytest.raises(RlctlError, match="failed with exit code 1") as caught:
        try_step(["cpu", "fails"], cuda=False)
    assert "no such thing" in str(caught.value)


@pytest.mark.parametrize(("failures", "code"), [(1, 0), (9, 7)])
def test_a_trial_without_memory_is_repeated_with_half_of_the_rows(
    failures: int,
    code: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
) -> None:
    tried: list[str] = []

    def attempt(words: list[str], *, cuda: bool) -> fits.Trial:
        key = "actor_rollout_ref.actor.ppo_max_token_len_per_gpu="
        tried.append(next(word for word in words if word.startswith(key)).removeprefix(key))
        return fits.Trial(None if len(tried) <= failures else 2**30, 1.0)

    monkeypatch.setattr(fits, "try_step", attempt)
    lengths = ["data.max_prompt_length=96", "data.max_response_length=32"]
    words = ["fit", "grpo", "-m", "quickstart", "--device", "cpu", "--memory", "8GB", "--try"]
    assert main([*words, *lengths]) == code
    assert int(tried[1]) in (int(tried[0]) // 2, int(tried[0]) // 2 - 64)
    shown = capsys.readouterr()
    assert ("tried: one step" in shown.out) == (code == 0)
    assert ("one step is out of memory" in shown.err) == (code == 7)
