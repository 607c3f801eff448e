"""GPU ladder on a CPU: its processes, their order, counts, tables and packages."""

from __future__ import annotations

import argparse
import json
import os
from importlib import import_module
from importlib.metadata import distributions
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.gpu import correctness, report, rungs
from benchmarks.gpu.__main__ import climb
from benchmarks.gpu.entry_points import ROOT, python_path
from benchmarks.gpu.ray_actor import _compiles_ahead
from benchmarks.gpu.recorder import NOTE, Settings
from benchmarks.gpu.rungs import RUNGS, Rung
from benchmarks.gpu.shapes import write_config
from benchmarks.gpu.throughput import useful_flops_of
from benchmarks.gpu.work import pool
from benchmarks.weight_sync_model import measured
from rlctl.runtime.model.costs import Costs

RUNG = """
import os, sys, time

def measure(settings, recorder):
    recorder.row("kernels", device=settings.device, tiny=settings.tiny)
    with recorder.attempt("one", optional=True):
        raise ValueError("no such kernel")
    recorder.enough("two", 1e6)
    {end}
"""


@pytest.mark.parametrize(
    ("end", "seconds", "why"),
    [
        pytest.param("pass", 60.0, None, marks=pytest.mark.soak),
        ("sys.exit('out of luck')", 60.0, "exit code 1: out of luck"),
        ("os.kill(os.getpid(), 9)", 60.0, "exit code -9: "),
        ("time.sleep(600)", 5.0, "ended after 5 s"),
    ],
    ids=["whole", "failed", "killed", "late"],
)
def test_a_rung_that_ends_early_keeps_its_rows(
    end: str, seconds: float, why: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "suite").mkdir()
    (tmp_path / "suite" / "fake.py").write_text(RUNG.format(end=end))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(rungs, "GRACE_S", 3.0)
    settings = Settings("cpu", tiny=True)
    found = rungs.run(Rung("fake", "suite.fake:measure"), settings, seconds, tmp_path)
    row, optional, skipped, *rest = found
    assert row == {"rung": "fake", "table": "kernels", "device": "cpu", "tiny": True}
    assert optional["why"] == "ValueError: no such kernel"
    assert "are left" in str(skipped["why"])
    assert [str(note["why"]).startswith(why or "") for note in rest] == [True] * bool(why)
    assert report.has_failed(found) is (why is not None)


