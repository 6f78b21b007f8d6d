"""From scores to predictions and metrics: what a model says of a split, and how right it is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from examples.megatron_paper.finetuning.answer_metrics import (
    accuracy,
    binary_f1,
    squad1_scores,
    squad2_scores,
)
from examples.megatron_paper.finetuning.formats import MultipleChoice, Question
from examples.megatron_paper.finetuning.samples import ContextWindow
from examples.megatron_paper.finetuning.windows import best_span, place_of

__all__ = ["answers_of", "evaluate_classes", "evaluate_questions"]

Scores = npt.NDArray[np.floating]


def evaluate_classes(examples: Sequence[Any], scores: Scores) -> tuple[dict[str, float], list[int]]:
    """Return the metrics and predictions of labelled examples from scores (examples, classes or options).

    "accuracy"; with two classes also "f1"; of `MultipleChoice`s also that of each group.
    """
    predictions: list[int] = scores.argmax(1).tolist()
    labels = [example.label for example in examples]
    metrics = {"accuracy": accuracy(predictions, labels)}
    if scores.shape[1] == 2:
        metrics["f1"] = binary_f1(predictions, labels)
    for group in dict.fromkeys(each.group for each in examples if isinstance(each, MultipleChoice)):
        inside = [i for i, each in enumerate(examples) if each.group == group]
        metrics[f"{group}_accuracy"] = accuracy([predictions[i] for i in inside], [labels[i] for i in inside])
    return metrics, predictions


def evaluate_questions(
    examples: Sequence[Question],
    windows: Sequence[ContextWindow],
    scores: Scores,
    *,
    max_length: int,
    impossible: bool,
) -> tuple[dict[str, float], dict[str, str]]:
    """Return the metrics and answers of questions from scores (windows, S, 2) of first and last tokens.

    max_length: the most tokens of an answer. impossible: a question may have no answer (SQuAD 2.0): "" is
    predicted where that has the higher score.
    """
    texts, no_answer = answers_of(examples, windows, scores, max_length=max_length)
    wanted = {each.id: [answer.text for answer in each.answers] for each in examples}
    if not impossible:
        return squad1_scores(texts, wanted), texts
    metrics = squad2_scores(texts, no_answer, wanted)
    return metrics, {key: "" if no_answer[key] > 0 else text for key, text in texts.items()}


def answers_of(
    examples: Sequence[Question], windows: Sequence[ContextWindow], scores: Scores, *, max_length: int
) -> tuple[dict[str, str], dict[str, float]]:
    """Return the best answer to each question in its context, and the margin of the no-answer score.

    No answer is the first token of a row, [CLS], as first and last token; its score is the lowest of a
    question's windows (Devlin et al. 2019): where one holds an answer, no answer is unlikely there.
    """
    texts = {each.id: "" for each in examples}
    best = dict.fromkeys(texts, -np.inf)
    nothing = dict.fromkeys(texts, np.inf)
    for window, both in zip(windows, scores, strict=True):
        example = examples[window.question]
        nothing[example.id] = min(nothing[example.id], float(both[0].astype(np.float64).sum()))
        inside = both[window.ahead : window.ahead + len(window.tokens)]
        span = best_span(inside[:, 0], inside[:, 1], window.begins, max_length=max_length)
        if span is not None and span.score > best[example.id]:
            best[example.id] = span.score
            first, end = place_of(
                window.places, window.tokens.start + span.first, window.tokens.start + span.last
            )
            texts[example.id] = example.context[first:end].strip()
    return texts, {key: nothing[key] - best[key] for key in texts}
