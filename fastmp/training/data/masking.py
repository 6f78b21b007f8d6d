"""Samples of masked language modelling: choose windows, segments and masked tokens.

Pure functions of arrays, on a whole batch at once. All chance comes from `Draws`, a counter-based stream of
each sample, so that a sample is the same whatever stands beside it.

A document is covered by windows of at most C tokens, which may overlap. Their nominal starts lie C - C // 8
tokens apart, or less; a window begins at the last border at or before its own, at most C // 8 tokens back,
and ends at the last border within C tokens. A border is where a sentence begins; else where a word does.
Windows between the first and the last of a document lie elsewhere in every epoch.

A window is cut in two where a sentence within it begins (a word, where none does; any token, where none
does), and the halves change places in half of the samples: the order that ALBERT predicts (Lan et al. 2020).

Words are masked in runs ("n-grams") of 1 to N words; lengths n have probability p(n) ~ 1/n, as in ALBERT
(section 4.1) and Megatron-LM. Each segment is divided into runs of such lengths, and runs are taken in random
order until the sample's budget of tokens is spent; of the last one, as many words as fit. Every run has the
same chance. 80% of the chosen tokens become [MASK], 10% a random token, 10% stay (Devlin et al. 2019).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from fastmp.training.data.sampling import mix

__all__ = [
    "Draws",
    "Grid",
    "Pairs",
    "Segments",
    "arrange",
    "budgets",
    "choose_masked",
    "cut",
    "replace_masked",
]

Bools = npt.NDArray[np.bool_]
Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Keys = npt.NDArray[np.uint64]

MASKED, RANDOM = 0.8, 0.9  # a chosen token becomes [MASK] below the first, a random one below the second


@dataclass(frozen=True)
class Draws:
    """Uniform random numbers of B samples: number `counter` of the stream of 64 bits that a sample has.

    keys: (B,) uint64.
    """

    keys: Keys

    def uniform(self, counter: Any, rows: Any = slice(None)) -> Floats:
        """Return numbers in [0, 1) of the samples `rows`; `counter` broadcasts against them."""
        bits: Keys = mix(self.keys[rows] + np.asarray(counter, np.uint64))
        return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53

    def matrix(self, first: int, count: int) -> Floats:
        """Return numbers `first` to `first + count - 1` of every sample: (B, count)."""
        return Draws(self.keys[:, None]).uniform(np.arange(first, first + count))


@dataclass(frozen=True)
class Grid:
    """Nominal starts of windows of at most `capacity` tokens in documents, before they move to borders."""

    capacity: int

    @property
    def reach(self) -> int:
        """Maximum distance of a border before its target position, in tokens."""
        return self.capacity // 8

    @property
    def stride(self) -> int:
        return self.capacity - self.reach

    def count(self, lengths: Ints) -> Ints:
        """Return the number of windows of documents of these lengths; 0 below two tokens."""
        several = -(-lengths // self.stride)
        return np.where(lengths > self.capacity, several, np.where(lengths < 2, 0, 1))

    def starts(self, lengths: Ints, windows: Ints, phases: Keys) -> Ints:
        """Return the nominal starts of `windows`; phases: any uint64, one for each document and epoch.

        The first is 0, the last ends with the document. The others are shifted by a phase, at most the
        surplus of their strides over the document: all starts stay a stride apart, or less.
        """
        last = self.count(lengths) - 1
        slack = np.maximum((last + 1) * self.stride - lengths, 0)
        between = windows * self.stride - (phases % (slack + 1).astype(np.uint64)).astype(np.int64)
        return np.where(windows == 0, 0, np.where(windows == last, lengths - self.stride, between))


@dataclass(frozen=True)
class Segments:
    """The halves of B windows, as columns of text: `begin` to `middle` - 1, and `middle` to `end` - 1."""

    begin: Ints
    middle: Ints
    end: Ints


def cut(
    words: Bools, sentences: Bools, starts: Ints, ends: Ints, sizes: Ints, reach: int, chance: Floats
) -> Segments:
    """Move windows to borders and cut them in two.

    words, sentences: (B, K), whether a word or a sentence begins at a column of the text; the end of a
        document counts as both.
    starts, ends: (B,), nominal starts of windows, and ends of documents, or K where these are further away.
    sizes: (B,), the most tokens of a window, at least 2.
    chance: (B,) in [0, 1), which of the places to cut at.
    """
    rows, columns = np.arange(len(words)), np.arange(words.shape[1])
    last_word = np.maximum.accumulate(np.where(words, columns, -1), axis=1)
    last_sentence = np.maximum.accumulate(np.where(sentences, columns, -1), axis=1)

    def border(at: Ints, low: Ints) -> Ints:
        """Return the last border from `low` to `at`, or `at` if there is none."""
        sentence, word = last_sentence[rows, at], last_word[rows, at]
        return np.where(sentence >= low, sentence, np.where(word >= low, word, at))

    begin = border(starts, starts - reach)
    furthest = np.minimum(begin + sizes, ends)
    end = border(furthest, np.maximum(furthest - reach, begin + 2))

    middle = begin + 1 + (chance * (end - begin - 1)).astype(np.int64)
    for flags in (words, sentences):
        seen = np.cumsum(flags, axis=1)
        before, inside = seen[rows, begin], seen[rows, end - 1] - seen[rows, begin]
        wanted = before + 1 + (chance * inside).astype(np.int64)
        middle = np.where(inside > 0, np.argmax(seen >= wanted[:, None], axis=1), middle)
    return Segments(begin, middle, end)


@dataclass(frozen=True)
class Pairs:
    """[CLS] A [SEP] B [SEP] and padding in B rows of S columns; all (B, S).

    source: the column of the text that a token is from. text: which tokens are from there. begins: the first
    one of each segment. second: B and the [SEP] behind it. padding: what is behind that.
    """

    source: Ints
    text: Bools
    begins: Bools
    second: Bools
    padding: Bools


def arrange(segments: Segments, swapped: Bools, seq_len: int) -> Pairs:
    """Return the layout of samples; segments are swapped where `swapped` (B,)."""
    begin, middle, end = (each[:, None] for each in (segments.begin, segments.middle, segments.end))
    swap = swapped[:, None]
    first, second = np.where(swap, middle, begin), np.where(swap, begin, middle)
    size, whole = np.where(swap, end - middle, middle - begin), end - begin
    columns = np.arange(seq_len)
    of_first = (columns > 0) & (columns <= size)
    of_second = (columns > size + 1) & (columns <= whole + 1)
    source = np.where(of_first, first - 1, second - size - 2) + columns
    padding = columns > whole + 2
    return Pairs(
        source=np.where(of_first | of_second, source, 0),
        text=of_first | of_second,
        begins=(columns == 1) | (columns == size + 2),
        second=(columns > size + 1) & ~padding,
        padding=padding,
    )


def budgets(lengths: Ints, fraction: float) -> Ints:
    """Return the largest number of masked tokens for these lengths, at least one."""
    budget: Ints = np.maximum(1, np.rint(fraction * lengths)).astype(np.int64)
    return budget


def choose_masked(
    words: Bools, text: Bools, segments: Bools, budget: Ints, max_ngram: int, draws: Draws, first: int
) -> Bools:
    """Return a mask (B, S) of the tokens to predict: runs of whole words, at most `budget` (B,) tokens a row.

    text: (B, S), which are no special tokens and no padding. words: which of these begin a word. segments:
    which of these begin a segment: no run goes past them. A word of more tokens than the budget is divided
    into pieces of the budget. Numbers `first` to `first + 2 S - 1` of `draws` decide.
    """
    num_rows, num_columns = words.shape
    columns = np.arange(num_columns)
    of_word = columns - np.maximum.accumulate(np.where(words, columns, 0), axis=1)
    if (too_long := text & (of_word >= budget[:, None])).any():
        words = words | (too_long & (of_word % budget[:, None] == 0))
    row, column = np.nonzero(words)  # of each word of the batch
    if not len(row):
        return np.zeros_like(words)
    word_of_token = np.cumsum(words.ravel())[text.ravel()] - 1
    sizes = np.bincount(word_of_token)
    num_words = np.bincount(row, minlength=num_rows)
    nth = np.arange(len(row)) - (np.cumsum(num_words) - num_words)[row]  # word of its row

    chances = draws.matrix(first, 2 * num_columns)
    begins = _run_begins(chances[:, :num_columns], max_ngram)[row, nth] | segments[row, column]
    run_of_word, run = np.cumsum(begins) - 1, np.flatnonzero(begins)
    run_sizes, run_row = np.add.reduceat(sizes, run), row[run]
    # By rows, as keys are less than a half, and in each in random order.
    order = np.argsort(run_row + 0.5 * chances[:, num_columns:][run_row, nth[run]])
    spent = np.concatenate([[0], np.cumsum(run_sizes[order])])
    of_rows = spent[np.searchsorted(run_row, np.arange(num_rows))]  # before the first run of each row
    room = np.empty(len(run), np.int64)
    room[order] = budget[run_row] - (spent[:-1] - of_rows[run_row])

    ends = np.cumsum(sizes)
    within = ends - (ends - sizes)[run][run_of_word]  # tokens of the run up to the end of the word
    chosen = np.zeros_like(words)
    chosen[text] = (within <= room[run_of_word])[word_of_token]
    return chosen


def _run_begins(chances: Floats, max_ngram: int) -> Bools:
    """Return a mask of the words (B, S) that begin a run; `chances` (B, S) draw the lengths."""
    shares = 1.0 / np.arange(1, max_ngram + 1)
    lengths = 1 + np.searchsorted(np.cumsum(shares / shares.sum())[:-1], chances, side="right")
    begins = np.cumsum(lengths, axis=1) - lengths
    flags = np.zeros((len(chances), chances.shape[1] + 1), np.bool_)
    np.put_along_axis(flags, np.minimum(begins, chances.shape[1]), True, axis=1)
    return flags[:, :-1]


def replace_masked(tokens: Ints, chosen: Bools, mask: int, ordinary: Ints, draws: Draws, first: int) -> Ints:
    """Return the input tokens (B, S): 80% of the chosen ones are `mask`, 10% drawn from `ordinary`.

    Numbers `first` to `first + 2 S - 1` of `draws` decide.
    """
    rows, columns = np.nonzero(chosen)
    how = draws.uniform(first + columns, rows)
    which = (draws.uniform(first + tokens.shape[1] + columns, rows) * len(ordinary)).astype(np.int64)
    shown = np.where(how < MASKED, mask, np.where(how < RANDOM, ordinary[which], tokens[rows, columns]))
    result = tokens.copy()
    result[rows, columns] = shown
    return result
