"""Windows: every target of a text counts once, and none without the context that it should have."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastmp.apps.evaluation.tasks import ScoringWindow, ScoringWindows


@st.composite
def windows(draw):
    length = draw(st.integers(1, 40))
    return ScoringWindows(draw(st.integers(1, 300)), length, draw(st.integers(1, length)))


@given(windows())
def test_every_target_is_scored_once_in_order(windows):
    scored = [i for each in windows for i in range(each.end - each.scored, each.end)]
    assert scored == list(range(windows.num_targets))
    assert len(windows) == len(list(windows))


@given(windows())
def test_each_window_begins_a_stride_later_and_scores_its_last_targets(windows):
    first, *others = windows
    assert first == ScoringWindow(0, min(windows.length, windows.num_targets), first.end)
    for number, window in enumerate(others, 1):
        assert window.begin == number * windows.stride
        assert window.end - window.begin <= windows.length and 1 <= window.scored <= windows.stride
        assert window.end - window.scored - window.begin == windows.length - windows.stride
    assert all(each.end - each.begin == windows.length for each in others[:-1])


def test_the_papers_windows():
    """1024 tokens, 32 of them new: of 270,329 targets the first window scores 1024, the last one 25."""
    windows = ScoringWindows(270_329, 1024, 32)
    assert len(windows) == 1 + 8416
    assert windows[:2] == [ScoringWindow(0, 1024, 1024), ScoringWindow(32, 1056, 32)]
    assert windows[-1] == ScoringWindow(269_312, 270_329, 25)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [((0, 8, 8), "no token to predict"), ((9, 8, 0), "from 1 to the window, 8, got 0"), ((9, 8, 9), "got 9")],
)
def test_mistakes(arguments, named):
    with pytest.raises(ValueError, match=named):
        ScoringWindows(*arguments)
