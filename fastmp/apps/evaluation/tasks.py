"""Evaluation tasks: the rows to score and the figures computed from their scores.

A text begins with the token that the tokenizer's template puts there, or with end-of-text where there is no
template: so its first token is a target as well, and T counts all of them.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, overload

import numpy as np
import numpy.typing as npt

from fastmp.apps.evaluation.scoring import Score, ScoredText
from fastmp.config.data_files import is_megatron
from fastmp.config.file_access import read_or_name
from fastmp.training.data.tokenfile import open_split, open_tokenizer, read_index
from fastmp.training.data.tokenize import TokenIds, Tokenizer

__all__ = ["EvalTask", "ScoringWindow", "ScoringWindows", "heldout_task", "windows_task"]

TEXT_LIMIT = 1 << 32  # bytes


@dataclass(frozen=True)
class ScoringWindow:
    """Window of tokens `begin` to `end` - 1; its targets are the tokens shifted by one.

    The last `scored` of these targets count.
    """

    begin: int
    end: int
    scored: int


@dataclass(frozen=True)
class ScoringWindows(Sequence[ScoringWindow]):
    """The windows over a sequence of `num_targets` + 1 tokens, of at most `length` tokens each.

    Target i of a sequence is its token i + 1, predicted from tokens 0 to i. The first window scores all of
    its targets; every window after it begins `stride` tokens later and scores only its last targets, those
    that no window before it has seen. So every target is scored exactly once, and all but those of the first
    window have at least length - stride tokens before them. Shoeybi et al. 2019 (arXiv 1909.08053, section
    5.3) call the stride the overlap, o = 32 of windows of 1024.

    A stride of `length` cuts the sequence into pieces without overlap. ValueError for a sequence without a
    target, and for a stride that is not from 1 to `length`.
    """

    num_targets: int
    length: int
    stride: int

    def __post_init__(self) -> None:
        if self.num_targets < 1:
            raise ValueError("windows: the text has no token to predict")
        if not 1 <= self.stride <= self.length:
            raise ValueError(
                f"windows: the stride must be from 1 to the window, {self.length}, got {self.stride}"
            )

    def __len__(self) -> int:
        return 1 + -(-max(self.num_targets - self.length, 0) // self.stride)

    @overload
    def __getitem__(self, number: int) -> ScoringWindow: ...
    @overload
    def __getitem__(self, number: slice) -> Sequence[ScoringWindow]: ...
    def __getitem__(self, number: int | slice) -> ScoringWindow | Sequence[ScoringWindow]:
        if isinstance(number, slice):
            return [self[each] for each in range(len(self))[number]]
        begin = range(len(self))[number] * self.stride
        end = min(begin + self.length, self.num_targets)
        seen = begin - self.stride + self.length if begin else 0
        return ScoringWindow(begin, end, end - seen)


@dataclass(frozen=True)
class EvalTask:
    """Rows to score, and a summary of their scores.

    name: of the command. unit: what a row is, in the plural. rows: made when they are asked for.
    order: the numbers of rows in the order in which batches take them, the longest first.
    likeliest: whether the scores must say if targets are the likeliest tokens.
    settings: what the result depends on beside the model, for JSON. summarize: figures from the scores of all
        rows, for JSON.
    """

    name: str
    unit: str
    rows: Sequence[ScoredText]
    order: Sequence[int]
    settings: dict[str, Any]
    summarize: Callable[[Sequence[Score]], dict[str, Any]]
    likeliest: bool = False


@dataclass(frozen=True)
class _WindowRows(Sequence[ScoredText]):
    """The windows of a text, read when they are asked for; read(a, b) gives its tokens a to b - 1."""

    windows: ScoringWindows
    read: Callable[[int, int], npt.NDArray[Any]]

    def __len__(self) -> int:
        return len(self.windows)

    @overload
    def __getitem__(self, number: int) -> ScoredText: ...
    @overload
    def __getitem__(self, number: slice) -> Sequence[ScoredText]: ...
    def __getitem__(self, number: int | slice) -> ScoredText | Sequence[ScoredText]:
        if isinstance(number, slice):
            return [self[each] for each in range(len(self))[number]]
        window = self.windows[number]
        ids = self.read(window.begin, window.end + 1)
        return ScoredText(ids.astype(np.int64), window.scored)


def heldout_task(
    path: str | Path, tokenizer: Tokenizer | None, *, window: int = 1024, stride: int | None = None
) -> EvalTask:
    """Return the held-out task: loss per token and per byte of a validation split or of a text file.

    tokenizer: the model's; None only for a directory, which then is taken to be of the same one.
    stride: None: that of `window`, as when the trainer evaluates.

    ValueError for a directory without validation split, of another tokenizer or damaged, and for a text that
    is not UTF-8 (unless tokens are bytes), is empty or cannot be read; and for files of tokens.
    """
    stride = window if stride is None else stride
    place = Path(path)
    if place.is_dir():
        return _of_split(place, tokenizer, window, stride)
    if is_megatron(place) or (place.suffix == ".bin" and (place.parent / "index.json").is_file()):
        raise ValueError(f"{path}: holds tokens, not text: give a directory of token files, or a text")
    raw = read_or_name(path, TEXT_LIMIT)
    if not raw:
        raise ValueError(f"{path}: there is no text in it")
    assert tokenizer is not None
    try:
        ids, lossless = with_beginning(raw, tokenizer)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    windows = ScoringWindows(len(ids) - 1, window, stride)
    summarize = _per_token_and_byte(windows.num_targets, len(raw), lossless)
    return windows_task("heldout", path, crc32_of([ids]), windows, lambda a, b: ids[a:b], summarize)


def _of_split(directory: Path, tokenizer: Tokenizer | None, window: int, stride: int) -> EvalTask:
    index = read_index(directory)
    if "validation" not in index.splits:
        raise ValueError(
            f"{directory}: no text was held out (validation_fraction 0); "
            "build it again with --validation-fraction 0.05"
        )
    theirs = open_tokenizer(directory, index)
    if tokenizer is not None and _describe(theirs) != _describe(tokenizer):
        raise ValueError(
            f"{directory}: has the tokens of another tokenizer ({theirs.name}, {theirs.vocab_size} tokens) "
            f"than the model's ({tokenizer.name}, {tokenizer.vocab_size} tokens); if they are the same, "
            f"--tokenizer {directory} says so"
        )
    split = open_split(directory, index, "validation")
    windows = ScoringWindows(split.info.num_tokens - 1, window, stride)
    summarize = _per_token_and_byte(windows.num_targets, split.info.num_bytes, split.info.num_changed == 0)
    return windows_task("heldout", directory, split.info.checksums_crc32, windows, split.read, summarize)


def _describe(tokenizer: Tokenizer) -> tuple[str, int, str | None]:
    return tokenizer.name, tokenizer.end_of_text, tokenizer.to_json()


def _per_token_and_byte(
    num_tokens: int, num_bytes: int, lossless: bool
) -> Callable[[Sequence[Score]], dict[str, Any]]:
    def summarize(scores: Sequence[Score]) -> dict[str, Any]:
        nats = nats_of(scores)
        return {
            "nats_per_token": nats / num_tokens,
            "nats_per_byte": nats / num_bytes,
            "perplexity_per_token": exp_or_inf(nats / num_tokens),
            "nats": nats,
            "num_tokens": num_tokens,
            "num_bytes": num_bytes,
            "lossless": lossless,
        }

    return summarize


def windows_task(
    name: str,
    path: str | Path,
    crc32: int,
    windows: ScoringWindows,
    read: Callable[[int, int], npt.NDArray[Any]],
    summarize: Callable[[Sequence[Score]], dict[str, Any]],
) -> EvalTask:
    """Return the task of scoring the windows of a text whose tokens a to b - 1 are read(a, b)."""
    settings = {"data": str(path), "crc32": crc32, "window": windows.length, "stride": windows.stride}
    return EvalTask(name, "windows", _WindowRows(windows, read), range(len(windows)), settings, summarize)


def with_beginning(content: bytes, tokenizer: Tokenizer) -> tuple[TokenIds, bool]:
    """Return the ids of a text after its begin token, and True if they decode to the same bytes."""
    ids = tokenizer.encode(content)
    beginning = beginning_of(tokenizer) or [tokenizer.end_of_text]
    return np.concatenate((beginning, ids)), tokenizer.decode_bytes(ids) == content


def beginning_of(tokenizer: Tokenizer) -> list[int]:
    """Return the begin token of the tokenizer's template as a list; empty if there is none."""
    nothing, something = tokenizer.encode_prompt(""), tokenizer.encode_prompt("a")
    return nothing[:1] if nothing[:1] == something[:1] else []


def crc32_of(ids: Sequence[TokenIds]) -> int:
    """Return a checksum of all ids, which identifies file, tokenizer and detokenizer."""
    crc32 = 0
    for each in ids:
        crc32 = zlib.crc32(each.tobytes(), crc32)
    return crc32


def nats_of(scores: Sequence[Score]) -> float:
    """Return -log P of all targets, correctly rounded and thus independent of the order of rows."""
    return -math.fsum(score.log_prob for score in scores)


def exp_or_inf(nats: float) -> float:
    """Return exp(nats), infinite where it exceeds the largest float."""
    try:
        return math.exp(nats)
    except OverflowError:
        return math.inf
