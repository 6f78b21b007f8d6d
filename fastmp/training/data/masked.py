"""The dataset of masked language modelling: pairs of segments of one document, some tokens to be predicted.

    data = MaskedDataset.from_config(recipe.data, cache_dir="runs/data")  # with the interface of TokenDataset
    data.batch(step, microbatch, num_microbatches, dp_rank, dp_size)
        # tokens (B, S) int64: [CLS] A [SEP] B [SEP], then [PAD]
        # targets (B, S) int64: the token that stood there, where one is to be predicted; else -100
        # token_types (B, S) int64: 1 for B and the [SEP] behind it, else 0
        # padding_mask (B, S) bool: True at [PAD]
        # sentence_order (B,) int64: 1 where A stands behind B in the document, else 0; -100 in rows without
        #     text, which fill the last batch of held-out text

Any tokens will do: words and sentences are told from their ids (`words`), samples are planned by `masking`. A
sample is a pure function of (seed, epoch, its number), an epoch has every window of every document once, and
a step's samples do not depend on the layout. A document of less than two tokens has no sample.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from fastmp.config import DataConfig, MaskedLMConfig
from fastmp.training.data.dataset import IGNORE_INDEX, TokenDataset, nothing_held_out, open_corpora
from fastmp.training.data.masking import (
    Draws,
    Grid,
    Segments,
    arrange,
    budgets,
    choose_masked,
    cut,
    replace_masked,
)
from fastmp.training.data.megatron import MegatronSplit
from fastmp.training.data.sampling import epoch_key, first_sample, mix, permute
from fastmp.training.data.tokenfile import TokenSplit
from fastmp.training.data.tokenize import Tokenizer
from fastmp.training.data.words import LOOKBACK, WordTable

Bools = npt.NDArray[np.bool_]
Ints = npt.NDArray[np.int64]
Keys = npt.NDArray[np.uint64]

RESERVED = 3  # tokens of a sample that are no text: [CLS], [SEP], [SEP]
BLOCK = 64  # documents whose windows are counted together: the table has 8 bytes for so many
AT_ONCE = 1 << 20  # documents that are looked at together, when it is made
SHORT, SIZE, MIDDLE, SWAP, PLACES = range(5)  # numbers of a sample's stream, see `Draws`


@dataclass(frozen=True)
class SpecialTokens:
    """Ids of the tokens that stand for no text."""

    cls: int
    sep: int
    mask: int
    pad: int

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> SpecialTokens:
        """Return the ids of BERT's or RoBERTa's names; missing ones come after the vocabulary."""
        behind = tokenizer.vocab_size
        ids = []
        for names in (("[CLS]", "<s>"), ("[SEP]", "</s>"), ("[MASK]", "<mask>"), ("[PAD]", "<pad>")):
            found = tokenizer.special_id(*names)
            ids.append(behind if found is None else found)
            behind += found is None
        return cls(*ids)


class MaskedDataset:
    """Samples of masked language modelling from what `TokenDataset` takes; see the top of this module.

    masking: what is masked, and how much.
    vocab_size: of the tokenizer and of those special tokens that it lacks; `special` has their ids.
    max_masked: the most tokens of a sample that are to be predicted.

    Opening reads the places of all documents, beside what `TokenDataset` does. ValueError where no document
    has two tokens.
    """

    def __init__(
        self,
        source: str | Path,
        *,
        seq_len: int,
        micro_batch_size: int,
        seed: int,
        masking: MaskedLMConfig | None = None,
        tokenizer: str = "byte",
        validation_fraction: float = 0.05,
        validation_source: str | Path | None = None,
    ) -> None:
        if seq_len < RESERVED + 2 or micro_batch_size < 1:
            raise ValueError(
                f"MaskedDataset: seq_len {seq_len} must be {RESERVED + 2} or more, and micro_batch_size "
                f"{micro_batch_size} positive"
            )
        self.seq_len, self.micro_batch_size, self.seed = seq_len, micro_batch_size, seed
        self.masking = MaskedLMConfig() if masking is None else masking
        corpus = open_corpora(source, tokenizer, validation_fraction, validation_source)
        self.tokenizer, self.train, self._validation = corpus
        self.special = SpecialTokens.of(self.tokenizer)
        self.vocab_size = 1 + max(self.tokenizer.vocab_size - 1, *vars(self.special).values())
        self.max_masked = self.masking.max_masked(seq_len)
        pieces = self.tokenizer.pieces()
        self._words = WordTable(pieces)
        self._ordinary = np.array([i for i, piece in enumerate(pieces) if piece.text], np.int64)
        self._grid = Grid(seq_len - RESERVED)
        self._windows = WindowIndex(self.train, self._grid)
        if not self._windows.count:
            raise ValueError(f"{self.train.path}: no document has two tokens, of which a sample is made")
        self._held_out = None if self._validation is None else WindowIndex(self._validation, self._grid)

    @classmethod
    def from_config(cls, config: DataConfig, *, cache_dir: str | Path) -> MaskedDataset:
        """Open `config.path`, or the built-in `config.text`, built under `cache_dir` the first time."""
        return cls(
            TokenDataset.built(config, cache_dir),
            seq_len=config.seq_len,
            micro_batch_size=config.micro_batch_size,
            seed=config.seed,
            masking=config.masked_lm,
            tokenizer=config.tokenizer,
            validation_fraction=config.validation_fraction,
            validation_source=config.validation_path,
        )

    @property
    def num_samples(self) -> int:
        """Samples of an epoch."""
        return self._windows.count

    @property
    def bytes_per_token(self) -> None:
        """None: losses of masked tokens do not cover the text."""
        return None

    def held_out(self) -> list[tuple[str, float, MaskedDataset]]:
        """Return the held-out set, as `TokenDataset.held_out`."""
        return [(str(self.validation.path), 1.0, self)]

    @property
    def validation(self) -> TokenSplit | MegatronSplit:
        """The held-out split. Raises ValueError if there is none."""
        return self._held_out_windows.split

    @property
    def _held_out_windows(self) -> WindowIndex:
        if self._held_out is None:
            raise nothing_held_out(str(self.train.path.parent))
        return self._held_out

    def batch(
        self, step: int, microbatch: int, num_microbatches: int, dp_rank: int, dp_size: int
    ) -> dict[str, Any]:
        """Return the samples of a rank's microbatch, on the CPU; `first_sample` selects them."""
        first = first_sample(step, microbatch, num_microbatches, dp_rank, dp_size, self.micro_batch_size)
        numbers = np.arange(first, first + self.micro_batch_size)
        epochs, samples = np.divmod(numbers, self.num_samples)
        keys = np.empty(len(numbers), np.uint64)
        for epoch in np.unique(epochs).tolist():
            here, key = epochs == epoch, epoch_key(self.seed, epoch)
            keys[here] = mix(key)
            samples[here] = permute(samples[here], self.num_samples, key)
        return _tensors(self._samples(self._windows, samples, keys))

    def num_validation_batches(self, dp_size: int = 1) -> int:
        """Return the number of batches that `validation_batches` yields on every rank."""
        return -(-self._held_out_windows.count // (self.micro_batch_size * dp_size))

    def validation_batches(
        self, dp_rank: int = 0, dp_size: int = 1, *, max_batches: int | None = None
    ) -> Iterator[dict[str, Any]]:
        """Yield samples of all held-out text, over the ranks together: every window once.

        As `batch`; rows that fill the last batches have no text, and nothing to be predicted. Every rank gets
        equally many batches, the same ones at every call; `max_batches` stops earlier, for a quick look.
        """
        windows, count = self._held_out_windows, self.num_validation_batches(dp_size)
        for number in range(count if max_batches is None else min(count, max_batches)):
            first = (number * dp_size + dp_rank) * self.micro_batch_size
            samples = np.arange(first, min(first + self.micro_batch_size, windows.count))
            keys = np.full(len(samples), mix(epoch_key(self.seed, 0)), np.uint64)
            yield _tensors(self._filled(self._samples(windows, samples, keys)))

    def _samples(self, windows: WindowIndex, samples: Ints, keys: Keys) -> dict[str, npt.NDArray[Any]]:
        """Return the `samples` (n,) of a split; keys: of their epochs."""
        draws = Draws(mix(mix(keys) + samples.astype(np.uint64)))
        text, words, segments = self._segments(windows, samples, keys, draws)
        swapped = draws.uniform(SWAP) < 0.5
        pairs = arrange(segments, swapped, self.seq_len)
        special = self.special
        tokens = np.where(pairs.text, np.take_along_axis(text, pairs.source, axis=1), special.sep)
        tokens[pairs.padding] = special.pad
        tokens[:, 0] = special.cls
        chosen = choose_masked(
            np.take_along_axis(words, pairs.source, axis=1) & pairs.text | pairs.begins,
            pairs.text,
            pairs.begins,
            budgets(segments.end - segments.begin, self.masking.mask_fraction),
            self.masking.max_ngram,
            draws,
            PLACES,
        )
        replaced = PLACES + 2 * self.seq_len
        return {
            "tokens": replace_masked(tokens, chosen, special.mask, self._ordinary, draws, replaced),
            "targets": np.where(chosen, tokens, IGNORE_INDEX),
            "token_types": pairs.second.astype(np.int64),
            "padding_mask": pairs.padding,
            "sentence_order": swapped.astype(np.int64),
        }

    def _segments(
        self, windows: WindowIndex, samples: Ints, keys: Keys, draws: Draws
    ) -> tuple[Ints, Bools, Segments]:
        """Return the text around each window (n, K), a mask of word starts, and the segments."""
        grid = self._grid
        begins, lengths, starts = windows.find(samples, keys)
        origins = starts - grid.reach - LOOKBACK  # where in the document the text begins, even before it
        text = np.full(
            (len(samples), LOOKBACK + grid.reach + grid.capacity + 1), self.tokenizer.end_of_text, np.int64
        )
        low, high = np.maximum(origins, 0), np.minimum(origins + text.shape[1], lengths)
        places = zip(begins.tolist(), origins.tolist(), low.tolist(), high.tolist())
        for row, (begin, origin, first, last) in enumerate(places):
            text[row, first - origin : last - origin] = windows.split.read(begin + first, begin + last)

        words, sentences = self._words.starts(text)
        positions = origins[:, None] + np.arange(text.shape[1])
        last = lengths[:, None] - 1
        edges = (positions == 0) | (positions == last + 1)
        inside = (positions > 0) & (positions < last)  # the last token alone is no sentence
        sentences = sentences & inside | edges
        words = words & (inside | (positions == last)) | edges
        sizes = 2 + (draws.uniform(SIZE) * (grid.capacity - 1)).astype(np.int64)
        sizes[draws.uniform(SHORT) >= self.masking.short_fraction] = grid.capacity
        ends = np.minimum(lengths - origins, text.shape[1])
        chance = draws.uniform(MIDDLE)
        return text, words, cut(words, sentences, starts - origins, ends, sizes, grid.reach, chance)

    def _filled(self, batch: dict[str, npt.NDArray[Any]]) -> dict[str, npt.NDArray[Any]]:
        """Return `batch` padded to a microbatch with rows of special tokens only."""
        special, shape = self.special, (self.micro_batch_size - len(batch["tokens"]), self.seq_len)
        tokens = np.full(shape, special.pad, np.int64)
        tokens[:, :RESERVED] = special.cls, special.sep, special.sep
        rows = {
            "tokens": tokens,
            "targets": np.full(shape, IGNORE_INDEX, np.int64),
            "token_types": np.zeros(shape, np.int64),
            "padding_mask": np.broadcast_to(np.arange(self.seq_len) >= RESERVED, shape),
            "sentence_order": np.full(shape[0], IGNORE_INDEX, np.int64),
        }
        return {name: np.concatenate([batch[name], rows[name]]) for name in rows}


class WindowIndex:
    """An index of the windows of all documents of a split, in order; `count` is their number.

    A table has the number of windows before every BLOCK documents; a block is counted on demand.
    """

    def __init__(self, split: TokenSplit | MegatronSplit, grid: Grid) -> None:
        """Count the windows. Raises ValueError if the offsets of documents are damaged."""
        self.split, self._grid = split, grid
        self._num_documents = split.info.num_documents
        counts = []
        for first in range(0, self._num_documents, AT_ONCE):
            documents = np.arange(first, min(first + AT_ONCE, self._num_documents))
            of_documents = grid.count(split.texts(documents)[1])
            counts.append(np.add.reduceat(of_documents, np.arange(0, len(documents), BLOCK)))
        self._before = np.concatenate([[0], np.cumsum(np.concatenate(counts))])
        self.count = int(self._before[-1])

    def find(self, windows: Ints, keys: Keys) -> tuple[Ints, Ints, Ints]:
        """Return (first token, length) of each window's document and the window's start in it, each (n,).

        keys: of their epochs.
        """
        rows = np.arange(len(windows))
        blocks = np.searchsorted(self._before, windows, side="right") - 1
        documents = blocks[:, None] * BLOCK + np.arange(BLOCK)
        begins, lengths = self.split.texts(np.minimum(documents, self._num_documents - 1))
        behind = self._before[blocks][:, None] + np.cumsum(self._grid.count(lengths), axis=1)
        here = (behind <= windows[:, None]).sum(axis=1)
        before = np.where(here > 0, behind[rows, here - 1], self._before[blocks])
        document, length = documents[rows, here], lengths[rows, here]
        phases = mix(keys + document.astype(np.uint64))
        return begins[rows, here], length, self._grid.starts(length, windows - before, phases)


def _tensors(batch: dict[str, npt.NDArray[Any]]) -> dict[str, Any]:
    import torch  # here, so that building token files does not wait for it

    return {name: torch.from_numpy(array) for name, array in batch.items()}
