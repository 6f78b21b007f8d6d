"""Small files in the public formats of the tasks, with something in them that can be learnt."""

from __future__ import annotations

import json
import random
from pathlib import Path

MNLI_COLUMNS = (
    *("index", "promptID", "pairID", "genre", "sentence1_binary_parse", "sentence2_binary_parse"),
    *("sentence1_parse", "sentence2_parse", "sentence1", "sentence2"),
)
QQP_COLUMNS = ("id", "qid1", "qid2", "question1", "question2", "is_duplicate")
MNLI_LABELS = ("entailment", "neutral", "contradiction")
NOUNS = ("cat", "dog", "owl", "fox", "hen", "cow")
VERBS = ("sleeps", "eats", "sings", "runs")


def write_tsv(path: Path, columns, rows) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = ["\t".join(map(str, row)) for row in (columns, *rows)]
    path.write_text("\n".join(lines) + "\n", newline="")
    return path


def mnli(folder: Path, *, train: int = 96, dev: int = 48) -> Path:
    """The second sentence says so, says something else, or says no."""
    draw = random.Random(1)

    def row(number, columns):
        label = number % 3
        first = f"the {draw.choice(NOUNS)} {draw.choice(VERBS)}"
        second = ("yes", "maybe", "no")[label] + f" the {draw.choice(NOUNS)} {draw.choice(VERBS)}"
        parses = ("( a )", "( b )", "(ROOT a)", "(ROOT b)")
        marks = [number, number, f"{number}p", "fiction", *parses, first, second]
        return [*marks, *[MNLI_LABELS[label]] * (columns - len(marks))]

    write_tsv(
        folder / "train.tsv", (*MNLI_COLUMNS, "label1", "gold_label"), [row(i, 12) for i in range(train)]
    )
    labels = (*(f"label{i}" for i in range(1, 6)), "gold_label")
    for name in ("dev_matched", "dev_mismatched"):
        write_tsv(folder / f"{name}.tsv", (*MNLI_COLUMNS, *labels), [row(i, 16) for i in range(dev)])
    return folder


def qqp(folder: Path, *, train: int = 96, dev: int = 48) -> Path:
    """Questions ask the same where the second one says "also"."""
    draw = random.Random(2)

    def row(number):
        first, second = (f"why {draw.choice(NOUNS)} {draw.choice(VERBS)} ?" for _ in range(2))
        same = number % 2
        return [number, number, number + 1, first, ("also " if same else "rather ") + second, same]

    for name, count in (("train", train), ("dev", dev)):
        write_tsv(folder / f"{name}.tsv", QQP_COLUMNS, [row(i) for i in range(count)])
    return folder


def squad(folder: Path, version: str, *, train: int = 96, dev: int = 48) -> Path:
    """The answer is the word behind "here"; in version 2.0 every third text has no "here" and no answer."""
    folder.mkdir(parents=True, exist_ok=True)
    draw = random.Random(3)

    def paragraph(number):
        words = [draw.choice(NOUNS) for _ in range(6)]
        impossible = version == "2.0" and number % 3 == 0
        at = draw.randrange(5)
        if not impossible:
            words[at] = "here"
        context = " ".join(words)
        start = len(" ".join(words[: at + 1])) + 1
        answers = [] if impossible else [{"text": words[at + 1], "answer_start": start}]
        entry = {"id": f"q{number}", "question": "what is it ?", "answers": answers}
        if version == "2.0":
            entry["is_impossible"] = impossible
            if impossible:
                entry["plausible_answers"] = [{"text": words[0], "answer_start": 0}]
        return {"context": context, "qas": [entry]}

    for name, count in (("train", train), ("dev", dev)):
        data = [{"title": "Animals", "paragraphs": [paragraph(i) for i in range(count)]}]
        (folder / f"{name}-v{version}.json").write_text(json.dumps({"version": version, "data": data}))
    return folder


def race(folder: Path, *, train: int = 96, dev: int = 48) -> Path:
    """The right option is marked by "true"."""
    draw = random.Random(4)
    for split, count in (("train", train), ("dev", dev), ("test", dev)):
        for group, part in (("middle", range(count // 2)), ("high", range(count // 2, count))):
            (folder / split / group).mkdir(parents=True, exist_ok=True)
            for number in part:
                right = draw.randrange(4)
                options = [f"{'true' if i == right else 'false'} {draw.choice(NOUNS)}" for i in range(4)]
                content = {
                    "article": f"the {draw.choice(NOUNS)} {draw.choice(VERBS)}",
                    "questions": ["it is _ ." if number % 2 else "what is it ?"],
                    "options": [options],
                    "answers": ["ABCD"[right]],
                    "id": f"{group}{number}.txt",
                }
                (folder / split / group / f"{number}.txt").write_text(json.dumps(content))
    return folder
