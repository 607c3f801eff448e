"""Batches of prompts from data files.

Prompts form an endless stream, one epoch after another in a different order. The order is a
function of the seed and the epoch, so there is no state to save. A stateful sampler draws prompts
by earlier scores instead; its state is saved.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from rlctl.data_prep.rows import PromptRow
from rlctl.data_prep.sources import TRAIN, data_files
from rlctl.errors import ConfigError
from rlctl.plugins.result_check import check_result
from rlctl.recipes import schema
from rlctl.runtime.base.batch import Prompts, Ragged
from rlctl.runtime.data.prompt_lengths import prompt_lengths
from rlctl.runtime.data.row_table import Rows
from rlctl.runtime.data.samplers import (
    Order,
    Sampling,
    StatefulSampler,
)
from rlctl.runtime.data.tokenizer import encode_prompt, encode_text

if TYPE_CHECKING:
    from rlctl.data_prep.row_fields import RowField
    from rlctl.runtime.data.image_prompts import ImagePrompts
    from rlctl.runtime.data.mixing import Part

LOG = logging.getLogger(__name__)

TOO_LONG = "the prompt is too long"
_REJECTED = "the chat template rejects the prompt"


@dataclass(frozen=True)
class PromptSet:
    """Rows of the data files after filtering; their prompts are tokenized by `batch`."""

    rows: Rows
    encode: Callable[[PromptRow], list[int]]  # token ids of a row's prompt, truncated
    num_dropped: int = 0  # rows dropped as over-long
    mean_length: float = 0.0  # in tokens
    parts: tuple[Part, ...] = ()  # files by weight; none: all prompts alike
    has_images: bool = False
    skipped: Mapping[str, int] = field(default_factory=dict)  # rows by reason: data.skip_invalid

    @classmethod
    def load_train(
        cls,
        data: schema.Data,
        tokenizer: PreTrainedTokenizerBase,
        model: schema.Model | None = None,
        fields: Sequence[RowField] = (),
    ) -> PromptSet:
        """Load `data.train_files`, with the weights of the files if they have weights.

        Raises ConfigError as `load`, and for rows without the `fields` that the algorithm reads.
        """
        paths = data.train_paths
        weights = data.train_weights
        if weights is None:
            tables = _tables(paths, data, data.train_max_samples, TRAIN, tokenizer)
            return cls._of(tables, data, tokenizer, model, _Rules(fields, data.skip_invalid))
        rules = _Rules(fields, data.skip_invalid)
        sets = [
            cls._of(_tables([path], data, -1, TRAIN, tokenizer), data, tokenizer, model, rules)
            for path in paths
        ]
        from rlctl.runtime.data.mixing import Part

        starts = [sum(len(dataset) for dataset in sets[:number]) for number in range(len(sets))]
        parts = tuple(
            Part(start, start + len(dataset), weight / sum(weights))
            for start, dataset, weight in zip(starts, sets, weights, strict=True)
        )
        total = sum(len(dataset) * dataset.mean_length for dataset in sets)
        return cls(
            Rows.concat([dataset.rows for dataset in sets]),
            max(sets, key=lambda dataset: dataset.has_images).encode,
            sum(dataset.num_dropped for dataset in sets),
            total / parts[-1].stop,
            parts,
            any(dataset.has_images for dataset in sets),
            dict(sum((Counter(dataset.skipped) for dataset in sets), Counter[str]())),
        )

    @classmethod
    def load(
        cls,
        files: Sequence[str],
        data: schema.Data,
        tokenizer: PreTrainedTokenizerBase,
        max_samples: int,
        split: str = TRAIN,
        model: schema.Model | None = None,
    ) -> PromptSet:
        """Read parquet or JSONL files and count the tokens of prompts in the model's chat template.

        Reads at most `max_samples` rows (-1: all), of a data set without a split those of `split`.
        Prompts longer than `data.max_prompt_length` are dropped if `data.filter_overlong_prompts`,
        else handled by `data.truncation`, which drops those with images. `model` reads the images
        of rows. Raises ConfigError if no prompt remains, or for an over-long prompt with
        `truncation=error`.
        """
        tables = _tables(files, data, max_samples, split, tokenizer)
        return cls._of(tables, data, tokenizer, model, _Rules((), _skips(data, split)))

    @classmethod
    def _of(
        cls,
        tables: Sequence[Rows],
        data: schema.Data,
        tokenizer: PreTrainedTokenizerBase,
        model: schema.Model | None,
        rules: _Rules,
    ) -> PromptSet:
        """Build the prompts of the rows in `tables`: see `load` and `load_train`."""
        kwargs = data.apply_chat_template_kwargs
        limit = data.max_prompt_length
        rows = Rows.concat(tables)
        with_images = rows.with_images()
        images: ImagePrompts | None = None
        if with_images.any():
            from rlctl.runtime.data.image_prompts import ImagePrompts

            images = ImagePrompts(model, tokenizer)

        def encode(row: PromptRow, where: str = "") -> list[int]:
            if images is None:
                ids = encode_prompt(tokenizer, row.prompt, **kwargs)
            else:
                ids = encode_text(tokenizer, images.render(row.prompt, row.images, **kwargs))
            if len(ids) <= limit:
                return ids
            from rlctl.runtime.data.unusable_prompts import truncate

            return truncate(ids, data, where)

        lengths = np.concatenate(
            [prompt_lengths(table, tokenizer, kwargs, images, limit) for table in tables]
        )
        too_long = lengths > limit
        cannot_cut = with_images & (data.truncation != "error")
        drop = too_long & (data.filter_overlong_prompts | cannot_cut)
        failing = (lengths < 0) | (too_long & ~drop & (data.truncation == "error"))
        skipped = Counter(rows.skipped)
        if rules.skips:
            skipped.update(**{_REJECTED: int((lengths < 0).sum())})
            drop |= failing
            skipped.update(**{TOO_LONG: int((drop & too_long).sum())})
        for number in np.flatnonzero(failing & ~drop)[:1].tolist():
            encode(rows[number], rows.place_of(number))
        if rules.fields:
            drop[np.flatnonzero(~drop)[rules.faulty(rows.select(~drop), skipped)]] = True
        left_out = dict(+skipped)
        if drop.all():
            from rlctl.runtime.data.unusable_prompts import no_prompts

            raise no_prompts(rows, int((too_long & drop).sum()), left_out, limit)
        mean = float(np.minimum(lengths[~drop], limit).mean())
        num_dropped = int((drop & too_long).sum())
        has_images = images is not None
        return cls(
            rows.select(~drop), encode, num_dropped, mean, has_images=has_images, skipped=left_out
        )

    def check_tokens(self, lacking: Mapping[int, str]) -> None:
        """Raise ConfigError if a prompt has a token that the model lacks."""
        check_tokens(map(self.encode, self.rows), lacking)

    def batch(self, index: Sequence[int]) -> Prompts:
        """Return the N prompts at `index` as a batch with groups 0 … N−1."""
        rows = [self.rows[i] for i in index]
        ids = Ragged.from_rows([self.encode(row) for row in rows], dtype=torch.int64)
        images = [_contents(row) for row in rows]
        return Prompts(prompt_ids=ids, group=torch.arange(len(index)), rows=rows, images=images)

    def __len__(self) -> int:
        """Return the number of prompts."""
        return len(self.rows)


def _contents(row: PromptRow) -> tuple[bytes, ...]:
    """Return the files of the images of a row."""
    if not row.images:
        return ()
    from rlctl.data_prep.images import content_of

    return tuple(map(content_of, row.images))


@dataclass(frozen=True)
class _Rules:
    """Treatment of rows that cannot be used: with `skips` they are left out, else refused."""

    fields: Sequence[RowField]  # that the algorithm reads
    skips: bool

    def faulty(self, rows: Rows, skipped: Counter[str]) -> np.ndarray:
        """Return a mask (N,) of the rows to leave out, and count them by reason in `skipped`.

        Raises ConfigError for rows with faults that are not skipped.
        """
        from rlctl.runtime.data.row_checks import SKIP_HINT, RowFaults

        found = RowFaults.find(rows, self.fields)
        if not self.skips:
            found.raise_all(rows, SKIP_HINT)
        skipped.update(found.counts())
        return found.numbers > 0


def _skips(data: schema.Data, split: str) -> bool:
    return data.skip_invalid and split == TRAIN


def _tables(
    files: Sequence[str], data: schema.Data, max_samples: int, split: str, tokenizer: Any
) -> list[Rows]:
    """Return the rows of each data file, `max_samples` of all; see `PromptSet.load`."""
    if not files:
        key = "data.train_files" if split == TRAIN else "data.val_files"
        hint = "name a file; data.val_files=null trains without validation"
        raise ConfigError(f"{key} is an empty list", hint=hint)
    paths = [path for file in files for path in data_files(file, split)]
    if data.reader is not None:
        from rlctl.runtime.data.readers import read_files

        paths = read_files(paths, data, tokenizer, _skips(data, split))
    tables = [Rows.load(path, data, _skips(data, split)) for path in paths]
    if max_samples < 0:
        return tables
    starts = accumulate(map(len, tables[:-1]), initial=0)
    pairs = zip(tables, starts, strict=True)
    return [table[: max(0, max_samples - start)] for table, start in pairs]


def check_tokens(prompts: Iterable[Sequence[int]], lacking: Mapping[int, str]) -> None:
    """Raise ConfigError if one of `prompts` has one of the `lacking` tokens of a model."""
    for number, ids in enumerate(prompts if lacking else ()):
        if found := lacking.keys() & set(ids):
            raise ConfigError(
                f"prompt {number} contains {lacking[min(found)]!r}, an added token of the "
                "tokenizer that the model lacks",
                hint="a model whose embeddings were resized, a tokenizer without the token, or "
                "other prompts",
            )


@dataclass(frozen=True)
class PromptLoader:
    """Stream of prompts in batches of `batch_size`.

    Steps count from 1; epochs and positions in the stream from 0. An epoch omits the last prompts
    that do not fill a batch.
    """

    prompts: PromptSet
    batch_size: int
    sampler: Order
    seed: int
    stateful: StatefulSampler | None = None  # draws prompts instead of `sampler`

    @classmethod
    def from_config(cls, prompts: PromptSet, data: schema.Data) -> PromptLoader:
        """Build the loader with the sampler of the configuration."""
        sampling = Sampling.from_config(data)
        seed = data.seed
        stateful: StatefulSampler | None = None
        if sampling.stateful is not None and prompts.parts:
            from rlctl.runtime.data.mixing import MixedSampler

            stateful = MixedSampler(prompts.parts, sampling.stateful, seed)
        elif sampling.stateful is not None:
            stateful = sampling.stateful(len(prompts), seed)
        return cls(prompts, data.train_batch_size, sampling.order, seed, stateful)

    @property
    def steps_per_epoch(self) -> int:
        """Number of full batches in an epoch."""
        return len(self.prompts) // self.batch_size

    def epoch_of(self, position: int) -> int:
        """Return the epoch of a position in the stream."""
        return position // (self.steps_per_epoch * self.batch_size)

    def batch_at(self, step: int) -> Prompts:
        """Return the prompts of `step` (from 1); the same for every call.

        A stateful sampler draws them: then each call returns others.
        """
        return self.at(self.draw((step - 1) * self.batch_size, self.batch_size))

    def draw(self, position: int, count: int, avoid: Collection[int] = ()) -> list[int]:
        """Return the next `count` prompts, for `at`: positions from `position` of the stream on.

        A stateful sampler returns indices of prompts, those in `avoid` last.
        """
        if self.stateful is not None:
            drawn = self.stateful.draw(count, avoid)
            allowed = range(len(self.prompts))
            right_type = isinstance(drawn, Sequence)
            is_right = right_type and len(drawn) == count and all(row in allowed for row in drawn)
            expected = f"{count} numbers of prompts from 0 to {len(allowed) - 1}"
            check_result(type(self.stateful).draw, is_right, drawn, expected)
            return drawn
        return list(range(position, position + count))

    def at(self, drawn: Sequence[int]) -> Prompts:
        """Return the N prompts that `draw` has chosen as a batch with groups 0 … N−1."""
        if self.stateful is not None:
            return self.prompts.batch(drawn)
        orders = {
            epoch: self._order(epoch) for epoch in {self.epoch_of(position) for position in drawn}
        }
        per_epoch = self.steps_per_epoch * self.batch_size
        return self.prompts.batch(
            [int(orders[self.epoch_of(draw)][draw % per_epoch]) for draw in drawn]
        )

    def _order(self, epoch: int) -> Tensor:
        if self.prompts.parts:
            from rlctl.runtime.data.mixing import mixed_order

            return mixed_order(self.prompts.parts, self.sampler, epoch, self.seed)
        order = self.sampler(len(self.prompts), epoch, self.seed)
        expected = f"a tensor of ({len(self.prompts)},)"
        is_right = getattr(order, "shape", None) == (len(self.prompts),)
        check_result(self.sampler, is_right, order, expected)
        return order

    def observe(self, drawn: Sequence[int], scores: Sequence[float]) -> None:
        """Give the mean score of the responses to each of `drawn` to a stateful sampler."""
        if self.stateful is not None:
            self.stateful.observe(drawn, scores)

    def metrics(self, prompts: Prompts) -> dict[str, float]:
        """Return the share of each data source in `prompts`, and what the sampler reports.

        Data of one source has no shares. A sampler's metric without a section is in `sampler/`.
        """
        reported: Mapping[str, float] = {}
        if self.stateful is not None:
            reported = self.stateful.metrics()
            is_right = isinstance(reported, Mapping) and all(
                hasattr(value, "__float__") for value in reported.values()
            )
            check_result(type(self.stateful).metrics, is_right, reported, "numbers by name")
        found = {key if "/" in key else f"sampler/{key}": value for key, value in reported.items()}
        sources = sorted(self.prompts.rows.count_sources())
        if len(sources) > 1:
            drawn = Counter(row.data_source for row in prompts.rows)
            found |= {f"data/share/{name}": drawn[name] / len(prompts) for name in sources}
        return found

    def state_dict(self) -> dict[str, Any]:
        """Return the state of a stateful sampler, and nothing without one."""
        if self.stateful is None:
            return {}
        return {"sampler": {"num_prompts": len(self.prompts), "state": self.stateful.state_dict()}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state of a stateful sampler; it starts from scratch for other data."""
        saved = state.get("sampler")
        if self.stateful is None or saved is None:
            return
        if saved["num_prompts"] != len(self.prompts):
            LOG.warning(
                "the data has %d prompts instead of %d: the sampler starts from scratch",
                len(self.prompts),
                saved["num_prompts"],
            )
            return
        self.stateful.load_state_dict(saved["state"])
