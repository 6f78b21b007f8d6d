"""The metrics of the tasks: accuracy, F1, and those of SQuAD's two scripts. Standard library only.

SQuAD compares answers in lower case, without punctuation, without the words a, an and the, and with single
spaces: "exact" where what is left is equal, "f1" by the words that both have. A prediction counts by the
answer that is most like it. The scripts of the two versions (evaluate-v1.1.py, evaluate-v2.0.py) differ where
nothing is left of an answer: version 1.1 gives F1 0 to two empty texts, version 2.0 gives 1, and looks at no
answer of which nothing is left. The functions here are equal to them, but that they give shares from 0 to 1.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Mapping, Sequence

__all__ = [
    "accuracy",
    "best_threshold",
    "binary_f1",
    "exact_match",
    "normalized",
    "squad1_scores",
    "squad2_scores",
    "word_f1",
]

_ARTICLES = re.compile(r"\b(?:a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


def accuracy(predictions: Sequence[int], labels: Sequence[int]) -> float:
    """Return the share of correct predictions. Raises ValueError if there are none, or numbers differ."""
    _check_counts("accuracy", predictions, labels)
    return sum(p == label for p, label in zip(predictions, labels, strict=True)) / len(labels)


def binary_f1(predictions: Sequence[int], labels: Sequence[int]) -> float:
    """Return F1 of label 1, 2 tp / (2 tp + fp + fn); 0 if no prediction and no label is 1."""
    _check_counts("binary_f1", predictions, labels)
    both = sum(p == 1 and label == 1 for p, label in zip(predictions, labels, strict=True))
    ones = sum(p == 1 for p in predictions) + sum(label == 1 for label in labels)
    return 2 * both / ones if ones else 0.0


def normalized(text: str) -> str:
    """Return an answer as SQuAD compares it; see the top of this module."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def exact_match(prediction: str, answer: str) -> float:
    """Return 1 if the two normalized answers are equal, else 0."""
    return float(normalized(prediction) == normalized(answer))


def word_f1(prediction: str, answer: str, *, both_empty: float) -> float:
    """Return F1 of the two bags of words; `both_empty` if neither has a word."""
    predicted, wanted = normalized(prediction).split(), normalized(answer).split()
    if not predicted and not wanted:
        return both_empty
    common = (Counter(predicted) & Counter(wanted)).total()
    if common == 0:
        return 0.0
    precision, recall = common / len(predicted), common / len(wanted)
    return 2 * precision * recall / (precision + recall)


def squad1_scores(predictions: Mapping[str, str], answers: Mapping[str, Sequence[str]]) -> dict[str, float]:
    """Return "exact" and "f1" of SQuAD 1.1: means over the questions; a missing prediction scores 0.

    Both map the id of a question, to a text and to all answers that people gave.
    """
    _check_questions("squad1_scores", answers)
    exact = f1 = 0.0
    for key, texts in answers.items():
        if key in predictions:
            prediction = predictions[key]
            exact += max(exact_match(prediction, text) for text in texts)
            f1 += max(word_f1(prediction, text, both_empty=0.0) for text in texts)
    return {"exact": exact / len(answers), "f1": f1 / len(answers)}


def squad2_scores(
    predictions: Mapping[str, str],
    no_answer_scores: Mapping[str, float],
    answers: Mapping[str, Sequence[str]],
) -> dict[str, float]:
    """Return the metrics of SQuAD 2.0, in which `answers` are empty for unanswerable questions.

    predictions: what would be answered if there is an answer. no_answer_scores: how likely it is that there
        is none; above a threshold, none is predicted, which is right where there is none.

    "exact" and "f1" have threshold 0, at which both cases have the same score; "best_exact" and "best_f1"
    those of `best_threshold`, "best_exact_threshold" and "best_f1_threshold".
    """
    _check_questions("squad2_scores", answers)
    exact, f1 = {}, {}
    for key, texts in answers.items():
        wanted = [text for text in texts if normalized(text)] or [""]
        exact[key] = max(exact_match(predictions[key], text) for text in wanted)
        f1[key] = max(word_f1(predictions[key], text, both_empty=1.0) for text in wanted)
    result: dict[str, float] = {}
    for name, scores in (("exact", exact), ("f1", f1)):
        kept = [
            float(not answers[key]) if no_answer_scores[key] > 0 else score for key, score in scores.items()
        ]
        result[name] = sum(kept) / len(answers)
        best, threshold = best_threshold(predictions, scores, no_answer_scores, answers)
        result |= {f"best_{name}": best, f"best_{name}_threshold": threshold}
    return result


def best_threshold(
    predictions: Mapping[str, str],
    scores: Mapping[str, float],
    no_answer_scores: Mapping[str, float],
    answers: Mapping[str, Sequence[str]],
) -> tuple[float, float]:
    """Return the best mean of `scores` over thresholds, and the lowest threshold that reaches it.

    Questions are answered one after the other, from that which has most surely an answer; equal ones in the
    order of `no_answer_scores`, as in SQuAD's script: a threshold among them is not told apart. The threshold
    is 0 where it is best to answer nothing.
    """
    total = best = float(sum(not texts for texts in answers.values()))
    threshold = 0.0
    for key in sorted(no_answer_scores, key=no_answer_scores.__getitem__):
        total += scores[key] if answers[key] else -float(bool(predictions[key]))
        if total > best:
            best, threshold = total, no_answer_scores[key]
    return best / len(answers), threshold


def _check_counts(name: str, predictions: Sequence[int], labels: Sequence[int]) -> None:
    if len(predictions) != len(labels) or not labels:
        raise ValueError(
            f"{name}: needs a prediction for each label, got {len(predictions)} and {len(labels)}"
        )


def _check_questions(name: str, answers: Mapping[str, Sequence[str]]) -> None:
    if not answers:
        raise ValueError(f"{name}: there are no questions")
