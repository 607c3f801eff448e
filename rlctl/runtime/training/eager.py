"""Rollouts that engines generate without a pause, up to K steps ahead of learning.

A prompt's responses are a group. A group is admitted while fewer than (K + v + 1)·B groups were,
where v counts the steps that have learned and B is the number of groups of a step (AReaL, arXiv
2505.24298, equation 3). A step learns from the oldest groups that are finished. It waits for older
ones where otherwise more of them would be left than the steps until their greatest age K can take.
So no group is dropped for its age, and none is older than K. Which groups finish first, and under
which weights, depends on the clock.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby, repeat

import torch

from rlctl.runtime.agents.delegating import DelegatingActor
from rlctl.runtime.agents.stream import Stream
from rlctl.runtime.algorithms.base import step_seed
from rlctl.runtime.batch import Batch, Prompts, Rollouts, Scored
from rlctl.runtime.roles import Actor, Published, Roles
from rlctl.runtime.training.collector import Collector
from rlctl.runtime.training.rollout_source import (
    Collected,
    GroupRecord,
    RolloutSource,
    StreamState,
    published_gb,
    result_of,
    with_staleness,
)
from rlctl.tracking.clock import Clock

_PAUSE_S = 0.005


@dataclass(frozen=True, eq=False)
class _Group:
    """A group and its responses, once they are finished."""

    record: GroupRecord
    rollouts: Future[Rollouts]


class _Ready(DelegatingActor):
    """Actor whose responses are finished already; a greedy baseline is generated."""

    def __init__(self, actor: Actor, rollouts: Rollouts) -> None:
        super().__init__(actor)
        self.rollouts = rollouts

    def update_weights(self) -> None:
        """See `Actor`. Engines load weights as they come."""

    def generate_sequences(
        self, prompts: Prompts, seed: int, validate: bool = False, greedy: bool = False
    ) -> Rollouts:
        if greedy:
            return self.actor.generate_sequences(prompts, seed, validate, greedy)
        return self.rollouts


class Eager(RolloutSource):
    """Source of rollouts that are at most `max_staleness` steps old, in order of their admission.

    While a step learns, a thread waits for the groups of the next one and scores them.

    Args:
        collector: draws prompts, and scores finished groups.
        roles: the roles.
        stream: generates the groups.
        publish: makes the trained weights those that engines load next.
        clock: counts the time that the trainer waits.
        seed: of sampled responses.
        max_staleness: K.
        step: last step that is done.
        last: last step to collect for.
        state: groups of a checkpoint.
        ahead: rollouts of a checkpoint that step `step` + 1 learns from.
    """

    def __init__(
        self,
        collector: Collector,
        roles: Roles,
        stream: Stream,
        publish: Callable[[], Published],
        clock: Clock,
        *,
        seed: int,
        max_staleness: int,
        step: int,
        last: int,
        state: StreamState | None,
        ahead: Collected | None,
    ) -> None:
        self.collector = collector
        self.roles = roles
        self.stream = stream
        self.publish = publish
        self.clock = clock
        self.seed = seed
        self.max_staleness = max_staleness
        self.size = collector.loader.batch_size
        self.last = last
        self.ahead = ahead
        self.seconds = {}
        self.quiet = threading.Lock()
        self._learned = step
        self.collector.position = (step + (ahead is not None)) * self.size  # groups admitted
        self._steps: dict[int, int] = {}
        self._groups: list[_Group] = []  # by number
        self._finished = threading.Event()  # a group has finished
        self._next: Future[Collected] | None = None
        self._end = time.perf_counter()  # of the step before
        self._waited = self._busy_s = self._scoring_s = 0.0
        self._steps[publish().version] = step  # engines can generate from here on
        if state is not None:
            self._restore(state)
        self._admit()

    def take(self, step: int) -> tuple[Scored, dict[str, float]]:
        """See `RolloutSource`. Begins to wait for the groups of the next step."""
        began, now = time.perf_counter(), self.ahead
        if now is None:
            with self.clock.phase("wait_rollouts"):
                now = (self._next or result_of(partial(self._collect, step))).result()
        assert now.step == step, f"rollouts of step {now.step} in step {step}"
        with self.quiet:
            self.ahead = self._next = None
        self._waited = time.perf_counter() - began
        if step < self.last:
            self._next = result_of(partial(self._collect, step + 1))
        return now.scored, now.metrics

    def end_step(self) -> dict[str, float]:
        """See `RolloutSource`. Engines load the new weights one after the other."""
        self._learned += 1
        published = self.publish()
        self._steps[published.version] = self._learned
        with self.quiet:
            self._admit()
        before, now = self._end, time.perf_counter()
        busy_before, self._busy_s = self._busy_s, self.stream.load.busy_s
        total, busy = max(now - before, 1e-9), self._busy_s - busy_before
        self._end = now
        scoring_s, self._scoring_s = self._scoring_s, 0.0
        self.seconds = {"gen": busy, "reward": scoring_s, "sync_weights": published.loading_s}
        return published_gb(published) | {
            "async/trainer_idle": self._waited / total,
            "async/engines_idle": max(0.0, 1 - busy / total),
        }

    def state(self) -> StreamState:
        """Return the groups that no step has learned from and that are not in `ahead`."""
        done: list[_Group] = []
        still_open: list[GroupRecord] = []
        oldest = self._learned  # step whose weights any group has
        for each in self._groups:
            oldest = min(oldest, each.record.version)
            if each.rollouts.done():
                done.append(each)
            else:
                still_open.append(each.record)
        return StreamState(
            self.collector.position,
            still_open,
            [each.record for each in done],
            {version: step for version, step in self._steps.items() if step >= oldest},
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
        groups += self._submit([replace(each, version=self._learned) for each in state.open])
        self._groups = sorted(groups, key=lambda each: each.record.number)

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
        prompts = self.collector.loader.at([each.drawn for each in records])
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
        drawn = [each.record.drawn for each in groups]
        rollouts = _joined(groups)
        self.stream.player.check_failures(rollouts)
        with self.quiet:
            began = time.perf_counter()
            roles = replace(self.roles, actor_role=_Ready(self.roles.actor, rollouts))
            scored, metrics = self.collector.collect_drawn(drawn, roles, step)
            scored, ages = self._with_ages(scored, step)
            taken = set(groups)
            self._groups = [each for each in self._groups if each not in taken]
            weights = min(each.record.version for each in groups)
            self.ahead = ready = Collected(step, weights, scored, metrics | ages)
            self._scoring_s = time.perf_counter() - began
        return ready

    def _wait(self, step: int) -> list[_Group]:
        """Wait for the groups of `step`."""
        self._finished.clear()
        while (chosen := self._choose(step)) is None:
            self._finished.wait()
            time.sleep(_PAUSE_S)  # groups often finish together
            self._finished.clear()
        return sorted(chosen, key=lambda each: each.record.number)

    def _choose(self, step: int) -> list[_Group] | None:
        """Return the oldest finished groups for `step`; None: it waits for older ones.

        It waits if those that are left over could not all be learned from in time, because newer
        ones have overtaken too many of them.
        """
        groups = sorted(self._groups, key=lambda each: (each.record.version, each.record.number))
        done = [each for each in groups if each.rollouts.done()]
        for each in done:
            each.rollouts.result()  # raises what has ended the stream
        chosen = done[: self.size]
        if len(chosen) < self.size:
            return None
        taken, num_left, has_open = set(chosen), 0, False
        for version, same in groupby(groups, key=lambda each: each.record.version):
            if version >= chosen[-1].record.version:
                break
            left = [each for each in same if each not in taken]
            num_left += len(left)
            has_open |= any(not each.rollouts.done() for each in left)
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
        steps = [self._steps.get(each, self._learned) for each in versions.tolist()]
        weights = torch.tensor(steps)[token]
        scored, metrics = with_staleness(scored, step, weights, self.max_staleness)
        some = written.lengths > 0
        first = written.values[written.offsets[:-1][some]]
        last = written.values[written.offsets[1:][some] - 1]
        share = float((first != last).float().sum()) / max(len(written), 1)
        return scored, metrics | {"async/partial_responses": share}


def _joined(groups: Sequence[_Group]) -> Rollouts:
    """Join the responses of finished groups, which are numbered from 0."""
    parts = [each.rollouts.result() for each in groups]
    sizes = torch.tensor([len(each) for each in parts])
    numbers = torch.arange(len(parts)).repeat_interleave(sizes)
    return replace(Batch.concat(parts), group=numbers)
