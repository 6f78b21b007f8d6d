"""The zero-shot tasks of the paper: WikiText's perplexity and LAMBADA's accuracy."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from examples.megatron_paper.evaluation.lambada import Example, read_examples
from examples.megatron_paper.evaluation.wikitext import count_words, detokenize
from fastmp.apps.evaluation.scoring import Score, ScoredText
from fastmp.apps.evaluation.tasks import (
    TEXT_LIMIT,
    EvalTask,
    ScoringWindows,
    beginning_of,
    crc32_of,
    exp_or_inf,
    nats_of,
    windows_task,
    with_beginning,
)
from fastmp.config.file_access import read_or_name
from fastmp.training.data.tokenize import TokenIds, Tokenizer

__all__ = ["lambada_task", "wikitext_task"]


def wikitext_task(
    path: str | Path, tokenizer: Tokenizer, *, window: int = 1024, stride: int = 32
) -> EvalTask:
    """Return the WikiText task: perplexity per original word of a file, which is detokenized first.

    With the sum of -log P over the T tokens of the detokenized text in nats, it is exp(nats / T_o), where T_o
    counts the words and line ends of the file as it is (Shoeybi et al. 2019, arXiv 1909.08053, section 5.3).

    ValueError, which names the file, where it is not UTF-8 or has no word, has the line ends of Windows, or
    cannot be read.
    """
    text = _text(path)
    if "\n" in text and text.count("\r\n") == text.count("\n"):
        raise ValueError(
            f"{path}: its lines end with a carriage return, which would count as a word of each; the "
            "published file has none: take them out"
        )
    if not (num_words := count_words(text)):
        raise ValueError(f"{path}: there is no word in it")
    content = detokenize(text).encode()
    ids, lossless = with_beginning(content, tokenizer)
    windows = ScoringWindows(len(ids) - 1, window, stride)

    def summarize(scores: Sequence[Score]) -> dict[str, Any]:
        nats = nats_of(scores)
        return {
            "perplexity": exp_or_inf(nats / num_words),
            "perplexity_per_token": exp_or_inf(nats / windows.num_targets),
            "nats": nats,
            "num_words": num_words,
            "num_tokens": windows.num_targets,
            "lossless": lossless,
        }

    return windows_task("wikitext", path, crc32_of([ids]), windows, lambda a, b: ids[a:b], summarize)


def lambada_task(path: str | Path, tokenizer: Tokenizer, *, max_seq_len: int) -> EvalTask:
    """Return the LAMBADA task: accuracy and perplexity of the last word of a passage.

    A word is right if each of its tokens is the likeliest after the right ones before it. It is tokenized
    with the space before it, and the passage without the space behind it (the strict form). Of a passage that
    is longer than the model's `max_seq_len` positions, the end is read.

    ValueError as `read_examples`, for a word of more tokens than that or of none, one with no token before
    it, and a file that cannot be read.
    """
    beginning = beginning_of(tokenizer)
    rows, num_truncated, most = [], 0, max_seq_len + 1
    content = read_or_name(path, TEXT_LIMIT)
    for example in read_examples(content, str(path)):
        try:
            context, word = _tokens_of(example, tokenizer)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None
        if not len(word) or not len(beginning) + len(context):
            raise ValueError(
                f"{path}: the tokenizer has no token for {example.word!r}, or for what stands before it"
            )
        if len(word) > max_seq_len:
            raise ValueError(
                f"{path}: the {len(word)} tokens of {example.word[:40]!r} are too many for the model"
            )
        ids = np.concatenate((beginning, context, word))
        num_truncated += len(ids) > most
        rows.append(ScoredText(ids[-most:].astype(np.int64), len(word)))

    def summarize(scores: Sequence[Score]) -> dict[str, Any]:
        nats, correct = nats_of(scores), sum(score.likeliest for score in scores)
        return {
            "accuracy": correct / len(rows),
            "perplexity": exp_or_inf(nats / len(rows)),
            "num_correct": correct,
            "num_examples": len(rows),
            "nats": nats,
            "num_tokens": sum(row.scored for row in rows),
            "num_truncated": num_truncated,
        }

    settings = {"data": str(path), "crc32": crc32_of([row.ids for row in rows])}
    longest_first = sorted(range(len(rows)), key=lambda number: -len(rows[number].ids))
    return EvalTask("lambada", "examples", rows, longest_first, settings, summarize, likeliest=True)


def _tokens_of(example: Example, tokenizer: Tokenizer) -> tuple[TokenIds, TokenIds]:
    """Return the tokens of the context, and of the last word with its leading space.

    The word's are what it adds to the context. Tokenizers that put a space before every text would write two
    before a word on its own.
    """
    context = tokenizer.encode(example.context)
    whole = tokenizer.encode(f"{example.context} {example.word}")
    if len(whole) > len(context) and np.array_equal(whole[: len(context)], context):
        return context, whole[len(context) :]
    return context, tokenizer.encode(f" {example.word}")


def _text(path: str | Path) -> str:
    try:
        return read_or_name(path, TEXT_LIMIT).decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not UTF-8 at byte {error.start}") from None
