"""Controller time and memory of a GRPO step with simulated ranks: real messages, no model.

    python -m benchmarks.controller [--ranks 8,1024] [--tokens 256] [--steps 2] [--json]

`--tokens` are those of a step in millions, in rows of 4,300 on average, 8 to a prompt. The ranks
and the relays live in a few Ray actors. They make no tokens of responses: results have the lengths
of their rows and a reference to an object in the store, which is all that the controller sees of
them in a run, too. Time is the CPU time of the controller's process, of all its threads, and its
wall time outside of waits for ranks; memory is its own (USS) above that before the step. The best
of the steps after the first counts.
"""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable
from threading import Lock
from typing import Any

import numpy as np
import psutil
import ray
import torch

from benchmarks.results import record
from benchmarks.table import Row, in_fresh_process, parse_arguments, show
from rlctl.data_prep.rows import PromptRow
from rlctl.recipes.compose import compose
from rlctl.runtime.algorithms.stats import rollout_metrics
from rlctl.runtime.base.batch import Batch, LogProbs, Prompts, Ragged, Rollouts, Scores
from rlctl.runtime.base.metrics import Mean, Metrics
from rlctl.runtime.base.roles import G, R, Roles, Total
from rlctl.runtime.base.stored_fields import RowRefs, StoredRagged
from rlctl.runtime.build import load_algorithm
from rlctl.runtime.cluster import group
from rlctl.runtime.cluster.group import GroupTransport, Relay, RelayedTransport
from rlctl.runtime.cluster.pool import RANKS_PER_RELAY
from rlctl.runtime.training.step_metrics import length_metrics
from rlctl.runtime.workers.dispatch import Dispatch, Worker, bind, dispatch

PROMPT, RESPONSE, N, HOSTS = 204, 8192, 8, 4
STORED_BYTES = 2**17  # of the object of a result: Ray keeps smaller ones in the caller's memory


def without_tokens(result: Any, _: int) -> tuple[Any, Any]:
    """Return a shard's content that no one reads, and `result` referring to it; see `detach`."""

    def change(value: Any, name: str) -> Any:
        if isinstance(value, tuple):
            return tuple(change(each, f"{name}{i}.") for i, each in enumerate(value))
        if not isinstance(value, Batch):
            return value
        refs = RowRefs.of_shard(len(value))
        fields = {x: StoredRagged(rows.lengths, name + x, refs) for x, rows in ragged(value)}
        return dataclasses.replace(value, **fields)

    rest = change(result, "")
    return (None if isinstance(rest, dict) else np.zeros(STORED_BYTES, np.uint8)), rest


def ragged(batch: Batch) -> list[tuple[str, Ragged]]:
    """Return the ragged fields of a batch by name."""
    fields = ((x.name, getattr(batch, x.name)) for x in dataclasses.fields(batch))
    return [(name, value) for name, value in fields if isinstance(value, Ragged)]


def tokens(lengths: torch.Tensor) -> Ragged:
    """Return rows of `lengths` (B,) ones in the memory of one element."""
    return Ragged(torch.ones(1).expand(int(lengths.sum())), lengths)


def with_lengths(batch: Batch, lengths: torch.Tensor) -> Any:
    """Return `batch` with `tokens` of `lengths` (B,) in its ragged fields."""
    return dataclasses.replace(batch, **{name: tokens(lengths) for name, _ in ragged(batch)})


