"""Evaluation: the loss of a model on held-out text."""

from __future__ import annotations

from fastmp._lazy import exports

__getattr__, __dir__, __all__ = exports(__name__, {"heldout": "Evaluation evaluate"})
