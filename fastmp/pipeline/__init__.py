"""Pipeline parallelism: the runner of a rank; its schedules are in `fastmp.schedule`."""

from __future__ import annotations

from fastmp._lazy import exports, moved

__getattr__, __dir__, __all__ = exports(
    __name__,
    {
        "runner": "Pipeline PipelineError PipelineResult StageOutput",
    },
)

moved(
    __name__,
    "dualpipe interleaved messages schedule simulate stage_map steps stream_schedule",
    to="fastmp.schedule",
)
