"""Optimizers by import path; their state in host memory changes no bit of the results."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rlctl.errors import ConfigError
from rlctl.recipes import schema
from rlctl.runtime.base.rank_info import RankInfo
from rlctl.runtime.model.sharding import local_part
from rlctl.runtime.workers import optimizers
from rlctl.runtime.workers.background import begin_writing
from rlctl.runtime.workers.optimizers import build_optimizer, check_optimizer, set_lr
from tests.configs import configured
from tests.distributed.ranks import on_ranks
from tests.models import write_tiny_model
from tests.second_device import NAME, SecondDevice, SecondTensor
from tests.workers import actor, save, update, weights

SHAPES = ((8, 4), (), (5,), (7, 8), (3,))
SECTION = "actor_rollout_ref.actor"
EIGHT_BITS = ("optimizer_impl=torchao.optim", "optimizer=AdamW8bit")


class Counted(torch.optim.SGD):
    """SGD with momentum that counts its steps, as a plug-in would."""

    def step(self, closure: Any = None) -> None:
        super().step(closure)
        for group in self.param_groups:
            for each in group["params"]:
                self.state[each]["step"] = self.state[each].get("step", torch.tensor(0.0)) + 1


def optim(*overrides: str) -> schema.Optim:
    settings = [f"{SECTION}.optim.{setting}" for setting in overrides]
    return configured("grpo", (), settings).actor_rollout_ref.actor.optim


def parameters(device: str, dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    draw = torch.Generator().manual_seed(1)
    values = [torch.randn(shape, generator=draw).to(dtype) for shape in SHAPES]
    return [nn.Parameter(each.to(device)) for each in values]


def train(
    given: schema.Optim, device: str, offload: bool, dtype: torch.dtype = torch.float32
) -> tuple[list[torch.Tensor], list[int]]:
    """Return the parameters after four steps, and the elements on the device in each block."""
    trained, on_device = parameters(device, dtype), []
    optimizer = build_optimizer(trained, given, offload)

    def count(*_: object) -> None:
        states = optimizer.state.values()
        tensors = [each for state in states for each in state.values()]
        on_device.append(sum(each.numel() for each in tensors if isinstance(each, SecondTensor)))

    optimizer.register_step_pre_hook(count)
    draw = torch.Generator().manual_seed(2)
    for step in range(4):
        for each in trained:
            each.grad = torch.randn(each.shape, generator=draw).to(dtype).to(device)
        if step == 2:
            trained[2].grad = None  # a parameter without a gradient is left alone
        set_lr(optimizer, 1e-2 / (step + 1))
        optimizer.step()
    if offload:
        held = [each for state in optimizer.state.values() for each in state.values()]
        assert not [each for each in held if isinstance(each, SecondTensor) and each.dim()]
    return [each.detach().cpu() for each in trained], on_device


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "overrides",
    [
        ["override_optimizer_config={fused: false}"],
        ["optimizer=Adamax"],
        [
            f"optimizer_impl={__name__}",
            "optimizer=Counted",
            "override_optimizer_config={fused: false, momentum: 0.9}",
        ],
    ],
)
def test_offload_is_exact(
    overrides: list[str], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four blocks, of which at most two are on the device."""
    monkeypatch.setattr(optimizers, "BLOCK", 40)
    given = optim(*overrides)
    with SecondDevice():
        plain, everything = train(given, NAME, offload=False, dtype=dtype)
        offloaded, parts = train(given, NAME, offload=True, dtype=dtype)
    for expected, found in zip(plain, offloaded, strict=True):
        assert torch.equal(expected, found)
    assert max(parts) < max(everything)
    host, _ = train(given, "cpu", offload=True, dtype=dtype)  # the state is there already
    assert all(torch.equal(*each) for each in zip(plain, host, strict=True))


def test_bfloat16_weights_train_as_float32_ones() -> None:
    """With equal gradients the weights are those of float32, rounded, at any learning rate."""
    draw = torch.Generator().manual_seed(3)
    start = (0.02 * torch.randn(64, 64, generator=draw)).bfloat16()
    whole, half = nn.Parameter(start.float()), nn.Parameter(start.clone())
    expected, found = (build_optimizer([each], optim(), False) for each in (whole, half))
    drift = torch.rand(64, 64, generator=draw)
    for _ in range(400):
        half.grad = (drift + torch.randn(64, 64, generator=draw)).bfloat16()
        whole.grad = half.grad.float()
        for optimizer in (expected, found):
            set_lr(optimizer, 1e-6)
            optimizer.step()
    low = found.state[half]["low_bits"]
    bits = half.detach().float().view(torch.int32) + low
    assert torch.equal(bits.view(torch.float32), whole)
    assert (half.float() - whole).abs().max() <= 2**-8 * whole.abs().max()
    changes = [float((each.detach().float() - start).mean()) for each in (whole, half)]
    assert changes[0] < -1e-4
    assert changes[1] == pytest.approx(changes[0], rel=0.03)
    assert found.state[half]["exp_avg"].dtype == torch.float32


