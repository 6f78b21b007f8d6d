"""The learning rate as a pure function of the step: resuming needs no scheduler state."""

from __future__ import annotations

import math


def warmup_cosine(
    step: int, *, peak: float, warmup_steps: int, total_steps: int, floor: float = 0.0
) -> float:
    """Learning rate of optimizer step `step`, counted from 0: linear warm-up, then a cosine down to `floor`.

    Steps 0 .. warmup_steps - 1 give peak * (step + 1) / warmup_steps (the first update is never lost to a
    rate of zero); then floor + (peak - floor) * (1 + cos(pi * t)) / 2 with t = (step - warmup_steps) /
    (total_steps - warmup_steps); `floor` from total_steps on. Schedule of GPT-2 and GPT-3 (Brown et al. 2020,
    appendix B). ValueError on a negative step, warmup_steps outside [0, total_steps], or floor outside [0,
    peak].
    """
    if step < 0:
        raise ValueError(f"warmup_cosine: step must not be negative, got {step}")
    if not 0 <= warmup_steps <= total_steps:
        raise ValueError(
            f"warmup_cosine: warmup_steps {warmup_steps} is not in [0, total_steps = {total_steps}]"
        )
    if not 0.0 <= floor <= peak:
        raise ValueError(f"warmup_cosine: floor {floor} is not in [0, peak = {peak}]")
    if step < warmup_steps:
        return peak * (step + 1) / warmup_steps
    if step >= total_steps:
        return floor
    progress = (step - warmup_steps) / (total_steps - warmup_steps)
    return floor + (peak - floor) * 0.5 * (1.0 + math.cos(math.pi * progress))
