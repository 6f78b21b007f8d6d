"""The learning rate as a pure function of the number of updates: a schedule has no state of its own.

A step that is skipped, because its gradient is not finite, makes no update and does not advance the schedule.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from fastmp.config import OptimizerConfig

__all__ = ["learning_rate", "learning_rates"]

_MAX_RATES = 1 << 24  # 128 MiB on the device, and about 5 s at the start of a run
# The decay factor by the fraction of the decay that is over.
_FACTOR: dict[str, Callable[[float], float]] = {
    "cosine": lambda over: 0.5 * (1.0 + math.cos(math.pi * over)),
    "linear": lambda over: 1.0 - over,
    "wsd": lambda over: 1.0 - math.sqrt(over),
}


def learning_rate(step: int, config: OptimizerConfig, total_steps: int) -> float:
    """Return the learning rate of update `step`, counted from 0, in a run of `total_steps`.

    Skipped steps make no update and are not counted.

    1. In the first `warmup_steps` it grows linearly, lr * ((step + 1) / warmup_steps), so no update has a
       rate of zero.
    2. Then it falls from `lr` to `min_lr`, reached at `total_steps`. After a fraction t of the decay it is
       min_lr + (lr - min_lr) * factor(t):

    "cosine": factor(t) = (1 + cos(pi t)) / 2, from the end of warm-up (Brown et al. 2020, appendix B).
    "linear": factor(t) = 1 - t, from the end of warm-up.
    "wsd" (warm-up, stable, decay): `lr` until the last `decay_steps` (None: a fifth of the run), then
        factor(t) = 1 - sqrt(t), which beats a linear decay in Hägele et al. 2024, "Scaling Laws and
        Compute-Optimal Training Beyond Fixed Training Durations".
    "constant": `lr` from the end of warm-up on; `min_lr` is not used.

    A run too short for warm-up and decay warms up first and decays in the remaining steps.

    Raises:
        ValueError: a negative step, or a run without steps.

    Example:
        config = OptimizerConfig(lr=1e-3, min_lr=1e-4, warmup_steps=10)
        assert learning_rate(4, config, total_steps=100) == 0.5e-3
        assert learning_rate(100, config, total_steps=100) == 1e-4
    """
    if step < 0 or total_steps <= 0:
        raise ValueError(
            f"learning_rate: need step >= 0 and total_steps > 0, got step {step} of total_steps {total_steps}"
        )
    warmup = min(config.warmup_steps, total_steps)
    if step < warmup:
        return config.lr * ((step + 1) / warmup)  # the last of them is lr, not rounded
    if config.schedule == "constant":
        return config.lr
    if step >= total_steps:
        return config.min_lr
    first = warmup
    if config.schedule == "wsd":
        decay_steps = math.ceil(total_steps / 5) if config.decay_steps is None else config.decay_steps
        first = max(warmup, total_steps - decay_steps)
    if step <= first:
        return config.lr
    factor = _FACTOR[config.schedule]((step - first) / (total_steps - first))
    return config.min_lr + (config.lr - config.min_lr) * factor


def learning_rates(config: OptimizerConfig, total_steps: int) -> list[float]:
    """Return the learning rates of updates 0, 1, ...; updates after the last entry have its rate.

    Raises:
        ValueError: a schedule of more than 2^24 rates.
    """
    changes = min(config.warmup_steps, total_steps) if config.schedule == "constant" else total_steps
    if changes > _MAX_RATES:
        raise ValueError(
            f"learning_rates: a schedule of {changes} steps is longer than {_MAX_RATES}; for a run without "
            "end use --optimizer.schedule constant"
        )
    return [learning_rate(step, config, total_steps) for step in range(changes + 1)]