HALF = (f"{SECTION}.fsdp_config.model_dtype=bf16",)


def save_and_update(
    where: RankInfo, model: str, folder: Path, overrides: tuple[str, ...]
) -> list[Any]:
    """Update, save and update again; return both weights, and how many moments have codes."""
    worker = actor(where, model, overrides)
    update(worker)
    saved = weights(worker)
    save(worker, folder)
    update(worker)
    moments = [local_part(each["exp_avg"]) for each in worker.learner.optimizer.state.values()]
    return [saved, weights(worker), sum(hasattr(each, "codes") for each in moments)]


def load_and_update(
    where: RankInfo, model: str, folder: Path, overrides: tuple[str, ...]
) -> list[Tensor]:
    worker = actor(where, model, overrides)
    worker.load(folder)
    loaded = weights(worker)
    update(worker)
    return [loaded, weights(worker)]


def test_bfloat16_weights_are_restored_with_their_other_bits(tmp_path: Path) -> None:
    model = str(write_tiny_model(tmp_path))
    begin_writing(tmp_path)
    saved = {
        ranks: on_ranks(ranks, save_and_update, model, tmp_path / str(ranks), HALF)[0]
        for ranks in (1, 2)
    }
    assert saved[1][0].dtype == torch.bfloat16
    for source, ranks in ((1, 1), (1, 2), (2, 1)):
        loaded, updated = on_ranks(ranks, load_and_update, model, tmp_path / str(source), HALF)[0]
        assert torch.equal(loaded, saved[source][0])
        if ranks == source:
            assert torch.equal(updated, saved[source][1])


def test_optimizers_that_cannot_be_used_are_refused() -> None:
    config = configured("grpo", (), [f"{SECTION}.fsdp_config.optimizer_offload=true"])
    offload = config.actor_rollout_ref.actor.fsdp_config
    for overrides, message in (
        (["optimizer=AdamX"], "torch.optim has no optimizer 'AdamX'"),
        (["optimizer_impl=no_such_module"], "the module 'no_such_module' of the optimizer"),
        (["override_optimizer_config={epsilon: 1}"], "cannot be built: .*epsilon"),
        (["optimizer=SGD"], "torch.optim.SGD keeps no number of steps"),
        (["optimizer_impl=torchao.optim", "optimizer=AdamW4bit"], "AdamW4bit is not supported"),
        (EIGHT_BITS, "the state of AdamW8bit cannot be in host memory"),
    ):
        with pytest.raises(ConfigError, match=message):
            check_optimizer(optim(*overrides), offload, SECTION)
    check_optimizer(optim(), offload, SECTION)
    half = offload.model_copy(update={"model_dtype": "fp16"})
    with pytest.raises(ConfigError, match="fp16 cannot be trained"):
        check_optimizer(optim(), half, SECTION)


@pytest.mark.extra("torchao")
@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.soak)])
def test_moments_in_eight_bits_are_saved_exactly(tmp_path: Path, ranks: int) -> None:
    """On the same number of ranks bitwise, and on others up to rounding."""
    model = str(write_tiny_model(tmp_path, hidden_size=256, intermediate_size=256))
    begin_writing(tmp_path)
    overrides = tuple(f"{SECTION}.optim.{each}" for each in EIGHT_BITS)
    [(_, one, quantized)] = on_ranks(1, save_and_update, model, tmp_path / "one", overrides)
    (_, two, same), _ = on_ranks(2, save_and_update, model, tmp_path / "two", overrides)
    assert quantized == same > 4
    assert (one - two).norm() <= 1e-4 * one.norm()
    for source, expected in (("one", one), ("two", two)):
        _, found = on_ranks(ranks, load_and_update, model, tmp_path / source, overrides)[0]
        if source == ("one", "two")[ranks - 1]:
            assert torch.equal(found, expected)
        else:
            assert (found - expected).norm() <= 1e-4 * expected.norm()