class SimulatedActor(Worker):
    """Actor and reference whose results have the shapes of a model's."""

    def __init__(self) -> None:
        """Need no rank."""

    @dispatch(Dispatch.BROADCAST)
    def update_weights(self) -> None:
        """Do nothing."""

    @dispatch(Dispatch.SPLIT)
    def generate_sequences(
        self, prompts: Prompts, seed: int, validate: bool = False, greedy: bool = False
    ) -> Rollouts:
        """Return responses of random lengths."""
        del validate, greedy
        draw = torch.Generator().manual_seed(seed + int(prompts.group.sum()))
        lengths = torch.randint(1, RESPONSE, (len(prompts) * N,), generator=draw)
        names = ("response_ids", "response_mask", "rollout_log_probs")
        fields: Any = {name: tokens(lengths) for name in names}
        return prompts.repeat(N).grow(Rollouts, finish=["stop"] * len(lengths), **fields)

    @dispatch(Dispatch.SPLIT)
    def compute_log_probs(self, batch: Rollouts, top_k: int = 0) -> LogProbs:
        """Return equal log-probs."""
        del top_k
        return LogProbs(tokens(batch.response_ids.lengths), None)

    @dispatch(Dispatch.GROUPS)
    def map_groups(self, batch: G, function: Callable[[G, Total], R]) -> R:
        """Compute the advantages of responses of one token, and return them at full length."""
        small = with_lengths(batch, torch.ones(len(batch), dtype=torch.int64))
        result: Any = function(small, lambda numbers: numbers)
        lengths = dict(ragged(batch))["response_ids"].lengths
        found: Any = (with_lengths(result[0], lengths), result[1])
        return found

    @dispatch(Dispatch.SPLIT)
    def update(self, batch: Rollouts, lr: float, limit: float | None = None) -> Metrics:
        """Return the metrics of an update."""
        del limit
        return {f"actor/{i}": Mean(lr, len(batch)) for i in range(20)}


class LengthReward:
    """Reward of the length."""

    def compute_scores(self, rollouts: Rollouts, validate: bool = False) -> Scores:
        """Score what the controller knows."""
        del validate
        scores = (rollouts.response_ids.lengths % 2).float()
        return Scores(scores, {}, torch.zeros(len(scores), dtype=torch.bool))


class Host:
    """Process with many ranks or relays."""

    def __init__(self) -> None:
        torch.set_num_threads(1)
        group.detach = without_tokens  # of relays
        self.actor = SimulatedActor()
        self.relays: dict[int, Relay] = {}

    def add_relay(self, number: int, processes: list[Any], inline_bytes: int) -> None:
        """Start a relay."""
        self.relays[number] = Relay(processes, get, inline_bytes)

    def call(self, _: int, role: str, method: str, args: Any, kwargs: Any) -> Any:
        """See `Process`."""
        del role
        return getattr(self.actor, method)(*args, **kwargs)

    def call_detached(
        self, rank: int, role: str, method: str, args: Any, kwargs: Any, least: int
    ) -> Any:
        """See `Process`."""
        return without_tokens(self.call(rank, role, method, args, kwargs), least)

    def send(self, relay: int, *args: Any) -> Any:
        """See `Relay`."""
        return self.relays[relay].send(*args)

    def send_rows(self, relay: int, *args: Any) -> Any:
        """See `Relay`."""
        return self.relays[relay].send_rows(*args)


class Method:
    """Method of one rank or relay of a host, with the interface of a Ray actor's."""

    def __init__(self, method: Any, number: int) -> None:
        self.method, self.number = method, number

    def options(self, **options: Any) -> Method:
        """See Ray."""
        return Method(self.method.options(**options), self.number)

    def remote(self, *args: Any) -> Any:
        """See Ray."""
        return self.method.remote(self.number, *args)


class Member:
    """Rank or relay number `number` of a host."""

    def __init__(self, host: Any, number: int) -> None:
        self.call = Method(host.call, number)
        self.call_detached = Method(host.call_detached, number)
        self.send = Method(host.send, number)
        self.send_rows = Method(host.send_rows, number)


WAITS = [0.0]  # seconds that this process has waited for ranks


def get(results: list[ray.ObjectRef], what: str) -> list[Any]:
    """Wait for results, then read them."""
    del what
    begin = time.perf_counter()
    ray.wait(results, num_returns=len(results), fetch_local=False)
    WAITS[0] += time.perf_counter() - begin
    return ray.get(results)


def handle(num_ranks: int) -> SimulatedActor:
    """Return the handle of an actor of `num_ranks` ranks."""
    host: Any = ray.remote(num_cpus=0)(Host)
    hosts = [host.remote() for _ in range(HOSTS)]
    ranks = [Member(hosts[i % HOSTS], i) for i in range(num_ranks)]
    size = RANKS_PER_RELAY
    if num_ranks <= size:
        return bind(SimulatedActor, GroupTransport("actor", ranks, get, True, Lock()))
    homes = [host.remote() for _ in range(HOSTS)]
    parts = [ranks[i : i + size] for i in range(0, num_ranks, size)]
    limit = group.inline_bytes_of(num_ranks)
    ray.get([homes[i % HOSTS].add_relay.remote(i, part, limit) for i, part in enumerate(parts)])
    relays = [Member(homes[i % HOSTS], i) for i in range(len(parts))]
    sizes = [len(part) for part in parts]
    return bind(SimulatedActor, RelayedTransport("actor", relays, get, True, Lock(), sizes=sizes))


