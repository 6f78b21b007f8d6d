"""Evaluation of trained models on tasks: WikiText, LAMBADA and held-out text, on any layout."""

from __future__ import annotations

from fastmp._lazy import exports

__getattr__, __dir__, __all__ = exports(
    __name__,
    {
        "journal": "Journal",
        "lambada": "Example read_examples",
        "batches": "evaluate",
        "result_tables": "read_result table",
        "scoring": "ScoredText Score Scorer",
        "tasks": "EvalTask heldout_task lambada_task wikitext_task",
        "wikitext": "count_words detokenize tokenize",
        "sliding_windows": "ScoringWindow ScoringWindows",
    },
)
