"""Linear layers by oneDNN: equal to torch's own products, and only where they are faster."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._dynamo
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel

from rlctl.runtime.model import onednn
from rlctl.runtime.model.attention import Packing, use_rlctl_attention
from rlctl.runtime.rollout import fused
from tests.models import tiny_model
from tests.tolerance import assert_as_exact, in_float64

pytestmark = pytest.mark.skipif(
    not torch.backends.mkldnn.is_available(), reason="this build of torch has no oneDNN"
)


@pytest.fixture(autouse=True)
def _on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use oneDNN on every machine; environment variables are those of before afterwards."""
    for module in (onednn, fused):
        monkeypatch.setattr(module, "is_faster", lambda: True)
    monkeypatch.setattr(onednn, "_MIN_SIZE", 32 * 16 * 16)
    for name in onednn._CACHES:
        monkeypatch.setenv(name, os.environ.get(name, "16"))


class Counter(TorchDispatchMode):
    """Counts calls of oneDNN."""

    calls = 0

    def __torch_dispatch__(
        self,
        func: Callable[..., object],
        types: object,
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        self.calls += str(func).startswith("mkldnn.")
        return func(*args, **(kwargs or {}))


def gradients(layer: Any, x: Tensor, weights: Tensor) -> tuple[Tensor, ...]:
    """Return the outputs of a layer, and the gradients of a sum of them."""
    x = x.detach().requires_grad_()
    out = layer(x)
    found = torch.autograd.grad((out * weights.to(out.dtype)).sum(), [x, *layer.parameters()])
    return out.detach(), *found


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("rows", "into", "out"), [(33, 16, 48), (257, 64, 16), (1000, 32, 32)])
def test_outputs_and_gradients_are_those_of_the_layer(
    rows: int, into: int, out: int, bias: bool
) -> None:
    torch.manual_seed(0)
    layer = nn.Linear(into, out, bias=bias)
    x = torch.randn(into, 1, rows).transpose(0, 2)  # (T, 1, I), not contiguous
    weights = torch.randn(rows, 1, out)
    exact = gradients(layer.double(), x.double(), weights)
    second = gradients(layer.float(), x, weights)
    onednn.use_onednn(layer)
    with Counter() as counter:
        found = gradients(layer, x, weights)
    assert counter.calls == 3  # forward, and both gradients
    for each in zip(found, second, exact, strict=True):
        assert_as_exact(*each)


@pytest.mark.parametrize(
    "x",
    [
        torch.randn(7, 32),
        torch.randn(64, 32, dtype=torch.float64),
        torch.randn(64, 32, dtype=torch.bfloat16),
        torch.empty(64, 32, device="meta"),
        torch.randn(0, 32),
    ],
    ids=["few rows", "float64", "bfloat16", "meta", "no rows"],
)
def test_other_inputs_are_left_to_torch(x: Tensor) -> None:
    layer = nn.Linear(32, 32, device=x.device, dtype=x.dtype)
    onednn.use_onednn(layer)
    with Counter() as counter:
        found = layer(x)
    assert counter.calls == 0
    assert found.shape == F.linear(x, layer.weight).shape


@torch.no_grad()
def test_a_model_has_the_same_log_probs_in_training_and_decoding() -> None:
    plain, model = tiny_model().eval(), tiny_model().eval()
    exact_model = in_float64(plain)
    for each in (plain, model, exact_model):
        use_rlctl_attention(each)
    onednn.use_onednn(model)
    ids = torch.randint(3, 64, (1, 77), generator=torch.Generator().manual_seed(1))
    packing = Packing.from_lengths(torch.tensor([40, 37]), "cpu")

    def log_probs(of: PreTrainedModel) -> Tensor:
        positions = packing.position_ids[None]
        given = {"input_ids": ids, "position_ids": positions, "packing": packing}
        return of(**given, use_cache=False).logits[0].log_softmax(-1)

    expected, exact = log_probs(plain), log_probs(exact_model)
    with Counter() as counter:
        assert_as_exact(log_probs(model), expected, exact)
    assert counter.calls > 0
    passes = fused.Passes(model)
    passes.refresh()
    assert passes.is_fused
    with Counter() as counter:
        found = passes.logits(ids[0], packing.position_ids, packing)
    assert counter.calls > 0
    assert found.shape == (77, 64)
    assert_as_exact(found.log_softmax(-1), expected, exact)


def test_compiled_layers_use_it_too(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    layer = nn.Sequential(nn.Linear(32, 64), nn.SiLU(), nn.Linear(64, 32))
    x, weights = torch.randn(48, 32), torch.randn(48, 32)
    exact = gradients(in_float64(layer), x.double(), weights)
    expected = gradients(layer, x, weights)
    onednn.use_onednn(layer)
    monkeypatch.delenv("TORCHDYNAMO_DISABLE", raising=False)  # which vLLM's engine sets on a CPU
    torch._dynamo.reset()
    with torch._dynamo.config.patch(disable=False), torch.profiler.profile() as profile:
        found = gradients(torch.compile(layer, backend="aot_eager"), x, weights)
    assert any(each.name == "rlctl::product" for each in profile.events() or ())
    for each in zip(found, expected, exact, strict=True):
        assert_as_exact(*each)
