"""Pipeline parallelism: schedules as data, their simulation, and the runner of a rank.

Names are imported when first used: schedules and costs never import torch.
"""

from __future__ import annotations

from fastmp._lazy import exports

__getattr__, __dir__, __all__ = exports(
    __name__,
    {
        "schedule": "Schedule Step",
        "simulate": "Costs",
        "runner": "Pipeline PipelineError PipelineResult StageOutput",
    },
)
