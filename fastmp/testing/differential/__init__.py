"""Differential tests of parallel code: a dense module against a parallel one, on forked ranks in float64."""

from __future__ import annotations

from fastmp._lazy import exports

__getattr__, __dir__, __all__ = exports(
    __name__,
    {
        "cases": "Case draw_cases",
        "subject": "Ranks Subject",
        "verification": "Finding Verdict verify",
    },
)