class Watch(threading.Thread):
    """Thread that notes the largest USS of this process, and the CPU time that this costs."""

    def __init__(self) -> None:
        super().__init__()
        self.before = self.peak = psutil.Process().memory_full_info().uss
        self.cpu_s = 0.0
        self.end = threading.Event()
        self.start()

    def run(self) -> None:
        """See `Thread`."""
        while not self.end.wait(0.2):
            self.peak = max(self.peak, psutil.Process().memory_full_info().uss)
        self.cpu_s = time.thread_time()


def measure(num_ranks: int, millions: int, num_steps: int) -> Row:
    """Return the row of a number of ranks."""
    num_prompts = millions * 10**6 // (N * (PROMPT + RESPONSE // 2))
    sizes = [f"data.train_batch_size={num_prompts}", f"actor_rollout_ref.rollout.n={N}"]
    sizes += [f"actor_rollout_ref.actor.ppo_mini_batch_size={num_prompts}"]
    sizes += [f"data.max_response_length={RESPONSE}"]
    paths = ["data.train_files=none", "actor_rollout_ref.model.path=none"]
    algorithm = load_algorithm(compose("grpo", [*paths, *sizes]).config, 10)
    ray.init(
        "local",
        num_cpus=2 * HOSTS,
        include_dashboard=False,
        object_store_memory=2 * 2**30,
    )
    actor: Any = handle(num_ranks)
    reward: Any = LengthReward()
    ids = Ragged(torch.full((num_prompts * PROMPT,), 7), torch.full((num_prompts,), PROMPT))
    row = PromptRow("simulated", [{"role": "user", "content": "?"}], "1")
    prompts = Prompts(ids, torch.arange(num_prompts), [row] * num_prompts)
    roles = Roles(actor, reward, reference_role=actor, generator_role=actor)
    count = 0.0
    best: list[tuple[float, float, float, float]] = []
    for step in range(1, num_steps + 2):
        watch = Watch()
        begin, cpu, waited = time.perf_counter(), time.process_time(), WAITS[0]
        scored = algorithm.collect(prompts, roles, step)
        algorithm.learn(scored, roles, step)
        rollout_metrics(algorithm, RESPONSE, scored)
        length_metrics(scored, num_ranks)
        cpu, wall = time.process_time() - cpu, time.perf_counter() - begin
        watch.end.set()
        watch.join()
        count = int(scored.num_tokens.sum()) / 1e6
        if step > 1:
            own = wall - (WAITS[0] - waited)
            best.append((cpu - watch.cpu_s, own, (watch.peak - watch.before) / 2**20, wall))
    cpu, own, memory, wall = min(best)
    ray.shutdown()
    return {
        "ranks": str(num_ranks),
        "rows": num_prompts * N,
        "tokens, M": count,
        "controller CPU s": cpu,
        "controller s": own,
        "controller MB": memory,
        "step s": wall,
    }


def main() -> None:
    """Measure and print."""
    arguments = parse_arguments(__doc__, ranks="8,1024", tokens=256, steps=2)
    rows = [
        in_fresh_process(measure, int(number), arguments.tokens, arguments.steps)
        for number in arguments.ranks.split(",")
    ]
    show("a GRPO step, simulated ranks", rows, arguments.json)
    if len(rows) > 1:
        least, most = rows[0], rows[-1]
        for column, smallest in (("controller CPU s", 0.01), ("controller MB", 1.0)):
            growth = max(smallest, float(most[column])) / max(smallest, float(least[column]))
            name = f"{column} with {most['ranks']} ranks over {least['ranks']}"
            record(name, growth, "lower")


if __name__ == "__main__":  # Ray's processes import the classes by the name of the module
    from benchmarks import controller

    controller.main()
