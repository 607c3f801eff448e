"""Calls, bytes and modelled seconds of a weight sync to engines on GPUs, without a GPU.

    python -m benchmarks.weight_sync_model [--gigabytes 50] [--latency 60] [--json]

A rank forms the buckets of a model without data and sends them in a group that only counts. Each
call then takes `--latency` microseconds and its bytes at `--gigabytes` per second of one link,
until the sender looks again whether it is over. Not in it: checksums, and the engines' own loading.
"""

from __future__ import annotations

from collections.abc import Iterator
from unittest.mock import patch

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.results import record_rows
from benchmarks.table import Row, parse_arguments, show
from rlctl.runtime.rollout.page_sums import PageSums
from rlctl.runtime.rollout.weight_group import POLLS_S, WeightGroup
from rlctl.runtime.rollout.weight_sync import Bucket, Part, memory_of, to_buckets

QWEN2_5 = {"vocab_size": 152_064, "tie_word_embeddings": False, "num_key_value_heads": 4}
MODELS = {
    "7B": {
        **QWEN2_5,
        **{"hidden_size": 3584, "intermediate_size": 18_944},
        **{"num_hidden_layers": 28, "num_attention_heads": 28},
    },
    "32B": {
        **QWEN2_5,
        **{"hidden_size": 5120, "intermediate_size": 27_648, "num_key_value_heads": 8},
        **{"num_hidden_layers": 64, "num_attention_heads": 40},
    },
}
SCALES = (("7B", 8, 8), ("32B", 32, 32))  # model, ranks of the trainer, engines
BUCKET = 2**30


class CountingGroup(WeightGroup):
    """Counts the calls of one rank; the parts of all other ranks are as large as its own."""

    def __init__(self) -> None:
        self.device, self.num_parts, self.shared, self.changes = "meta", 1, None, None
        self.sent: list[int] = []  # bytes of each call

    def send(self, message: Bucket | int, part: Part) -> int:
        begin = len(self.sent) + 1  # after the exchange of sizes
        num_bytes = super().send(message, Part(0, 1))
        self.sent += self.sent[begin:] * (part.count - 1)
        return num_bytes

    def _take_turns(self, message: Bucket | int | None, number: int) -> Iterator[Bucket | int]:
        is_bucket = isinstance(message, Bucket)
        self._size = [len(message.header.to_json()), len(message.data)] if is_bucket else [-1, 0]
        return super()._take_turns(message, number)

    def _gather(self, sizes: Tensor) -> list[list[int]]:
        self.sent.append(sizes.nbytes)
        return [self._size]

    def _broadcast(self, data: Tensor, source: int) -> None:
        del source
        self.sent.append(data.nbytes)


def rows(sizes: dict[str, int | bool], parts: int) -> Iterator[tuple[str, Tensor, int]]:
    """Yield the rows (M, ...) of each parameter that one of the `parts` has, without data."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen2", **sizes))
    for name, parameter in model.named_parameters():
        height = -(-parameter.shape[0] // parts)
        yield name, parameter.new_empty((height, *parameter.shape[1:])), parameter.numel()


def waited(seconds: float) -> float:
    """Return the time after which a sender sees that a broadcast of `seconds` is over."""
    passed = 0.0
    for pause in POLLS_S:
        if passed >= seconds:
            return passed
        passed += pause
    rest = max(0.0, seconds - passed)
    return passed - -rest // POLLS_S[-1] * POLLS_S[-1]


def measured(name: str, ranks: int, engines: int, bandwidth: float, latency: float) -> Row:
    """Count and model one sync of a model from `ranks` to `engines`; bandwidth in bytes/s."""
    group, buckets = CountingGroup(), 0
    with patch.object(PageSums, "checksum", lambda *_: 0):
        part = Part(0, ranks)
        sent = rows(MODELS[name], ranks)
        for bucket in to_buckets(sent, part, torch.bfloat16, BUCKET, memory_of("meta")):
            group.send(bucket, part)
            buckets += 1
    group.send(1, Part(0, ranks))
    return {
        "model": name,
        "ranks": ranks,
        "engines": engines,
        "gigabytes": sum(group.sent) / 1e9,
        "buckets": buckets,
        "calls of the group": len(group.sent),
        "communicators": 1,  # of all ranks and engines
        "calls through Ray": ranks + engines,  # send_weights and load_broadcast
        "seconds": sum(waited(latency + size / bandwidth) for size in group.sent),
    }


def main() -> None:
    """Count, model and print."""
    options = parse_arguments(__doc__, gigabytes=50, latency=60)
    bandwidth, latency = 1e9 * options.gigabytes, 1e-6 * options.latency
    found = [measured(*scale, bandwidth, latency) for scale in SCALES]
    show("Weight sync in one process group", found, options.json)
    record_rows(found, {"seconds": "lower", "calls of the group": "lower"})


if __name__ == "__main__":
    main()
