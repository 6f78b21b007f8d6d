"""Evaluation of trained models on held-out text, on any layout."""

from __future__ import annotations

from fastmp._lazy import exports

__getattr__, __dir__, __all__ = exports(
    __name__,
    {
        "journal": "Journal",
        "batches": "evaluate",
        "result_tables": "read_result table",
        "scoring": "ScoredText Score Scorer",
        "tasks": "EvalTask ScoringWindow ScoringWindows heldout_task windows_task",
    },
)
