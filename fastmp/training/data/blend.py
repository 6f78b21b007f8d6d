"""Blends: the samples of a run come from several sources, with shares that hold at any point.

Shares are whole numbers of samples in a period, so that one period says all: sample i of the run is sample
i mod period of it, and its source has given a known number of samples before. Neither depends on the length
of the run or on where it resumes.

Within a period the j-th sample of a source with share c of P may come at places floor(j P / c) to
ceil((j + 1) P / c) - 1. Whoever keeps to these windows has given, after any number of samples, less than one
sample more or less than its exact share. The place goes to the sample that may wait least; that this keeps
all windows is the result of Baruah, Cohen, Plaxton and Varvel (1996) for one processor. To give each
place to the source that is furthest behind does not keep them: with weights 69, 10, 1, 69, one gets off by
more than a sample.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from fastmp.config import DataConfig
from fastmp.training.data.dataset import TokenDataset, check_same_tokenizer, make_batch, nothing_held_out
from fastmp.training.data.masked import MaskedDataset
from fastmp.training.data.sampling import first_sample

LONGEST_PERIOD = 1 << 16  # samples; weights that would need a longer one are rounded to parts of this


class Blend:
    """The source of each sample of a run. shares: the samples of each source in `period` samples."""

    def __init__(self, weights: Sequence[Fraction | int]) -> None:
        """Scale `weights` to their sum. Raises ValueError for one below half a part of LONGEST_PERIOD."""
        self.shares = _shares(weights)
        self.period = sum(self.shares)
        self._source = np.array(list(_schedule(self.shares)), np.int64)
        self._before = np.empty(self.period, np.int64)  # samples of the same source earlier in the period
        for source, share in enumerate(self.shares):
            self._before[self._source == source] = np.arange(share)

    def locate(self, first: int, count: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Return the source and its sample number, each (count,), of samples `first` and after."""
        periods, places = np.divmod(np.arange(first, first + count), self.period)
        sources = self._source[places]
        return sources, periods * np.array(self.shares)[sources] + self._before[places]


class BlendedDataset:
    """Samples of several sources by weight; what else a `TokenDataset` is to a training loop.

    Each source is read in the order that it would have alone. ValueError where sources differ in their
    tokenizers, in seq_len or in micro_batch_size.
    """

    def __init__(self, sources: dict[str, TokenDataset], weights: Sequence[Fraction | int]) -> None:
        self.names, self.sources = tuple(sources), tuple(sources.values())
        self.blend = Blend(weights)
        (name, one), *others = sources.items()
        for other_name, other in others:
            check_same_tokenizer(name, one.tokenizer, other_name, other.tokenizer)
            for what in ("seq_len", "micro_batch_size", "document_masking"):
                if getattr(one, what) != getattr(other, what):
                    raise ValueError(
                        f"BlendedDataset: {name} has {what} {getattr(one, what)}, {other_name} has "
                        f"{getattr(other, what)}"
                    )
        self.seq_len, self.micro_batch_size = one.seq_len, one.micro_batch_size
        self.tokenizer, self.vocab_size = one.tokenizer, one.vocab_size
        rooms = [source.max_documents for source in self.sources]
        self.max_documents = None if None in rooms else max(room for room in rooms if room is not None)

    @property
    def bytes_per_token(self) -> float | None:
        """Bytes of training text per token; None if a source does not know them."""
        known = [source.bytes_per_token for source in self.sources]
        parts = [share * each for share, each in zip(self.blend.shares, known) if each is not None]
        return sum(parts) / self.blend.period if len(parts) == len(known) else None

    def batch(
        self, step: int, microbatch: int, num_microbatches: int, dp_rank: int, dp_size: int
    ) -> dict[str, Any]:
        """Return the microbatch of a rank, as `TokenDataset.batch`."""
        first = first_sample(step, microbatch, num_microbatches, dp_rank, dp_size, self.micro_batch_size)
        sources, samples = self.blend.locate(first, self.micro_batch_size)
        windows = np.empty((self.micro_batch_size, self.seq_len + 1), np.int64)
        begins = np.empty((self.micro_batch_size, self.seq_len), np.bool_)
        masked = self.sources[0].document_masking
        for number in np.unique(sources).tolist():
            rows = sources == number  # a source's own samples follow one another
            windows[rows], of_rows = self.sources[number].samples(int(samples[rows][0]), int(rows.sum()))
            if of_rows is not None:
                begins[rows] = of_rows
        tokens, targets = windows[:, :-1].copy(), windows[:, 1:].copy()
        return make_batch(tokens, targets, begins if masked else None, self.max_documents)

    def held_out(self) -> list[tuple[str, float, TokenDataset]]:
        """Return (name, share, source) of sources with held-out text. Raises ValueError if none has."""
        having = [number for number, source in enumerate(self.sources) if source.holds_out]
        if not having:
            raise nothing_held_out(", ".join(self.names))
        total = sum(self.blend.shares[number] for number in having)
        return [(self.names[n], self.blend.shares[n] / total, self.sources[n]) for n in having]

    def validation_batches(
        self, dp_rank: int = 0, dp_size: int = 1, *, max_batches: int | None = None
    ) -> Iterator[dict[str, Any]]:
        """Yield the held-out text of all sources in turn; `max_batches` is of each."""
        for _, _, source in self.held_out():
            yield from source.validation_batches(dp_rank, dp_size, max_batches=max_batches)


