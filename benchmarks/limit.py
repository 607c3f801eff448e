"""Share of an update and of a generation that is matrix products of the same shapes.

    python -m benchmarks.limit [--runs 5] [--threads 1] [--sizes 1m,20m,100m]
    python -m benchmarks.limit --model FILE.gguf

Records every matrix product of one update (micro-batches, forward, backward, clipping, AdamW) and
of one generation, and repeats them alone, with random values and the same shapes and threads. A
share of 100 % means that everything else costs nothing. Where oneDNN computes linear layers, a
second share is that of the same products by torch's `mm`: it can be above 100 %. All alternate in
one process; the figures are medians, in CPU time of the process and in wall-clock time. Products
inside the kernel of attention are not counted.

The models and prompts are those of `benchmarks.rollout`; lengths are even or lognormal with a
median of 20 tokens and a longest of 256. With `--model`, a folder or a GGUF file, the model is that
one, and prompts and responses are as long as those of the recipe `sums_smollm`.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM

from benchmarks.results import record
from benchmarks.rollout import SHAPES, WORK, build, sample
from rlctl.gguf_model import folder_of
from rlctl.recipes.compose import compose
from rlctl.runtime.algorithms.base import Loss
from rlctl.runtime.base.batch import Ragged, Rollouts
from rlctl.runtime.base.budget import Budget
from rlctl.runtime.base.rank_info import RankInfo
from rlctl.runtime.model.attention import use_rlctl_attention
from rlctl.runtime.model.causal_lm import PolicyModel
from rlctl.runtime.model.onednn import prepared, product, use_onednn
from rlctl.runtime.model.sequences import Sequences
from rlctl.runtime.rollout.hf import HFEngine
from rlctl.runtime.workers.learner import Learner
from rlctl.runtime.workers.process_memory import keep_freed_memory

PRODUCTS = ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::baddbmm_")
LINEAR = "mkldnn::_linear_pointwise"
SUMS = (16, 16, 4)  # prompts, responses to each, and their tokens
# Sizes and strides of a tensor; no strides: a weight that is prepared for oneDNN.
Form = tuple[tuple[int, ...], tuple[int, ...] | None]
Call = tuple[Any, tuple[Form, ...]]


class Recorder(TorchDispatchMode):
    """Counts matrix products by operator, shapes and strides."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[Call] = Counter()

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Count `func` if it is a matrix product, and run it."""
        name = func.name().split(".")[0]
        if name in PRODUCTS or name == LINEAR:
            tensors = [x for x in args if isinstance(x, Tensor)]
            if func.name() == f"{LINEAR}.binary":
                tensors = [tensors[0], *tensors[2:]]  # the sum is left out
            forms = tuple((tuple(x.shape), None if x.is_mkldnn else x.stride()) for x in tensors)
            self.calls[product if name == LINEAR else func, forms] += 1
        return func(*args, **(kwargs or {}))


def by_mm(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return x Wᵀ + b as torch computes it: (T, I), (O, I), (O,) -> (T, O)."""
    return torch.mm(x, weight.t()) if bias is None else torch.addmm(bias, x, weight.t())


def products(run: Callable[[], object]) -> tuple[Callable[[], None], Callable[[], None]]:
    """Return functions that compute the matrix products of `run`, and nothing else.

    The first does it as `run`, the second by torch's own products.
    """
    with Recorder() as recorder:
        run()
    assert recorder.calls, "no matrix product was recorded"
    inputs: dict[Form, list[Tensor]] = {}
    for _, forms in recorder.calls:
        for index, (size, stride) in enumerate(forms):
            found = inputs.setdefault((size, stride), [])
            while len(found) <= index:
                empty = torch.empty(size) if stride is None else torch.empty_strided(size, stride)
                found.append(empty.normal_())
    weights = {form: prepared(found[1], 1) for form, found in inputs.items() if form[1] is None}

    def replay(others: Callable[..., Tensor]) -> None:
        with torch.no_grad():
            for (func, forms), times in recorder.calls.items():
                given = [inputs[form][index] for index, form in enumerate(forms)]
                if others is product and forms[1] in weights:
                    given[1] = weights[forms[1]]
                for _ in range(times):
                    (others if func is product else func)(*given)

    return partial(replay, product), partial(replay, by_mm)


class Shares(NamedTuple):
    """CPU seconds of a run, and the shares of its matrix products."""

    seconds: float
    by_cpu: float
    by_wall: float
    by_mm: float  # of CPU time, computed by torch's `mm`


