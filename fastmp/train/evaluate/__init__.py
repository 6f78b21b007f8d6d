"""Evaluation in training: the loss of a model on held-out text. Tasks are those of `fastmp.evaluation`."""

from __future__ import annotations

from fastmp._lazy import exports

__getattr__, __dir__, __all__ = exports(__name__, {"heldout": "Evaluation evaluate"})
