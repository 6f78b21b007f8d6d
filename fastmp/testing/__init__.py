"""Tools for tests of fastmp and of models built on it: ranks, sample inputs, accuracy checks."""

from __future__ import annotations

from fastmp._lazy import exports

__getattr__, __dir__, __all__ = exports(
    __name__,
    {
        "ranks": "RankError run_ranks",
        "parallel": "count_collectives full_gradient full_tensor late_gathers",
        "ops": "check_op",
    },
)