def shares(run: Callable[[], object], runs: int) -> Shares:
    """Measure `run` and its matrix products in turns."""
    alone, plain = products(run)
    rows = []
    for _ in range(runs):
        times = []
        for function in (run, alone, plain):
            begin = (time.process_time(), time.perf_counter())
            function()
            times.append((time.process_time() - begin[0], time.perf_counter() - begin[1]))
        (cpu, wall), (least_cpu, least_wall), (plain_cpu, _) = times
        rows.append((cpu, least_cpu / cpu, least_wall / wall, plain_cpu / cpu))
    return Shares(*(statistics.median(column) for column in zip(*rows, strict=True)))


def batch(
    work: tuple[int, int, int], vocabulary: int, natural: bool, longest_prompt: int = 90
) -> Rollouts:
    """Return responses to prompts of 30 to `longest_prompt` tokens.

    `work` has the number of prompts, of responses to each, and of tokens in a response.
    """
    draw = torch.Generator().manual_seed(0)
    num_prompts, n, longest = work
    rows = num_prompts * n
    prompts = [
        torch.randint(0, vocabulary, (length,), generator=draw)
        for length in torch.linspace(30, longest_prompt, num_prompts).long().tolist()
    ]
    lengths = torch.full((rows,), longest)
    if natural:
        lengths = (20 * (0.9 * torch.randn(rows, generator=draw)).exp()).long().clamp(1, 256)
    total = int(lengths.sum())
    responses = Ragged(torch.randint(0, vocabulary, (total,), generator=draw), lengths)
    of_prompt = torch.arange(num_prompts)
    return Rollouts(
        prompt_ids=Ragged.from_rows(prompts).select(of_prompt.repeat_interleave(n)),
        group=of_prompt.repeat_interleave(n),
        rows=[],
        response_ids=responses,
        response_mask=responses.like(torch.ones(total)),
        rollout_log_probs=responses.like(torch.zeros(total)),
        finish=["stop"] * rows,
    )


def measure(size: str, hf: Any, given: Rollouts, natural: bool, runs: int, threads: int) -> None:
    """Measure one model and print its lines."""
    use_rlctl_attention(hf)
    use_onednn(hf)
    model = PolicyModel(hf, 1.0)
    actor = compose("grpo", []).config.actor_rollout_ref.actor
    learner = Learner(
        model,
        RankInfo(0, 1, "cpu", threads, 60.0, deterministic=False, log_path=None),
        actor.optim,
        actor.fsdp_config,
    )
    budget = Budget("tokens", 16384, "tokens")

    def loss(sequences: Sequences, part: Rollouts) -> Loss:
        outputs = model(sequences, with_entropy=True)
        return Loss(-outputs.log_probs.sum(), float(len(part.response_ids.values)), {})

    first = torch.arange(0, len(given), int((given.group == 0).sum()))
    prompts, limits = given.prompt_ids.select(first), given.response_ids.lengths
    engine = HFEngine(hf, max_num_seqs=len(given))
    parts = {
        "update": lambda: learner.learn(given, budget, loss, 1e-6, 1.0),
        "generation": lambda: sample(engine, prompts, limits),
    }
    for name, run in parts.items():
        run()
        found = shares(run, runs)
        lengths = "natural" if natural else "equal"
        print(
            f"{size:5s} {lengths:8s} {name:11s} {found.seconds:8.2f} s of CPU time; "
            f"matrix products {found.by_cpu:.0%} of it, {found.by_wall:.0%} of wall-clock time; "
            f"by `mm` {found.by_mm:.0%}",
            flush=True,
        )
        record(f"{size}, {lengths}, {name}: share of matrix products", found.by_cpu, "higher")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--sizes", default=",".join(SHAPES))
    parser.add_argument("--model", help="folder or GGUF file")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    keep_freed_memory()  # as in a worker
    if arguments.model:
        hf: Any = AutoModelForCausalLM.from_pretrained(
            folder_of(arguments.model), dtype=torch.float32
        )
        given = batch(SUMS, hf.config.vocab_size, natural=False, longest_prompt=30)
        measure("model", hf, given, False, arguments.runs, arguments.threads)
        return
    for size in arguments.sizes.split(","):
        for natural in (False, True):
            given = batch(WORK[size], SHAPES[size][-1], natural)
            measure(size, build(size), given, natural, arguments.runs, arguments.threads)


if __name__ == "__main__":
    main()
