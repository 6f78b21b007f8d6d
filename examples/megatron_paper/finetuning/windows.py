"""Windows over long contexts: the tokens of a context next to a question, and the answer's span in them.

A context that has more tokens than there is room for is cut into windows that begin `stride` tokens apart and
overlap (Devlin et al. 2019). Windows, spans and the way back to the text are functions of numbers alone: a
token is its place (first character, character behind the last) in the context. An answer is given back as a
slice of the context, so it has the spelling and the spaces of the text, whatever the tokenizer did to them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

__all__ = ["AnswerSpan", "best_span", "most_context", "place_of", "span_of", "window_ranges"]

Places = Sequence[tuple[int, int]]  # of tokens: first character, character behind the last
Scores = npt.NDArray[np.floating]


class AnswerSpan(NamedTuple):
    """Tokens from `first` to `last`, both of them included, and the score of this answer."""

    first: int
    last: int
    score: float


def window_ranges(num_tokens: int, room: int, stride: int) -> list[range]:
    """Return the token range of each window of a context of `num_tokens`, with as few windows as possible.

    One without tokens for an empty context. ValueError unless 0 < stride <= room: a larger stride would leave
    tokens out.
    """
    if not 0 < stride <= room:
        raise ValueError(
            f"window_ranges: the stride, {stride} tokens, must be positive and at most the room for the "
            f"context, {room}"
        )
    number = 1 + max(0, -(-(num_tokens - room) // stride))
    return [range(i * stride, min(i * stride + room, num_tokens)) for i in range(number)]


def most_context(ranges: Sequence[range]) -> list[int]:
    """For every token, the number of the window in which an answer may begin with it.

    It is the window where the shorter of the token's two sides is longest, where 100 tokens of a window's
    length count as one (as in Google's run_squad.py); the first among equal ones.
    """
    end = max((each.stop for each in ranges), default=0)
    best = [(-1, 0)] * end
    for number, each in enumerate(ranges):
        for token in each:
            side = min(token - each.start, each.stop - 1 - token)
            best[token] = max(best[token], (100 * side + len(each), -number))
    return [-number for _, number in best]


def span_of(places: Places, begin: int, end: int) -> tuple[int, int] | None:
    """The fewest tokens that hold the characters from `begin` to before `end`: the first and the last.

    None where no token has any of them, as where an answer is spaces alone.
    """
    inside = [
        i for i, (first, behind) in enumerate(places) if first < end and behind > begin and first < behind
    ]
    return (inside[0], inside[-1]) if inside else None


def place_of(places: Places, first: int, last: int) -> tuple[int, int]:
    """The characters of the tokens from `first` to `last`: the first one, and the one behind them."""
    return places[first][0], places[last][1]


def best_span(
    starts: Scores, ends: Scores, allowed: npt.NDArray[np.bool_], *, max_length: int
) -> AnswerSpan | None:
    """The span of at most `max_length` tokens with the highest sum of a start's and an end's score.

    starts, ends: the scores (T,) of the tokens of a window. allowed: (T,), tokens that a span may begin with.
    None where there are none. Among equal spans it is the first, then the shortest.
    """
    length = min(max_length, len(ends))
    if not allowed.any():
        return None
    padded = np.concatenate([ends.astype(np.float64), np.full(length - 1, -np.inf)])
    sums = np.lib.stride_tricks.sliding_window_view(padded, length) + starts[:, None]
    sums = np.where(allowed[:, None], sums, -np.inf)
    first, more = np.unravel_index(int(sums.argmax()), sums.shape)
    return AnswerSpan(int(first), int(first + more), float(sums[first, more]))