def open_dataset(
    config: DataConfig, *, cache_dir: str | Path, static_shapes: bool = False
) -> TokenDataset | BlendedDataset | MaskedDataset:
    """Open the dataset of `config`: a `TokenDataset`, a blend of several, or a `MaskedDataset`.

    Masked samples always have static shapes.
    """
    if config.masked_lm is not None:
        return MaskedDataset.from_config(config, cache_dir=cache_dir)
    options: dict[str, Any] = {"cache_dir": cache_dir, "static_shapes": static_shapes}
    if config.blend is None:
        return TokenDataset.from_config(config, **options)
    alone = replace(config, blend=None)
    return BlendedDataset(
        {path: TokenDataset.from_config(replace(alone, path=path), **options) for _, path in config.sources},
        [weight for weight, _ in config.sources],
    )


def _shares(weights: Sequence[Fraction | int]) -> tuple[int, ...]:
    """Return the smallest integers in the ratio of `weights`, rounded if they exceed LONGEST_PERIOD."""
    fractions = [Fraction(weight) for weight in weights]
    if not fractions or min(fractions) <= 0:
        raise ValueError(f"Blend: weights must be positive numbers, got {[str(each) for each in fractions]}")
    parts = [each / sum(fractions) for each in fractions]
    period = math.lcm(*(part.denominator for part in parts))
    if period > LONGEST_PERIOD:
        period = LONGEST_PERIOD
        for number, part in enumerate(parts):
            if part * period < Fraction(1, 2):
                raise ValueError(
                    f"Blend: weight {number + 1} is {float(part):.3g} of the sum of all: a source gives at "
                    f"least half a sample in {LONGEST_PERIOD:,}; leave it out"
                )
    exact = [part * period for part in parts]
    shares = [max(1, math.floor(each)) for each in exact]
    behind = sorted(range(len(exact)), key=lambda number: shares[number] - exact[number])
    for number in behind[: max(0, period - sum(shares))]:
        shares[number] += 1
    common = math.gcd(*shares)
    return tuple(share // common for share in shares)


def _schedule(shares: Sequence[int]) -> Iterator[int]:
    """Yield the source of each place of a period; the first of those whose windows end together."""
    period = sum(shares)
    later = [(0, source, 0) for source in range(len(shares))]  # (first place, source, which of its samples)
    waiting: list[tuple[int, int, int]] = []  # (last place, ...)
    for place in range(period):
        while later and later[0][0] <= place:
            _, source, sample = heapq.heappop(later)
            heapq.heappush(waiting, (-(-(sample + 1) * period // shares[source]) - 1, source, sample))
        last, source, sample = heapq.heappop(waiting)
        assert place <= last
        yield source
        if sample + 1 < shares[source]:
            heapq.heappush(later, ((sample + 1) * period // shares[source], source, sample + 1))
