"""The metrics beside scikit-learn, beside SQuAD's rules spelt out naively, and in cases known by hand."""

from __future__ import annotations

import random
import string

import pytest

from examples.megatron_paper.finetuning.answer_metrics import (
    accuracy,
    best_threshold,
    binary_f1,
    exact_match,
    normalized,
    squad1_scores,
    squad2_scores,
    word_f1,
)

WORDS = (*"the The a an cat cats Cat! (dog) U.S.A. 3,000 — 's".split(), " ", "\t", "thé", "")


def text(draw: random.Random) -> str:
    return draw.choice((" ", "  ", "-", "")).join(draw.choices(WORDS, k=draw.randrange(6)))


def test_accuracy_and_f1_are_those_of_scikit_learn():
    metrics = pytest.importorskip("sklearn.metrics", reason="scikit-learn is not installed")
    draw = random.Random(5)
    for _ in range(2000):
        size, ones = draw.randrange(1, 12), draw.random()
        labels, predictions = ([int(draw.random() < ones) for _ in range(size)] for _ in range(2))
        assert accuracy(predictions, labels) == metrics.accuracy_score(labels, predictions)
        expected = metrics.f1_score(labels, predictions, zero_division=0.0)
        assert binary_f1(predictions, labels) == pytest.approx(expected, abs=1e-15)


def test_accuracy_and_f1_by_hand():
    assert accuracy([0, 2, 1, 1], [0, 2, 2, 1]) == 0.75
    assert binary_f1([1, 1, 0, 0], [1, 0, 1, 0]) == 0.5
    assert binary_f1([1, 1, 1, 0], [1, 0, 0, 0]) == 0.5  # precision 1/3, recall 1
    assert binary_f1([0, 0], [0, 0]) == 0.0
    for metric in (accuracy, binary_f1):
        for wrong in (([], []), ([1], [1, 0])):
            with pytest.raises(ValueError, match="needs a prediction for each label"):
                metric(*wrong)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("The Denver Broncos!", "denver broncos"),
        ("an apple, a pear and the fig", "apple pear and fig"),
        ("U.S.A.", "usa"),
        ("the-end", "theend"),  # punctuation goes first
        ("a\u2013b", "\u2013b"),  # a dash that is none of ASCII stays, and ends a word
        ("  two\t\nlines\u00a0here ", "two lines here"),
        ("THÉ a", "thé"),
        ("A", ""),
        ("?!", ""),
        ("there", "there"),
    ],
)
def test_what_squad_compares(given, expected):
    assert normalized(given) == expected


def test_squad_by_hand():
    assert exact_match("the Broncos", "Broncos.") == 1.0
    assert word_f1("Denver Broncos team", "Denver Broncos", both_empty=0.0) == pytest.approx(0.8)
    assert word_f1("cat cat cat", "cat cat dog", both_empty=0.0) == pytest.approx(2 / 3)
    assert word_f1("", "cat", both_empty=1.0) == 0.0
    answers = {"1": ["Santa Clara", "Levi's Stadium"], "2": ["the"], "3": ["gold"]}
    scores = squad1_scores({"1": "levis stadium in California", "2": "The"}, answers)
    assert scores["exact"] == pytest.approx(
        1 / 3
    )  # "the" is equal to "The", and has no word in common with it
    assert scores["f1"] == pytest.approx((2 * 0.5 / 1.5) / 3)


def test_answers_of_which_nothing_is_left_count_differently_in_the_two_versions():
    predictions, answers = {"1": "a"}, {"1": ["the"]}
    assert squad1_scores(predictions, answers) == {"exact": 1.0, "f1": 0.0}
    assert squad2_scores(predictions, {"1": -1.0}, answers)["f1"] == 1.0


def naive_normalized(given: str) -> list[str]:
    """Letter by letter: no regular expression, no table."""
    kept = "".join(letter for letter in given.lower() if letter not in string.punctuation)
    words, word = [], ""
    for letter in kept + " ":
        if letter.isalnum() or letter == "_":
            word += letter
            continue
        words.append(" " if word in ("a", "an", "the") else word)
        words.append(letter)
        word = ""
    return "".join(words).split()


def naive_f1(predicted: list[str], wanted: list[str], both_empty: float) -> float:
    if not predicted and not wanted:
        return both_empty
    rest, common = list(wanted), 0
    for word in predicted:
        if word in rest:
            rest.remove(word)
            common += 1
    return 2 * common / (len(predicted) + len(wanted))


def test_squad_on_thousands_of_nasty_texts():
    draw = random.Random(6)
    for _ in range(2000):
        one, other = text(draw), text(draw)
        assert normalized(one).split() == naive_normalized(one)
        assert exact_match(one, other) == float(naive_normalized(one) == naive_normalized(other))
        for both_empty in (0.0, 1.0):
            expected = naive_f1(naive_normalized(one), naive_normalized(other), both_empty)
            assert word_f1(one, other, both_empty=both_empty) == pytest.approx(expected)


def naive_score(threshold, metric, predictions, surely_none, answers):
    """The mean of `metric` where a question with a higher score than `threshold` is not answered."""
    total = 0.0
    for key, texts in answers.items():
        if surely_none[key] > threshold:
            total += not texts
        else:
            total += max(metric(predictions[key], text) for text in texts or [""])
    return total / len(answers)


def f1_by_words(prediction: str, answer: str) -> float:
    return naive_f1(naive_normalized(prediction), naive_normalized(answer), 1.0)


def test_the_best_threshold_is_the_best_of_all():
    """Beside every threshold there is; no two questions have one score here."""
    draw = random.Random(7)
    for _ in range(150):
        keys = [str(i) for i in range(draw.randrange(1, 12))]
        answers = {key: [] if draw.random() < 0.4 else ["cat", "dog cat"] for key in keys}
        predictions = {key: draw.choice(("cat", "dog", "the cat", "")) for key in keys}
        surely_none = dict(zip(keys, draw.sample(range(-50, 50), len(keys))))
        found = squad2_scores(predictions, surely_none, answers)
        for name, metric in (("exact", exact_match), ("f1", f1_by_words)):
            given = metric, predictions, surely_none, answers
            every = [naive_score(threshold, *given) for threshold in (-100, *surely_none.values())]
            at = found[f"best_{name}_threshold"]
            assert found[name] == pytest.approx(naive_score(0, *given))
            assert found[f"best_{name}"] == pytest.approx(max(every))
            if max(every) > every[0]:
                assert naive_score(at, *given) == pytest.approx(max(every))
            else:
                assert at == 0.0  # to answer nothing is best


def test_equal_scores_are_taken_in_the_order_of_the_questions():
    scores, answers = {"1": 1.0, "2": 0.0}, {"1": ["cat"], "2": []}
    predictions = {"1": "cat", "2": "cat"}
    assert best_threshold(predictions, scores, {"1": 0.5, "2": 0.5}, answers) == (1.0, 0.5)
    assert best_threshold(predictions, scores, {"2": 0.5, "1": 0.5}, answers) == (0.5, 0.0)


def test_no_questions_are_an_error():
    with pytest.raises(ValueError, match="squad1_scores: there are no questions"):
        squad1_scores({}, {})
    with pytest.raises(ValueError, match="squad2_scores: there are no questions"):
        squad2_scores({}, {}, {})
