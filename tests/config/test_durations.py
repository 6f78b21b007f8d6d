"""Lengths of time are read as Slurm reads them."""

from __future__ import annotations

import pytest

from fastmp.config import TrainConfig
from fastmp.config.options import duration_seconds


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90", 5400),
        ("1:30", 90),
        ("2:00:05", 7205),
        ("1-2", 93600),
        ("1-2:03", 93780),
        ("1-02:03:04", 93784),
    ],
)
def test_every_form(text, seconds):
    assert duration_seconds(text) == seconds


@pytest.mark.parametrize("text", ["-5", "1h", "1:2:3:4", "1-", ":30", "1-2:", "", "0", "0:00"])
def test_anything_else_is_refused(text):
    if text:
        with pytest.raises(ValueError, match=f"max_time.* got {text!r}"):
            TrainConfig(max_time=text)
    else:
        assert TrainConfig(max_time=text).max_time == ""  # no limit
