"""The exact command of SwanLab's documentation, with a small model at the path it names."""

from __future__ import annotations

import os
import shlex
from pathlib import Path

import pytest

from tests.documented import SWANLAB
from tests.e2e.command import metrics, rlctl, train
from tests.models import write_tiny_model
from tests.settings import given

GSM8K = Path(__file__).parents[1] / "data" / "gsm8k"


@pytest.mark.plugin("bridges")
@pytest.mark.slow
@pytest.mark.soak
def test_documented_command_trains_and_logs_to_swanlab(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("swanlab")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("SWANLAB_MODE", "offline")
    data = tmp_path / "data" / "gsm8k"
    source = tmp_path / "source"  # the documented batch needs more rows than the extract has
    source.mkdir()
    (source / "train.jsonl").write_text((GSM8K / "train.jsonl").read_text() * 15)
    (source / "test.jsonl").write_text((GSM8K / "test.jsonl").read_text())
    rlctl("prep", "gsm8k", "--source", source, "--out", data, cwd=tmp_path)
    model = tmp_path / "Qwen" / "Qwen2.5-0.5B-Instruct"
    write_tiny_model(model, max_position_embeddings=1024)
    shown = rlctl("data", "show", data / "train.parquet", "--model", model, "-n", 1, cwd=tmp_path)
    assert "Natalia" in shown.stdout
    words = [os.path.expandvars(word) for word in shlex.split(SWANLAB)]
    # A random model scores 0 on GSM8K and would learn nothing: reward long responses instead.
    longer = (
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    return len(solution_str)\n"
    )
    (tmp_path / "longer.py").write_text(longer)
    short = given(train_rows=300, val_rows=8, threads=1, response=8, steps=1, device="cpu")
    run = train("ppo", "swan", *words, *short, *given(reward="longer.py"), cwd=tmp_path)
    step = metrics(run)[-1]
    assert step["training/global_step"] == 1
    assert step["actor/grad_norm"] > 0
    assert step["critic/grad_norm"] > 0
    assert any(name.startswith("val-core/openai/gsm8k/") for name in step)
    (written,) = run.glob("swanlog/run-*/*.swanlab")
    assert b"critic/score/mean" in written.read_bytes()
