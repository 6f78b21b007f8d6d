"""`fastmp verify` accepts correct modules of torch, fastmp and transformers on all their layouts."""

from __future__ import annotations

import pytest
from correct_modules import CORRECT
from marks import exhaustive, full

from fastmp.testing.differential import Subject, verify

QUICK = ("TensorParallelMLP", "OurExperts")
SLOW = ("OurTiedGPT", "OurContextParallelGPT")


@pytest.mark.parametrize(
    "subject",
    [
        *(each for each in CORRECT if each.__name__ in QUICK),
        *full(each for each in CORRECT if each.__name__ not in QUICK + SLOW),
        *exhaustive(each for each in CORRECT if each.__name__ in SLOW),
    ],
)
def test_gives_no_alarm(subject: type[Subject]) -> None:
    number = 4 if subject.__name__ in QUICK else 12
    verdict = verify(subject(), cases=number, seed=2, shrinks=False)
    assert verdict.smallest is None, str(verdict.smallest)


def test_there_are_many() -> None:
    assert len(CORRECT) == 26  # docs/correctness.md has the number