@pytest.mark.parametrize("keep_going", [False, True])
def test_the_ladder_stops_at_the_first_rung_that_fails(
    keep_going: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    results = {"a": [{"rung": "a", "table": "kernels", "ok": True}]}
    results["c"] = [{"rung": "c", "table": NOTE, "what": "x", "why": "y", "failed": True}]
    monkeypatch.setattr(rungs, "run", lambda rung, *_: results[rung.name])
    results["d"] = results["a"]
    needs = {"b": ("no_such_package",)}
    chosen = [Rung(name, "nowhere:measure", needs.get(name, ())) for name in "abcd"]
    given = argparse.Namespace(device="cpu", tiny=True, minutes=1.0, out=tmp_path)
    given.keep_going = keep_going
    states = [row["state"] for row in climb(chosen, given) if row["table"] == report.LADDER]
    assert (
        states == ["works", "skipped without no_such_package", "failed", "works"][: 3 + keep_going]
    )
    assert "c: x: y" in capsys.readouterr().out
    written = json.loads((tmp_path / "results.json").read_text())
    assert len(written) == 5 + 2 * keep_going
    assert "| b | skipped without no such package |" in (tmp_path / "results.md").read_text()


def test_every_rung_has_its_function() -> None:
    for rung in RUNGS:
        module, _, name = rung.function.partition(":")
        if not rung.missing:
            assert callable(getattr(import_module(module), name)), rung.name


@pytest.mark.parametrize(
    ("name", "num_parameters"),
    [
        ("Qwen2.5-0.5B", 494_032_768),
        ("Qwen2.5-7B", 7_615_616_512),
        ("Qwen3-0.6B", 596_049_920),
        ("Qwen3-1.7B", 1_720_574_976),
        ("Qwen3-4B", 4_022_468_096),
    ],
)
def test_shapes_are_those_of_the_published_models(
    name: str, num_parameters: int, tmp_path: Path
) -> None:
    config = AutoConfig.from_pretrained(write_config(tmp_path, name, tiny=False))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    assert sum(each.numel() for each in model.parameters()) == num_parameters


def test_mfu_is_counted_as_in_the_published_table(tmp_path: Path) -> None:
    # prime-rl, Qwen3-0.6B, 1 x H100, 16k: 11,896 tokens/s are an MFU of 11.08 %.
    config = AutoConfig.from_pretrained(write_config(tmp_path, "Qwen3-0.6B", tiny=False))
    shape = Costs.from_config(config)
    assert shape is not None
    per_token = useful_flops_of(shape, 1, 16384) / 16384
    assert 11_896 * per_token / 989.4e12 == pytest.approx(0.1108, rel=2e-3)


@pytest.mark.soak  # CI runs `make gpu` on the CPU, with float32
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_correctness_holds_on_a_cpu(dtype: torch.dtype) -> None:
    with pool("cpu"):
        checks = {**correctness.CHECKS, "FSDP": correctness.sharded_error}
        for name, check in checks.items():
            error, limit = check("cpu", dtype)
            assert error <= limit, name


def test_a_checkout_has_its_entry_points_without_installation(tmp_path: Path) -> None:
    first, second, *_ = python_path(tmp_path).split(os.pathsep)
    assert (first, second) == (str(ROOT), str(tmp_path))
    points = next(tmp_path.glob("*.dist-info/entry_points.txt")).read_text()
    assert "[rlctl.engines]" in points
    assert "hf = rlctl.runtime.rollout.hf:HFEngine" in points
    needs = next(iter(distributions(name="rlctl", path=[second]))).requires
    assert needs is not None
    assert any(each.startswith("vllm>=") for each in needs)


def test_an_option_of_compilation_that_is_off_by_default_does_not_fail_a_rung() -> None:
    compiled = torch.compile(torch.nn.functional.silu, fullgraph=True)
    with torch._dynamo.config.patch(enable_aot_compile=False):  # as in torch 2.11
        assert _compiles_ahead(compiled)


def test_a_rung_has_the_time_that_it_needs_and_its_output_is_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    limits: list[float] = []

    def run(rung: Rung, settings: Settings, seconds: float, out: Path) -> list[report.Row]:
        limits.append(seconds)
        (out / f"{rung.name}.log").write_text("first line\nlast line\n")
        return [{"rung": rung.name, "table": NOTE, "what": "a", "why": "b", "failed": True}]

    monkeypatch.setattr(rungs, "run", run)
    given = {"device": "cpu", "tiny": False, "minutes": 3.0, "out": tmp_path, "keep_going": True}
    climb([Rung("a", "a:a"), Rung("b", "b:b", minutes=8.0)], argparse.Namespace(**given))
    climb([Rung("b", "b:b", minutes=8.0)], argparse.Namespace(**given | {"tiny": True}))
    assert limits == [180.0, 480.0, 180.0]
    assert "first line\nlast line\na: failed" in capsys.readouterr().out


@pytest.mark.parametrize(("scale", "limit_s"), [(("7B", 8, 8), 0.6), (("32B", 32, 32), 3.0)])
def test_a_sync_is_as_fast_as_its_link(scale: tuple[str, int, int], limit_s: float) -> None:
    _, ranks, _ = scale
    row = measured(*scale, bandwidth=50e9, latency=6e-5)
    assert row["seconds"] <= limit_s
    assert row["calls of the group"] == (ranks + 1) * row["buckets"] + 1
