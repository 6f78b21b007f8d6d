"""The order of a training step as data: schedules, their simulation, and the list of instructions of a rank.

Standard library only.
"""

from __future__ import annotations

from fastmp._lazy import exports

__getattr__, __dir__, __all__ = exports(
    __name__,
    {
        "schedule": "Schedule Step",
        "simulate": "Costs",
        "planner": "make_program",
    },
)
