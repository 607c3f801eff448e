"""Rollouts that engines generate without a pause, up to K steps ahead of learning.

A prompt's responses are a group. A group is admitted while fewer than (K + v + 1)·B groups were,
where v counts the steps that have learned and B is the number of groups of a step (AReaL, arXiv
2505.24298, equation 3). A step learns from the oldest groups that are finished, unless too many
older ones would be left for the steps until their age is K: then it waits for these. So no group is
dropped for its age, and none is older than K. Which groups finish first, and under which weights,
depends on the clock.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby, repeat

import torch

from rlctl.runtime.algorithms.base import step_seed
from rlctl.runtime.base.batch import Batch, Prompts, Rollouts, Scored
from rlctl.runtime.base.roles import Generator, Published
from rlctl.runtime.generation.stream import Stream
from rlctl.runtime.training.one_step_ahead import published_gb, result_of, with_staleness
from rlctl.runtime.training.rollout_source import (
    Collected,
    CollectionSetup,
    GroupRecord,
    RolloutSource,
    SourceState,
    StreamState,
    state_of,
)
from rlctl.runtime.workers.interrupts import INTERRUPTS

_PAUSE_S = 0.005


@dataclass(frozen=True, eq=False)
class _Group:
    """A group and its responses, once they are finished."""

    record: GroupRecord
    rollouts: Future[Rollouts]


class _Ready(Generator):
    """Generator whose responses are finished already; a greedy baseline is generated."""

    def __init__(self, generator: Generator, rollouts: Rollouts) -> None:
        self.generator = generator
        self.rollouts = rollouts

    def update_weights(self) -> None:
        """Do nothing: engines load weights when they are published."""

    def publish_weights(self) -> Published:
        return self.generator.publish_weights()

    def generate_sequences(
        self, prompts: Prompts, seed: int, validate: bool = False, greedy: bool = False
    ) -> Rollouts:
        if greedy:
            return self.generator.generate_sequences(prompts, seed, validate, greedy)
        return self.rollouts


class Eager(RolloutSource):
    """Source of rollouts that are at most `max_staleness` steps old, in order of their admission.

    While a step learns, a thread waits for the groups of the next one and scores them.

    Args:
        collection: collects for steps after `step`; scores finished groups.
        stream: generates the groups.
        seed: of sampled responses.
        max_staleness: K.
        step: last step that is done.
        state: groups of a checkpoint.
    """

    def __init__(
        self,
        collection: CollectionSetup,
        stream: Stream,
        *,
        seed: int,
        max_staleness: int,
        step: int,
        state: StreamState | None,
    ) -> None:
        self.collection = collection
        self.collector = collection.collector
        self.stream = stream
        self.seed = seed
        self.max_staleness = max_staleness
        self.size = self.collector.loader.batch_size
        self.last = collection.last
        self.ahead = collection.ahead
        self.seconds = {}
        self.quiet = threading.Lock()
        self._settled = threading.Lock()  # held while `_scored`, `ahead` and the groups change
        self._scored = state_of(self.collector, collection.roles, None)  # after the last scoring
        self._learned = step
        self.collector.position = (step + (self.ahead is not None)) * self.size  # groups admitted
        self._steps: dict[int, int] = {}
        self._groups: list[_Group] = []  # by number
        self._finished = threading.Event()  # a group has finished
        self._next: Future[Collected] | None = None
        self._end = time.perf_counter()  # of the step before
        self._waited = self._busy_s = self._scoring_s = 0.0
        self._steps[collection.publish().version] = step  # engines can generate from here on
        if state is not None:
            self._restore(state)
        self._admit()

    def take(self, step: int) -> tuple[Scored, dict[str, float]]:
        """Return the rollouts that `step` learns from; wait for the next ones in a thread."""
        began = time.perf_counter()
        now = self.ahead
        if now is None:
            with self.collection.clock.phase("wait_rollouts"):
                now = (self._next or result_of(partial(self._collect, step))).result()
        assert now.step == step, f"rollouts of step {now.step} in step {step}"
        with self.quiet, self._settled:
            self.ahead = self._next = None
        self._waited = time.perf_counter() - began
        if step < self.last:
            self._next = result_of(partial(self._collect, step + 1))
        return now.scored, now.metrics

    def end_step(self) -> dict[str, float]:
        """Publish the weights, which engines load in mid-response; return metrics."""
        self._learned += 1
        published = self.collection.publish()
        self._steps[published.version] = self._learned
        try:
            with INTERRUPTS.window(), self.quiet:  # which waits for scores
                self._admit()
        except KeyboardInterrupt:
            if not INTERRUPTS.raised:
                raise
        before = self._end
        now = time.perf_counter()
        busy_before = self._busy_s
        self._busy_s = self.stream.busy_s
        total = max(now - before, 1e-9)
        busy = self._busy_s - busy_before
        self._end = now
        scoring_s = self._scoring_s
        self._scoring_s = 0.0
        self.seconds = {"gen": busy, "reward": scoring_s}
        return published_gb(published) | {
            "async/trainer_idle": self._waited / total,
            "async/engines_idle": max(0.0, 1 - busy / total),
        }

    def state(self) -> SourceState:
        """Return the state; the stream has the groups of no step that are not in `ahead`."""
        with self._settled:
            position = self.collector.position
            learned = self._learned
            stream = partial(self._stream, list(self._groups), position, learned, dict(self._steps))
            loader = self._scored.loader | {"position": position}
            return replace(self._scored, ahead=self.ahead, loader=loader, stream=stream)

    @staticmethod
    def _stream(
        groups: Sequence[_Group], position: int, learned: int, steps: dict[int, int]
    ) -> StreamState:
        """Return `groups` with the rollouts that are finished by now."""
        done: list[_Group] = []
        still_open: list[GroupRecord] = []
        oldest = learned  # step whose weights any group has
        for group in groups:
            oldest = min(oldest, group.record.version)
            if group.rollouts.done():
                done.append(group)
            else:
                still_open.append(group.record)
        return StreamState(
            position,
            still_open,
            [group.record for group in done],
            {version: step for version, step in steps.items() if step >= oldest},
            _joined(done) if done else None,
        )

    def _restore(self, state: StreamState) -> None:
        """Restore the groups of a checkpoint, and begin those that were open again."""
        self.collector.position = state.num_admitted
        self._steps = state.steps | self._steps
        rollouts = state.finished_rollouts
        groups: list[_Group] = []
        for place, record in enumerate(state.finished):
            assert rollouts is not None, "there are rollouts of finished groups"
            future: Future[Rollouts] = Future()
            future.set_result(rollouts.select((rollouts.group == place).nonzero().flatten()))
            groups.append(_Group(record, future))
        groups += self._submit([replace(record, version=self._learned) for record in state.open])
        self._groups = sorted(groups, key=lambda group: group.record.number)

    def _admit(self) -> None:
        """Submit as many groups as the staleness permits."""
        limit = min(self.max_staleness + self._learned + 1, self.last) * self.size
        # A stateful sampler has different prompts for one step, not for several.
        for start in range(self.collector.position, limit, self.size):
            numbers = range(start, min(start + self.size, limit))
            drawn = self.collector.loader.draw(start, len(numbers))
            records = map(GroupRecord, numbers, drawn, repeat(self._learned))
            self._groups += self._submit(list(records))
            self.collector.position = numbers.stop

    def _submit(self, records: Sequence[GroupRecord]) -> list[_Group]:
        """Begin the responses of groups, with the random streams that their places give them."""
        prompts = self.collector.loader.at([record.drawn for record in records])
        groups: list[_Group] = []
        for i, record in enumerate(records):
            step, place = divmod(record.number, self.size)
            prompt = replace(prompts.select(torch.tensor([i])), group=torch.tensor([place]))
            future = self.stream.submit(prompt, step_seed(self.seed, step + 1))
            future.add_done_callback(lambda _: self._finished.set())
            groups.append(_Group(record, future))
        return groups

    def _collect(self, step: int) -> Collected:
        """Wait for the groups of `step` and score them."""
        groups = self._wait(step)
        drawn = [group.record.drawn for group in groups]
        rollouts = _joined(groups)
        self.stream.player.check_failures(rollouts)
        with self.quiet:
            began = time.perf_counter()
            roles = self.collection.roles
            roles = replace(roles, generator_role=_Ready(roles.generator, rollouts))
            scored, metrics = self.collector.collect_drawn(drawn, roles, step)
            scored, ages = self._with_ages(scored, step)
            taken = set(groups)
            weights = min(group.record.version for group in groups)
            ready = Collected(step, weights, scored, metrics | ages)
            with self._settled:
                self._scored = state_of(self.collector, self.collection.roles, None)
                self._groups = [group for group in self._groups if group not in taken]
                self.ahead = ready
            self._scoring_s = time.perf_counter() - began
        return ready

    def _wait(self, step: int) -> list[_Group]:
        """Wait for the groups of `step`."""
        self._finished.clear()
        while (chosen := self._choose(step)) is None:
            self._finished.wait()
            time.sleep(_PAUSE_S)  # groups often finish together
            self._finished.clear()
        return sorted(chosen, key=lambda group: group.record.number)

    def _choose(self, step: int) -> list[_Group] | None:
        """Return the oldest finished groups for `step`; None: it waits for older ones.

        It waits if those that are left over could not all be learned from in time, because newer
        ones have overtaken too many of them.
        """
        groups = sorted(self._groups, key=lambda group: (group.record.version, group.record.number))
        done = [group for group in groups if group.rollouts.done()]
        for group in done:
            group.rollouts.result()  # raises what has ended the stream
        chosen = done[: self.size]
        if len(chosen) < self.size:
            return None
        taken = set(chosen)
        num_left = 0
        has_open = False
        for version, same in groupby(groups, key=lambda group: group.record.version):
            if version >= chosen[-1].record.version:
                break
            left = [group for group in same if group not in taken]
            num_left += len(left)
            has_open |= any(not group.rollouts.done() for group in left)
            # Steps after this one that may learn from groups of this version.
            num_steps = max(0, version + self.max_staleness + 1 - step)
            if has_open and num_left > num_steps * self.size:
                return None
        return chosen

    def _with_ages(self, scored: Scored, step: int) -> tuple[Scored, dict[str, float]]:
        """Return rows with the staleness of their tokens, and metrics."""
        written = scored.versions
        assert written is not None, "a stream records versions"
        versions, token = written.values.unique(return_inverse=True)
        # A version that is not noted yet is the one that is being published.
        steps = [self._steps.get(version, self._learned) for version in versions.tolist()]
        weights = torch.tensor(steps)[token]
        scored, metrics = with_staleness(scored, step, weights, self.max_staleness)
        some = written.lengths > 0
        first = written.values[written.offsets[:-1][some]]
        last = written.values[written.offsets[1:][some] - 1]
        share = float((first != last).float().sum()) / max(len(written), 1)
        return scored, metrics | {"async/partial_responses": share}


def _joined(groups: Sequence[_Group]) -> Rollouts:
    """Join the responses of finished groups, which are numbered from 0."""
    parts = [group.rollouts.result() for group in groups]
    sizes = torch.tensor([len(rollouts) for rollouts in parts])
    numbers = torch.arange(len(parts)).repeat_interleave(sizes)
    return replace(Batch.concat(parts), group=numbers)
