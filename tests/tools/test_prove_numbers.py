"""The chapter of ops: one that is off by more than rounding, and a kernel that is not run, are not held."""

from __future__ import annotations

import math
from dataclasses import replace

from fastmp.testing.ops import check_op
from tools.prove import numbers
from tools.prove.claims import Claim


def held(results):
    return [each.held for each in numbers._judged("ops", results)]


def test_errors_beyond_rounding_are_not_held():
    good = check_op("bias_gelu", "cpu")
    assert held(good) == [True, True]
    for error in (2 * good[0].bound, math.inf, math.nan):
        assert held([*good[1:], replace(good[0], error=error)]) == [False, False]
    assert held([]) == [False, False]


def test_kernels_that_this_process_does_not_interpret_are_not_shown(monkeypatch):
    """Nor are other ops run for it."""
    monkeypatch.setattr(numbers, "OPS", {"bias_gelu": numbers.OPS["bias_gelu"]})
    monkeypatch.setattr(numbers, "ProcessPoolExecutor", Here)
    said = [each for each in numbers.claims() if isinstance(each, Claim)]
    assert [each.held for each in said] == [True, True, None]


class Here:
    """A pool whose work is done by this process."""

    def __init__(self, *arguments, **options):
        pass

    def __enter__(self):
        return self

    def __exit__(self, *error):
        pass

    def map(self, function, work):
        return map(function, work)
