"""The errors of graphs. Standard library only."""

from __future__ import annotations

__all__ = ["CaptureError", "GraphError"]


class GraphError(RuntimeError):
    """A step does something else than was planned or captured; the message says what differs."""


class CaptureError(RuntimeError):
    """A graph cannot hold a piece of work; the message names it and the line that called it."""
