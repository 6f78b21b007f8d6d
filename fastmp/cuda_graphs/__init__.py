"""CUDA graphs of segmented layers: planned, explained, captured and replayed from outside the layers."""

from __future__ import annotations

from fastmp._lazy import exports, moved

__getattr__, __dir__, __all__ = exports(
    __name__,
    {
        "errors": "CaptureError GraphError",
        "explanation.report": "explain",
        "manager": "GraphManager",
        "backends.recording": "RecordingBackend",
    },
)

moved(__name__, "buffer_plan lanes scope", to="fastmp.schedule")
