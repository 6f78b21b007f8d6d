"""Readers of the public files of MNLI, QQP, SQuAD and RACE, as they are published. Standard library only.

The .tsv files of GLUE have a line of column names and no quoting: a quotation mark is a character. Some lines
of QQP are broken by a tab or a newline in a question. What cannot be used is left out and counted; where that
is more than one entry, and more than one in a hundred, it is another kind of file, and a ValueError names it
with the first line or entry that is wrong.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

from fastmp.config.file_access import open_binary, read_json

__all__ = [
    "Answer",
    "MultipleChoice",
    "Examples",
    "Pair",
    "Question",
    "read_mnli",
    "read_qqp",
    "read_race",
    "read_squad1",
    "read_squad2",
]

LINE_LIMIT = 1 << 20  # bytes of a line of a .tsv, of which the longest published one has 20 kB
JSON_LIMIT = 1 << 30  # bytes of a SQuAD file, of which the largest published one has 42 MB
MNLI_LABELS = ("entailment", "neutral", "contradiction")
OPTIONS = "ABCD"


@dataclass(frozen=True, slots=True)
class Pair:
    """Two texts and the number of what holds between them: of MNLI_LABELS, or whether they ask the same."""

    first: str
    second: str
    label: int


@dataclass(frozen=True, slots=True)
class Answer:
    """A text that answers a question, and its first character in the context."""

    text: str
    start: int

    @property
    def end(self) -> int:
        """Return the index of the character after it."""
        return self.start + len(self.text)


@dataclass(frozen=True, slots=True)
class Question:
    """Question about a text, with all annotated answers; none if the text has no answer."""

    id: str
    question: str
    context: str
    answers: tuple[Answer, ...]

    @property
    def answer(self) -> Answer | None:
        """Return the first answer that is in the context at its offset; None if there is none to train on."""
        inside = (a for a in self.answers if a.start >= 0 and self.context[a.start : a.end] == a.text)
        return next(inside, None)


@dataclass(frozen=True, slots=True)
class MultipleChoice:
    """A question about an article, four options, and the number of the right one."""

    group: str
    article: str
    question: str
    options: tuple[str, str, str, str]
    label: int


Example = TypeVar("Example", Pair, Question, MultipleChoice)


@dataclass(frozen=True)
class Examples(Generic[Example]):
    """The examples of one split, in the order of the files.

    left_out: what could not be used, with how often that was so. first: where the first of them is.
    """

    examples: list[Example]
    left_out: dict[str, int] = field(default_factory=dict)
    first: str = ""

    def notes(self) -> str:
        """Return one line on left-out examples; empty if there are none."""
        counts = ", ".join(f"{number} {reason}" for reason, number in self.left_out.items())
        return f"left out: {counts}; the first at {self.first}" if counts else ""


def read_mnli(path: str | Path) -> Examples[Pair]:
    """Return the pairs of train.tsv, dev_matched.tsv or dev_mismatched.tsv of MNLI in GLUE.

    Lines whose gold_label is "-", on which people did not agree, are left out.
    """

    def make(row: dict[str, str]) -> Pair | str:
        label = row["gold_label"]
        if label not in MNLI_LABELS:
            return "without a gold label" if label == "-" else "with an unknown gold_label"
        return Pair(row["sentence1"], row["sentence2"], MNLI_LABELS.index(label))

    return _read_pairs(path, ("sentence1", "sentence2", "gold_label"), make, expected="without a gold label")


def read_qqp(path: str | Path) -> Examples[Pair]:
    """Return the pairs of train.tsv or dev.tsv of QQP in GLUE; label 1: the questions are duplicates."""

    def make(row: dict[str, str]) -> Pair | str:
        label = row["is_duplicate"]
        if label not in ("0", "1"):
            return "with an is_duplicate that is not 0 or 1"
        return Pair(row["question1"], row["question2"], int(label))

    return _read_pairs(path, ("question1", "question2", "is_duplicate"), make)


def _read_pairs(
    path: str | Path, wanted: Sequence[str], make: Callable[[dict[str, str]], Pair | str], expected: str = ""
) -> Examples[Pair]:
    """Return the pairs of a .tsv file with the columns `wanted`.

    make: the pair of a line's columns, or why it has none. expected: the reason that may be as frequent as
    it likes.
    """
    lines = _lines(path)
    columns = next(lines, "").split("\t")
    missing = [name for name in wanted if name not in columns]
    if missing:
        raise ValueError(
            f"{path}: the first line does not name the column {missing[0]}; it has {_shown(columns)}"
        )
    found = _Found(str(path), "line", expected)
    for number, line in enumerate(lines, 2):
        cells = line.split("\t")
        if len(cells) != len(columns):
            found.leave_out("of another number of columns", f"line {number}")
            continue
        row = dict(zip(columns, cells, strict=True))
        pair = make(row)
        if isinstance(pair, str):
            found.leave_out(pair, f"line {number}")
        elif not (pair.first.strip() and pair.second.strip()):
            found.leave_out("with an empty text", f"line {number}")
        else:
            found.examples.append(pair)
    return found.done()


def _lines(path: str | Path) -> Iterator[str]:
    """Yield the lines of a text file; only a newline ends a line, no other Unicode separator."""
    try:
        with open_binary(path) as file:
            number = 0
            while line := file.readline(LINE_LIMIT):
                number += 1
                if len(line) == LINE_LIMIT:
                    raise ValueError(f"{path}: line {number} has more than {LINE_LIMIT} bytes")
                try:
                    text = line.decode("utf-8-sig" if number == 1 else "utf-8")
                except UnicodeDecodeError as error:
                    raise ValueError(f"{path}: line {number} is not UTF-8 at byte {error.start}") from None
                yield text.rstrip("\r\n")
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error.strerror})") from None


def read_squad1(path: str | Path) -> Examples[Question]:
    """Return the questions of train-v1.1.json or dev-v1.1.json of SQuAD 1.1; each has an answer."""
    return _read_squad(path, impossible=False)


def read_squad2(path: str | Path) -> Examples[Question]:
    """Return the questions of train-v2.0.json or dev-v2.0.json of SQuAD 2.0; some have no answer."""
    return _read_squad(path, impossible=True)


def _read_squad(path: str | Path, *, impossible: bool) -> Examples[Question]:
    content = read_json(path, JSON_LIMIT)
    found = _Found(str(path), "question")
    ids: set[str] = set()
    has_impossible = False
    for at, article in _items(content, "data", str(path)):
        for at_paragraph, paragraph in _items(article, "paragraphs", at):
            context = _text(paragraph, "context", at_paragraph)
            for at_question, entry in _items(paragraph, "qas", at_paragraph):
                has_impossible |= "is_impossible" in entry
                question = _question(entry, context, at_question, impossible)
                if isinstance(question, str):
                    found.leave_out(question, at_question.removeprefix(f"{path}: "))
                elif question.id in ids:
                    raise ValueError(f"{at_question}: the id {question.id[:40]!r} is there twice")
                else:
                    ids.add(question.id)
                    found.examples.append(question)
    if impossible and found.examples and not has_impossible:
        raise ValueError(f"{path}: no question says is_impossible: a file of SQuAD 1.1, which squad1 reads")
    return found.done()


def _question(entry: dict[str, Any], context: str, at: str, impossible: bool) -> Question | str:
    """Return the question, or the reason why it cannot be used."""
    answers = []
    for at_answer, answer in _items(entry, "answers", at):
        start, text = answer.get("answer_start"), _text(answer, "text", at_answer)
        if type(start) is not int:
            raise ValueError(f"{at_answer}: answer_start must be a whole number, got {_shown(start)}")
        answers.append(Answer(text, start))
    if entry.get("is_impossible", False) not in (True, False):
        raise ValueError(f"{at}: is_impossible must be true or false, got {_shown(entry['is_impossible'])}")
    if entry.get("is_impossible", False) and not impossible:
        raise ValueError(f"{at}: is_impossible is true: a file of SQuAD 2.0, which squad2 reads")
    if bool(answers) == entry.get("is_impossible", False):
        return "impossible, with answers" if answers else "without an answer"
    return Question(_text(entry, "id", at), _text(entry, "question", at), context, tuple(answers))


def read_race(path: str | Path) -> Examples[MultipleChoice]:
    """Return the questions of a split of RACE: of the files *.txt in its directories middle and high.

    A file holds one JSON object: an article, questions, four options for each, and the letters of answers.
    """
    path = Path(path)
    groups = [name for name in ("middle", "high") if (path / name).is_dir()]
    if not groups:
        raise ValueError(f"{path}: has neither a directory middle nor one high, as a split of RACE has")
    found = _Found(str(path), "question")
    for group in groups:
        for file in sorted((path / group).glob("*.txt"), key=_by_number):
            found.examples += _choices(file, group)
    return found.done()


def _choices(file: Path, group: str) -> Iterator[MultipleChoice]:
    content = read_json(file, LINE_LIMIT)
    article = _text(content, "article", str(file))
    questions, options, answers = (content.get(key) for key in ("questions", "options", "answers"))
    lists = [each for each in (questions, options, answers) if isinstance(each, list)]
    if len(lists) < 3 or len({len(each) for each in lists}) != 1:
        raise ValueError(f"{file}: questions, options and answers must be lists of one length")
    for number, (question, four, letter) in enumerate(zip(*lists, strict=True)):
        at = f"{file}: question {number}"
        if not (isinstance(question, str) and isinstance(four, list)):
            raise ValueError(f"{at}: must be a text with a list of options, got {_shown([question, four])}")
        if len(four) != len(OPTIONS) or not all(isinstance(option, str) for option in four):
            raise ValueError(f"{at}: needs {len(OPTIONS)} options, which are texts, got {_shown(four)}")
        if not isinstance(letter, str) or len(letter) != 1 or letter not in OPTIONS:
            raise ValueError(f"{at}: the answer must be one of {', '.join(OPTIONS)}, got {_shown(letter)}")
        yield MultipleChoice(
            group, article, question, (four[0], four[1], four[2], four[3]), OPTIONS.index(letter)
        )


def _by_number(file: Path) -> tuple[int, str]:
    """Return the sort key of a file: the first number in its name, so high2.txt precedes high10.txt."""
    number = re.search(r"\d{1,18}", file.name)
    return (int(number[0]) if number else -1), file.name


class _Found(Generic[Example]):
    """Examples as they are read, and what is left out."""

    def __init__(self, path: str, what: str, expected: str = "") -> None:
        self.path, self.what, self.expected = path, what, expected
        self.examples: list[Any] = []
        self.left_out: dict[str, int] = {}
        self.first: dict[str, str] = {}

    def leave_out(self, reason: str, where: str) -> None:
        self.left_out[reason] = self.left_out.get(reason, 0) + 1
        self.first.setdefault(reason, where)

    def done(self) -> Examples[Any]:
        """Return the examples. Raises ValueError if there are none or too many were left out."""
        wrong = {reason: n for reason, n in self.left_out.items() if reason != self.expected}
        total = len(self.examples) + sum(self.left_out.values())
        if sum(wrong.values()) > max(1, total // 100):
            reason = next(iter(wrong))
            raise ValueError(
                f"{self.path}: {sum(wrong.values())} of {total} {self.what}s cannot be used; the first, "
                f"{self.first[reason]}, is one {reason}"
            )
        if not self.examples:
            raise ValueError(f"{self.path}: has no {self.what} that can be used")
        return Examples(self.examples, self.left_out, next(iter(self.first.values()), ""))


def _items(entry: dict[str, Any], key: str, at: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (location for errors, object) of the list `entry[key]`."""
    items = entry.get(key)
    if not isinstance(items, list):
        raise ValueError(f"{at}: {key} must be a list, got {_shown(items)}")
    path, _, inside = at.partition(": ")
    for number, item in enumerate(items):
        where = f"{path}: {inside}{'.' if inside else ''}{key}[{number}]"
        if not isinstance(item, dict):
            raise ValueError(f"{where}: must be an object, got {_shown(item)}")
        yield where, item


def _text(entry: dict[str, Any], key: str, at: str) -> str:
    value = entry.get(key)
    if not isinstance(value, str):
        raise ValueError(f"{at}: {key} must be a text, got {_shown(value)}")
    return value


def _shown(value: Any) -> str:
    text = ascii(value)
    return text if len(text) <= 100 else f"{text[:100]}..."
