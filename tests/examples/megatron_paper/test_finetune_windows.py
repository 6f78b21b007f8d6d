"""Windows of long contexts: every token is in one, and an answer comes back as it stands in the text."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from examples.megatron_paper.finetuning.windows import (
    best_span,
    most_context,
    place_of,
    span_of,
    window_ranges,
)


def google_ranges(num_tokens, room, stride):
    """As run_squad.py goes on: window after window, until one ends with the text."""
    found, start = [], 0
    while start < num_tokens:
        length = min(num_tokens - start, room)
        found.append(range(start, start + length))
        if start + length == num_tokens:
            break
        start += min(length, stride)
    return found


@settings(max_examples=40)
@given(st.integers(1, 400), st.integers(1, 60), st.data())
def test_windows_are_those_of_bert_and_hold_every_token(num_tokens, room, data):
    stride = data.draw(st.integers(1, room))
    ranges = window_ranges(num_tokens, room, stride)
    assert ranges == google_ranges(num_tokens, room, stride)
    assert set().union(*ranges) == set(range(num_tokens))
    owners = most_context(ranges)
    for token, owner in enumerate(owners):
        assert token in ranges[owner]
        scores = [
            min(token - each.start, each.stop - 1 - token) + 0.01 * len(each) if token in each else -1.0
            for each in ranges
        ]
        assert scores[owner] == pytest.approx(max(scores))


def test_windows_of_an_empty_context_and_of_no_room():
    assert window_ranges(0, 5, 3) == [range(0, 0)]
    assert most_context([range(0, 0)]) == []
    for room, stride in ((5, 6), (5, 0), (0, 1)):
        with pytest.raises(
            ValueError, match=f"the stride, {stride} tokens, must be positive and at most the room"
        ):
            window_ranges(10, room, stride)


TEXT = st.text(alphabet=" abé,\u2028", max_size=40)


@settings(max_examples=40)
@given(TEXT, st.data())
def test_an_answer_of_whole_tokens_comes_back_exactly(context, data):
    """Tokens of one to three letters; spaces belong to none."""
    places, at = [], 0
    while at < len(context):
        length = data.draw(st.integers(1, 3))
        if not context[at].isspace():
            piece = context[at : at + length]
            end = at + len(piece.split()[0])
            places.append((at, end))
            at = end
        else:
            at += 1
    if not places:
        assert span_of(places, 0, len(context)) is None
        return
    first = data.draw(st.integers(0, len(places) - 1))
    last = data.draw(st.integers(first, len(places) - 1))
    begin, end = place_of(places, first, last)
    assert span_of(places, begin, end) == (first, last)
    widest = (
        places[first - 1][1] if first else 0,
        places[last + 1][0] if last + 1 < len(places) else len(context),
    )
    assert span_of(places, *widest) == (first, last)  # with the spaces around it


def test_an_answer_within_tokens_takes_them_whole():
    places = [(0, 3), (3, 7), (8, 12), (12, 12), (12, 14)]  # one of them stands for no character
    assert span_of(places, 4, 9) == (1, 2)
    assert span_of(places, 12, 13) == (4, 4)
    assert span_of(places, 7, 8) is None
    assert span_of(places, 3, 3) is None
    assert place_of(places, 1, 2) == (3, 12)


@settings(max_examples=40)
@given(st.integers(1, 12), st.integers(1, 14), st.integers(0, 10**6))
def test_the_best_span_is_the_best_of_all(length, max_length, seed):
    draw = np.random.default_rng(seed)
    starts, ends = draw.integers(-4, 5, (2, length)).astype(np.float32)
    allowed = draw.random(length) < 0.7
    spans = [
        (-(starts[i] + ends[j]), i, j)
        for i in range(length)
        if allowed[i]
        for j in range(i, min(length, i + max_length))
    ]
    found = best_span(starts, ends, allowed, max_length=max_length)
    if not spans:
        assert found is None
    else:
        score, first, last = min(spans)
        assert found == (first, last, -score)
