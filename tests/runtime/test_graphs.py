"""Decoding steps of fixed shapes, recorded as by CUDA graphs and repeated from their buffers."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten
from transformers import PreTrainedModel

from rlctl.runtime.rollout.hf import HFEngine, Steps
from tests.generation import prompts, references, sampling
from tests.models import ARCHS, LIMITED, Arch, limited_model, tiny_model
from tests.skips import sampled
from tests.tolerance import assert_as_exact


class Tape(TorchDispatchMode):
    """Operations with the tensors that they read and wrote."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.calls.append((func, args, kwargs or {}, result))
        return result

    def replay(self) -> None:
        """Repeat the operations on the same memory: no Python of the model runs."""
        for func, args, kwargs, result in self.calls:
            outputs = tree_flatten(result)[0]
            inputs = {
                each.untyped_storage().data_ptr()
                for each in tree_flatten((args, kwargs))[0]
                if isinstance(each, Tensor)
            }
            if func._schema.is_mutable:
                func(*args, **kwargs)
            elif not any(each.untyped_storage().data_ptr() in inputs for each in outputs):
                again = tree_flatten(func(*args, **kwargs))[0]
                for target, value in zip(outputs, again, strict=True):
                    target.copy_(value)


class Tapes:
    """Recorder of a CPU that does what `CudaGraphs` does."""

    def __init__(self) -> None:
        self.num_captured = self.num_cleared = 0

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        self.num_captured += 1
        tape = Tape()
        with tape:
            work()
        return tape.replay

    def clear(self) -> None:
        self.num_cleared += 1


LIMITS = torch.tensor([3, 40, 1, 33, 5, 2, 31, 32, 9, 8, 6, 4])


def generate(model: PreTrainedModel, max_num_seqs: int | None, tapes: Tapes | None) -> Any:
    params = sampling(max_tokens=LIMITS, stop_token_ids=(), temperature=1.0)
    engine = HFEngine(model, max_num_seqs, steps=Steps(tapes))
    return engine.generate(prompts(9, 1, 40, 17), params)


@pytest.mark.parametrize("arch", sampled(ARCHS, ARCHS[:1]))
@pytest.mark.parametrize("max_num_seqs", [pytest.param(None, marks=pytest.mark.soak), 5])
def test_replayed_steps_are_the_steps_of_exact_shapes(arch: Arch, max_num_seqs: int | None) -> None:
    tapes = Tapes()
    expected, found = (generate(tiny_model(arch), max_num_seqs, each) for each in (None, tapes))
    assert torch.equal(found.response_ids.values, expected.response_ids.values)
    assert found.finish == expected.finish
    _, exact = references(tiny_model(arch), prompts(9, 1, 40, 17), expected)
    assert_as_exact(found.log_probs.values, expected.log_probs.values, exact)
    assert 0 < tapes.num_captured <= int(LIMITS.max()) // 3


@pytest.mark.parametrize("kind", sampled(LIMITED, ["gpt_oss"]))
@pytest.mark.parametrize(
    "tapes",
    [pytest.param(None, id="exact", marks=pytest.mark.soak), pytest.param(Tapes(), id="fixed")],
)
def test_windows_and_sinks(kind: str, tapes: Tapes | None) -> None:
    model = limited_model(kind)
    reference = copy.deepcopy(model)
    found = generate(model, 5, tapes)
    assert_as_exact(found.log_probs.values, *references(reference, prompts(9, 1, 40, 17), found))


def test_steps_are_recorded_once_for_many_batches() -> None:
    tapes, model = Tapes(), tiny_model()
    engine = HFEngine(model, None, steps=Steps(tapes, keeps_cache=True))
    params = sampling(max_tokens=6, stop_token_ids=())
    first = engine.generate(prompts(9, 4), params)
    captured = tapes.num_captured
    engine.sleep()
    again = engine.generate(prompts(9, 4), params)
    assert torch.equal(again.response_ids.values, first.response_ids.values)
    assert torch.equal(again.log_probs.values, first.log_probs.values)
    assert tapes.num_captured == captured == 1


@pytest.mark.parametrize(("owned", "num_captured"), [(True, 1), (False, 2)])
def test_new_weights_are_used(owned: bool, num_captured: int) -> None:
    """Steps are recorded again only if the weights have moved, instead of being overwritten."""
    tapes, model, other = Tapes(), tiny_model(), tiny_model(seed=1)
    params = sampling(max_tokens=6, stop_token_ids=())
    engine = HFEngine(model, None, owned=owned, steps=Steps(tapes))
    engine.generate(prompts(9, 4), params)
    if owned:
        engine.load_weights((name, each.detach()) for name, each in other.named_parameters())
    else:
        model.load_state_dict(other.state_dict(), assign=True)
    found = engine.generate(prompts(9, 4), params)
    assert tapes.num_captured == num_captured
    expected = HFEngine(other, None).generate(prompts(9, 4), params)
    assert torch.equal(found.response_ids.values, expected.response_ids.values)


def test_sleep_frees_steps_and_cache() -> None:
    tapes = Tapes()
    engine = HFEngine(tiny_model(), None, steps=Steps(tapes))
    engine.generate(prompts(9, 4), sampling(max_tokens=3, stop_token_ids=()))
    static = engine.static
    assert static is not None
    assert len(static) == 1
    assert engine._running.cache.layers != {}
    cleared = tapes.num_cleared
    engine.sleep()
    assert len(static) == 0
    assert engine._running.cache.layers == {}
    assert tapes.num_cleared == cleared + 1


def test_a_model_that_cannot_be_recorded_decodes_without(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Refusing(Tapes):
        def capture(self, work: Callable[[], None]) -> Callable[[], None]:
            super().capture(work)
            raise RuntimeError("operation not permitted when stream is capturing\nmore")

    tapes = Refusing()
    expected, found = (generate(tiny_model(), None, each) for each in (None, tapes))
    assert torch.equal(found.response_ids.values, expected.response_ids.values)
    assert tapes.num_captured == 1
    (message,) = [each.message for each in caplog.records if "CUDA graphs" in each.message]
    assert message.endswith("operation not permitted when stream is capturing")
