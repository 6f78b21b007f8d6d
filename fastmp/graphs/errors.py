"""What goes wrong with graphs."""

from __future__ import annotations

__all__ = ["CaptureError", "GraphError"]


class GraphError(RuntimeError):
    """What runs is not what was planned or captured; the message says what differs."""


class CaptureError(RuntimeError):
    """Something that a graph cannot hold; the message names it and the line that called it."""
