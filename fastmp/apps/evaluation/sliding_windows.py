"""Sliding windows over a sequence longer than the model's context, and the targets that each one scores.

Target i of a sequence is its token i + 1, predicted from tokens 0 to i. The first window scores all of its
targets; every window after it begins `stride` tokens later and scores only its last targets, those that no
window before it has seen. So every target is scored exactly once, and all but those of the first window have
at least length - stride tokens before them. The paper calls the stride the overlap, o = 32 of windows of 1024
(Shoeybi et al. 2019, arXiv 1909.08053, section 5.3). Standard library only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import overload

__all__ = ["ScoringWindow", "ScoringWindows"]


@dataclass(frozen=True)
class ScoringWindow:
    """Window of tokens `begin` to `end` - 1; its targets are the tokens shifted by one.

    The last `scored` of these targets count.
    """

    begin: int
    end: int
    scored: int


@dataclass(frozen=True)
class ScoringWindows(Sequence[ScoringWindow]):
    """The windows over a sequence of `num_targets` + 1 tokens, of at most `length` tokens each.

    A stride of `length` cuts the sequence into pieces without overlap. ValueError for a sequence without a
    target, and for a stride that is not from 1 to `length`.
    """

    num_targets: int
    length: int
    stride: int

    def __post_init__(self) -> None:
        if self.num_targets < 1:
            raise ValueError("windows: the text has no token to predict")
        if not 1 <= self.stride <= self.length:
            raise ValueError(
                f"windows: the stride must be from 1 to the window, {self.length}, got {self.stride}"
            )

    def __len__(self) -> int:
        return 1 + -(-max(self.num_targets - self.length, 0) // self.stride)

    @overload
    def __getitem__(self, number: int) -> ScoringWindow: ...
    @overload
    def __getitem__(self, number: slice) -> Sequence[ScoringWindow]: ...
    def __getitem__(self, number: int | slice) -> ScoringWindow | Sequence[ScoringWindow]:
        if isinstance(number, slice):
            return [self[each] for each in range(len(self))[number]]
        begin = range(len(self))[number] * self.stride
        end = min(begin + self.length, self.num_targets)
        seen = begin - self.stride + self.length if begin else 0
        return ScoringWindow(begin, end, end - seen)
