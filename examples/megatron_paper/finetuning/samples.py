"""Samples of a task: rows of token ids of one shape, and the order of training.

A row is [CLS] first [SEP] second [SEP] and padding (Devlin et al. 2019). What is too long is cut:

    a pair       the longer text at its end, a token at a time, until both fit
    a choice     the option behind its question at OPTION_LENGTH tokens, then the article at its end; a
                 question with a gap ("_") gets the option into the gap. Four rows are one sample.
    a question   at QUESTION_LENGTH tokens; its context goes into as many windows as it needs, each a sample

Shapes: B rows, S tokens of a row.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from examples.megatron_paper.finetuning.formats import MultipleChoice, Pair, Question
from examples.megatron_paper.finetuning.windows import Places, most_context, span_of, window_ranges
from fastmp.training.data.masked import SpecialTokens
from fastmp.training.data.sampling import epoch_key, permute
from fastmp.training.data.tokenize import Tokenizer

__all__ = ["IGNORE_LABEL", "TokenPair", "Sample", "TaskData", "ContextWindow", "encode"]

IGNORE_LABEL = -100  # of samples that only fill a batch
OPTION_LENGTH = 128  # tokens, as Megatron-LM has it
QUESTION_LENGTH = 64  # tokens, as in run_squad.py
CHUNK = 4096  # texts given to the tokenizer at once

_GAP = re.compile("_+")

Ids = npt.NDArray[np.int32]


class TokenPair(NamedTuple):
    """Token ids of the two texts of a row."""

    first: Ids
    second: Ids


class Sample(NamedTuple):
    """One row, or one for each option, with the label: a class, an option, or the first and last token."""

    rows: tuple[TokenPair, ...]
    labels: tuple[int, ...]


class ContextWindow(NamedTuple):
    """Tokens of a context in a sample, used to read an answer from its scores.

    question: the number of the example. tokens: of its context. begins: for each, whether an answer may begin
    with it here, and not in another window that has more around it. ahead: tokens of the row before them.
    places: of all tokens of the context.
    """

    question: int
    tokens: range
    begins: npt.NDArray[np.bool_]
    ahead: int
    places: Places


@dataclass(frozen=True)
class Encoded:
    """Samples, and for questions the window of each; `left_out` questions have no answer to train on."""

    samples: list[Sample]
    windows: list[ContextWindow]
    left_out: int = 0


def encode(
    examples: Sequence[Any], tokenizer: Tokenizer, *, seq_len: int, stride: int, training: bool
) -> Encoded:
    """Return the samples of `examples`, all of one kind, in order; rows have at most `seq_len` tokens.

    Args:
        examples: pairs, multiple-choice questions, or questions about a text.
        tokenizer: of the model.
        seq_len: tokens of a row.
        stride: tokens between the starts of two windows over a context.
        training: label questions with the span of the answer, or (0, 0) if the window does not contain it;
            without it the labels are unused.

    Raises:
        ValueError: `seq_len` is too short for two texts or a window.
    """
    room = seq_len - 3
    if room < 2:
        raise ValueError(f"finetune: seq_len {seq_len} has no room for 3 special tokens and two texts")
    if isinstance(examples[0], Pair):
        return Encoded(list(_pairs(examples, tokenizer, room)), [])
    if isinstance(examples[0], MultipleChoice):
        return Encoded(list(_choices(examples, tokenizer, room)), [])
    return _questions(examples, tokenizer, room, stride, training)


def _pairs(examples: Sequence[Pair], tokenizer: Tokenizer, room: int) -> Iterator[Sample]:
    firsts = _ids(tokenizer, (pair.first for pair in examples))
    seconds = _ids(tokenizer, (pair.second for pair in examples))
    for pair, first, second in zip(examples, firsts, seconds, strict=True):
        kept = max(min(len(first), room - len(second)), min(len(first), -(-room // 2)))
        yield Sample((TokenPair(first[:kept], second[: room - kept]),), (pair.label,))


def _choices(examples: Sequence[MultipleChoice], tokenizer: Tokenizer, room: int) -> Iterator[Sample]:
    """Yield the samples of multiple-choice questions; consecutive questions on one article share its ids."""
    options = _ids(tokenizer, (_asked(each.question, option) for each in examples for option in each.options))
    article, ids = None, np.empty(0, np.int32)
    for choice in examples:
        if choice.article is not article:
            article = choice.article
            ids = next(_ids(tokenizer, [article]))
        rows = []
        for _ in choice.options:
            asked = next(options)[: min(OPTION_LENGTH, room)]
            rows.append(TokenPair(asked, ids[: room - len(asked)]))
        yield Sample(tuple(rows), (choice.label,))


def _asked(question: str, option: str) -> str:
    return _GAP.sub(lambda gap: option, question) if "_" in question else f"{question} {option}"


def _questions(
    examples: Sequence[Question], tokenizer: Tokenizer, room: int, stride: int, training: bool
) -> Encoded:
    samples: list[Sample] = []
    windows: list[ContextWindow] = []
    left_out = 0
    asked = _ids(tokenizer, (each.question for each in examples))
    context, ids = None, np.empty(0, np.int32)
    places: Places = []
    for number, (each, question) in enumerate(zip(examples, asked, strict=True)):
        question = question[: min(QUESTION_LENGTH, room - 1)]
        if each.context is not context:
            context = each.context
            found, places = tokenizer.encode_places([context])[0]
            ids = found.astype(np.int32)
        span = None
        if training and each.answers:
            answer = each.answer
            span = None if answer is None else span_of(places, answer.start, answer.end)
            if span is None:
                left_out += 1
                continue
        ranges = window_ranges(len(ids), room - len(question), min(stride, room - len(question)))
        owners, ahead = np.array(most_context(ranges)), len(question) + 2
        for window, tokens in enumerate(ranges):
            labels = (0, 0)
            if span is not None and span[0] in tokens and span[1] in tokens:
                labels = span[0] - tokens.start + ahead, span[1] - tokens.start + ahead
            begins = owners[tokens.start : tokens.stop] == window
            samples.append(Sample((TokenPair(question, ids[tokens.start : tokens.stop]),), labels))
            windows.append(ContextWindow(number, tokens, begins, ahead, places))
    return Encoded(samples, windows, left_out)


def _ids(tokenizer: Tokenizer, texts: Iterable[str]) -> Iterator[Ids]:
    rest = iter(texts)
    while batch := list(islice(rest, CHUNK)):
        yield from (ids.astype(np.int32) for ids, _ in tokenizer.encode_places(batch))


class TaskData:
    """Samples of a run, as `fastmp.training.Trainer` takes them.

    An epoch has every sample once, in an order of its own; the last step of the run is filled up with samples
    that are ignored. What a step has depends on the seed and the step alone, at any number of ranks.

    Batches have "tokens" (B, S) int64, "token_types" (B, S) int64, 0 up to the first separator,
    "padding_mask" (B, S) bool, and "labels" (samples, 1 or 2) int64. B counts samples, or four rows of
    each.
    """

    def __init__(
        self,
        train: Sequence[Sample],
        dev: Sequence[Sample],
        *,
        special: SpecialTokens,
        seq_len: int,
        micro_batch_size: int,
        batch_size: int,
        epochs: int,
        seed: int,
    ) -> None:
        self.train, self.dev, self.special = train, dev, special
        self.seq_len, self.micro_batch_size, self.batch_size = seq_len, micro_batch_size, batch_size
        self.epochs, self.seed = epochs, seed

    @property
    def steps(self) -> int:
        """Return the number of steps of a run; the last one may be padded with ignored samples."""
        return -(-self.epochs * len(self.train) // self.batch_size)

    def epochs_done(self, step: int) -> int:
        """Return the number of finished epochs after `step` steps; all of them after the last step."""
        return min(step * self.batch_size // len(self.train), self.epochs)

    def batch(
        self, step: int, microbatch: int, num_microbatches: int, dp_rank: int, dp_size: int
    ) -> dict[str, Any]:
        """Return the samples of one microbatch of one data-parallel rank."""
        slot = (step * num_microbatches + microbatch) * dp_size + dp_rank
        positions = np.arange(self.micro_batch_size) + slot * self.micro_batch_size
        samples: list[Sample | None] = []
        for epoch in np.unique(positions // len(self.train)).tolist():
            inside = positions[positions // len(self.train) == epoch] % len(self.train)
            order = permute(inside, len(self.train), epoch_key(self.seed, epoch)).tolist()
            samples += [self.train[i] if epoch < self.epochs else None for i in order]
        return self._tensors(samples)

    def validation_batches(
        self, dp_rank: int = 0, dp_size: int = 1, *, max_batches: int | None = None
    ) -> Iterator[dict[str, Any]]:
        """Return an iterator over the development set, as `batches`."""
        return islice(self.batches(self.dev, dp_rank, dp_size), max_batches)

    def batches(self, samples: Sequence[Sample], dp_rank: int, dp_size: int) -> Iterator[dict[str, Any]]:
        """Yield all `samples` once, in order, distributed over the ranks; every rank gets equally many
        batches.

        Batch n of a rank begins with sample (n * dp_size + dp_rank) * micro_batch_size.
        """
        size = self.micro_batch_size
        for number in range(-(-len(samples) // (size * dp_size))):
            first = (number * dp_size + dp_rank) * size
            own = list(samples[first : first + size])
            yield self._tensors(own + [None] * (size - len(own)))

    def _tensors(self, samples: Sequence[Sample | None]) -> dict[str, Any]:
        import torch  # here, so that reading files does not wait for it

        template = self.train[0]
        empty = TokenPair(np.empty(0, np.int32), np.empty(0, np.int32))
        filler = Sample((empty,) * len(template.rows), (IGNORE_LABEL,) * len(template.labels))
        filled = [filler if sample is None else sample for sample in samples]
        rows = [row for sample in filled for row in sample.rows]
        shape = len(rows), self.seq_len
        tokens = np.full(shape, self.special.pad, np.int64)
        types, padding = np.zeros(shape, np.int64), np.ones(shape, np.bool_)
        for number, (first, second) in enumerate(rows):
            middle, end = len(first) + 2, len(first) + len(second) + 3
            tokens[number, 0] = self.special.cls
            tokens[number, 1 : middle - 1] = first
            tokens[number, [middle - 1, end - 1]] = self.special.sep
            tokens[number, middle : end - 1] = second
            types[number, middle:end] = 1
            padding[number, :end] = False
        labels = np.array([sample.labels for sample in filled], np.int64)
        arrays = {"tokens": tokens, "token_types": types, "padding_mask": padding, "labels": labels}
        return {name: torch.from_numpy(array) for name, array in arrays.items()}
