"""The plan of masked samples: windows and cuts, which runs of words are masked, and what becomes of them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastmp.training.data.masking import (
    Draws,
    Grid,
    Segments,
    _run_begins,
    arrange,
    budgets,
    choose_masked,
    cut,
    replace_masked,
)
from fastmp.training.data.sampling import mix


def draws(count, seed=0):
    return Draws(mix(np.arange(count, dtype=np.uint64) + np.uint64(seed << 32)))


@st.composite
def rows(draw):
    """Flags of up to four rows of up to sixty tokens: special ones, text in two segments, words, padding."""
    width, count = draw(st.integers(5, 60)), draw(st.integers(1, 4))
    shape = (count, width)
    text, begins, words = (np.zeros(shape, np.bool_) for _ in range(3))
    for row in range(count):
        whole = draw(st.integers(2, width - 3))
        size = draw(st.integers(1, whole - 1))
        text[row, 1 : 1 + size] = text[row, 2 + size : 2 + whole] = True
        begins[row, [1, 2 + size]] = True
        share = draw(st.sampled_from([0.0, 0.2, 0.7, 1.0]))
        words[row] = np.random.default_rng(draw(st.integers(0, 999))).random(width) < share
    return words & text | begins, text, begins


def choose_one_by_one(words, text, begins, budget, max_ngram, chances):
    """What `choose_masked` says of one row, in a loop over words."""
    columns = np.flatnonzero(text)
    spans, size = [], 0
    for column in columns:
        if words[column] or size % budget == 0:
            spans.append([column])
            size = 0
        else:
            spans[-1].append(column)
        size += 1
    sums = np.cumsum(1 / np.arange(1, max_ngram + 1))
    runs, left, drawn = [], 0, 0
    for span in spans:
        if left == 0:
            left = 1 + int((chances[drawn] >= sums[:-1] / sums[-1]).sum())
            drawn += 1
            runs.append([])
        elif begins[span[0]]:
            runs.append([])
        left -= 1
        runs[-1].append(span)
    first_words = np.cumsum([0, *map(len, runs)])
    order = sorted(range(len(runs)), key=lambda run: chances[len(words) + first_words[run]])
    chosen, room = np.zeros(len(words), bool), budget
    for run in order:
        for span in runs[run]:
            if len(span) > room:
                return chosen
            chosen[span] = True
            room -= len(span)
    return chosen


@settings(max_examples=50)
@given(rows=rows(), fraction=st.sampled_from([0.05, 0.15, 0.5]), max_ngram=st.integers(1, 4))
def test_masked_are_runs_of_whole_words_within_the_budget(rows, fraction, max_ngram):
    words, text, begins = rows
    chances, budget = draws(len(words)), budgets(text.sum(1), fraction)
    chosen = choose_masked(words, text, begins, budget, max_ngram, chances, 5)
    width = words.shape[1]
    for row in range(len(words)):
        own = chances.matrix(5, 2 * width)[row]
        expected = choose_one_by_one(words[row], text[row], begins[row], budget[row], max_ngram, own)
        assert chosen[row].tolist() == expected.tolist()
    assert not (chosen & ~text).any()
    assert (1 <= chosen.sum(1)).all() and (chosen.sum(1) <= budget).all()
    alone = choose_masked(
        words[-1:], text[-1:], begins[-1:], budget[-1:], max_ngram, Draws(chances.keys[-1:]), 5
    )
    assert (alone == chosen[-1:]).all()  # whatever stands beside it


def test_of_words_that_fit_none_is_cut():
    """Words of one to four tokens: never a part of one, and the budget is spent but for a word."""
    sizes = np.random.default_rng(1).integers(1, 5, (64, 80))
    width = int(sizes.sum(1).max())
    words, text = np.zeros((64, width), bool), np.zeros((64, width), bool)
    for row, own in enumerate(sizes):
        words[row, np.cumsum(own) - own], text[row, : own.sum()] = True, True
    begins = np.zeros_like(words)
    begins[:, 0] = True
    budget = budgets(text.sum(1), 0.15)
    chosen = choose_masked(words, text, begins, budget, 3, draws(64), 0)
    of_word = np.cumsum(words, 1)
    for row in range(64):
        inside = np.bincount(of_word[row], chosen[row])[1 : 1 + 80]
        assert set(inside[inside > 0] - sizes[row][inside > 0]) == {0}
    assert (chosen.sum(1) > budget - 4).all()


def test_lengths_of_runs_are_as_one_over_n():
    """Chi-square over 45,000 runs; 13.8 is what two degrees of freedom pass in 999 of 1000 cases."""
    lengths = np.diff(np.flatnonzero(_run_begins(draws(1, seed=3).matrix(0, 80_000), 3)[0]))
    observed = np.bincount(lengths, minlength=4)[1:]
    expected = len(lengths) * np.array([6, 3, 2]) / 11
    assert len(observed) == 3 and ((observed - expected) ** 2 / expected).sum() < 13.8


def test_runs_of_every_length_and_place_have_the_same_chance():
    """Of 400 rows of 300 words: the lengths of masked runs, and how often each place is masked.

    The last run of a row, which is shortened, is not counted; it is rather a long one.
    """
    shape = (400, 300)
    text = np.ones(shape, bool)
    begins = np.zeros(shape, bool)
    begins[:, 0] = True
    chances = draws(400, seed=4)
    chosen = choose_masked(text, text, begins, np.full(400, 45), 3, chances, 0)
    assert (chosen.sum(1) == 45).all()
    of_run = np.cumsum(_run_begins(chances.matrix(0, 300), 3), axis=1)
    lengths = np.zeros(4)
    for row in range(400):
        whole, masked = np.bincount(of_run[row]), np.bincount(of_run[row], chosen[row])
        lengths += np.bincount(whole[masked == whole], minlength=4)
    assert lengths[1:] / lengths[1:].sum() == pytest.approx(np.array([6, 3, 2]) / 11, abs=0.02)
    by_tenths = chosen.reshape(400, 10, 30).mean((0, 2))
    assert by_tenths == pytest.approx(0.15, abs=0.012)


def test_of_the_chosen_80_percent_are_masked_10_random_10_as_they_were():
    tokens = np.arange(400 * 500).reshape(400, 500) % 1000
    chosen = tokens % 3 == 0
    ordinary = np.arange(2000, 3000)
    seen = replace_masked(tokens, chosen, 5000, ordinary, draws(400), 0)
    assert (seen[~chosen] == tokens[~chosen]).all()
    shares = [(seen == 5000), np.isin(seen, ordinary), (seen == tokens) & chosen]
    counts = np.array([share.sum() for share in shares])
    expected = chosen.sum() * np.array([0.8, 0.1, 0.1])
    assert counts.sum() == chosen.sum() and ((counts - expected) ** 2 / expected).sum() < 13.8
    drawn = np.bincount(seen[shares[1]] - 2000, minlength=1000)
    assert drawn.max() < 5 * drawn.mean() and (drawn > 0).mean() > 0.95


@pytest.mark.full
@settings(max_examples=300)
@given(
    capacity=st.integers(2, 60),
    length=st.integers(2, 400),
    borders=st.lists(st.integers(1, 399), max_size=40),
    phase=st.integers(0, 2**64 - 1),
)
def test_windows_cover_a_document(capacity, length, borders, phase):
    """At any borders and any phase, and none is longer than it may be; both halves have tokens."""
    grid = Grid(capacity)
    count = int(grid.count(np.array(length)))
    nths = np.arange(count)
    starts = grid.starts(np.full(count, length), nths, np.full(count, phase, np.uint64))
    flags = np.zeros((count, length + capacity + 1), bool)
    flags[:, [border for border in borders if border < length]] = True
    flags[:, [0, length]] = True
    sentences = flags & (np.arange(flags.shape[1]) % 3 != 1)
    sentences[:, [0, length]] = True
    ends, sizes = np.full(count, length), np.full(count, capacity)
    halves = cut(flags, sentences, starts, ends, sizes, grid.reach, draws(count).uniform(0))
    assert halves.begin[0] == 0 and halves.end[-1] == length
    assert (halves.begin[1:] <= halves.end[:-1]).all()
    assert (halves.end - halves.begin <= capacity).all()
    assert (halves.begin < halves.middle).all() and (halves.middle < halves.end).all()
    for begin, middle, end in zip(halves.begin, halves.middle, halves.end):
        inside = [np.flatnonzero(kind[0, begin + 1 : end]) + begin + 1 for kind in (sentences, flags)]
        assert middle in next((kind for kind in inside if len(kind)), [middle])


def test_documents_of_less_than_two_tokens_have_no_window():
    assert Grid(16).count(np.array([-1, 0, 1, 2, 16, 17, 28, 29])).tolist() == [0, 0, 0, 1, 1, 2, 2, 3]


def test_segments_are_cut_at_any_sentence():
    flags = np.zeros((2000, 12), bool)
    flags[:, [0, 3, 7, 9, 11]] = True
    whole = np.full(2000, 11)
    halves = cut(flags, flags, np.zeros(2000, int), whole, whole, 1, draws(2000).uniform(0))
    counts = np.bincount(halves.middle, minlength=12)
    assert np.flatnonzero(counts).tolist() == [3, 7, 9] and counts[counts > 0].min() > 570


@given(middle=st.integers(1, 9), end=st.integers(2, 10), swap=st.booleans())
def test_halves_are_arranged_between_special_tokens(middle, end, swap):
    middle = min(middle, end - 1)
    segments = Segments(*(np.array([4 + place]) for place in (0, middle, end)))
    pairs = arrange(segments, np.array([swap]), 13)
    first, second = np.arange(4, 4 + middle), np.arange(4 + middle, 4 + end)
    first, second = (second, first) if swap else (first, second)
    expected = ["cls", *first, "sep", *second, "sep", *["pad"] * (10 - end)]
    for column, token in enumerate(expected):
        assert pairs.text[0, column] == isinstance(token, np.integer)
        assert pairs.source[0, column] == (token if pairs.text[0, column] else 0)
        assert pairs.padding[0, column] == (token == "pad")
        assert pairs.begins[0, column] == (column in (1, 2 + len(first)))
        assert pairs.second[0, column] == (2 + len(first) <= column < 3 + end)
