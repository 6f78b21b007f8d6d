"""Read corpora of Megatron-LM: PREFIX.bin holds token ids, PREFIX.idx their index.

PREFIX.idx is little-endian and packed: b"MMIDIDX\\0\\0", uint64 version (1), uint8 dtype code, uint64 S,
uint64 D; int32 lengths (S,) of the sequences in tokens, int64 offsets (S,) of these in PREFIX.bin in bytes,
int64 documents (D,), which run from 0 to S: document d has the sequences documents[d] to
documents[d + 1] - 1. Corpora of several kinds of data have int8 modes (S,) behind that, 0 for text.

Both files are mapped; the index is read once, to check it. The stream of tokens is a ring: where documents
end with end-of-text (`--append-eod`), each begins behind one, as in token files.
"""

from __future__ import annotations

import bisect
import functools
import math
import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from fastmp.config.data_files import megatron_file
from fastmp.config.file_access import open_binary
from fastmp.training.data.tokenfile import max_documents
from fastmp.training.data.tokenize import Tokenizer

MAGIC = b"MMIDIDX\0\0"
HEADER = struct.Struct("<9sQBQQ")
DTYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}  # 6 and 7 are floating point
CHUNK = 1 << 20  # entries of the index, or tokens, that are checked at once
LOOKED_AT = 1 << 16  # first tokens of a file, whose ids are checked when it is opened
PROBES = 64  # documents, evenly spaced, whose last token is looked at


@dataclass(frozen=True)
class MegatronInfo:
    """Sizes of some documents of a corpus. Of their text, which is not there, nothing is known."""

    num_tokens: int
    num_documents: int
    bytes_per_token: None = None
    unigram_entropy: None = None


@dataclass(frozen=True)
class MegatronFiles:
    """The two files, mapped and checked: `tokens` (num_tokens,), `offsets` (S,) in bytes, `documents` (D,).

    `offsets` and `documents` are unaligned: numpy would copy them whole to search in them, `bisect` does not.
    """

    path: Path
    tokens: npt.NDArray[Any]
    offsets: npt.NDArray[np.int64]
    documents: npt.NDArray[np.int64]

    @property
    def num_documents(self) -> int:
        return len(self.documents) - 1

    def starts(self, first: int, last: int) -> npt.NDArray[np.int64]:
        """Return the first tokens of documents `first` to `last` - 1; D - 1 is the end of the file."""
        return self.starts_of(np.arange(first, min(last, len(self.documents))))

    def starts_of(self, documents: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return the first tokens of `documents`, of any shape, as `starts`."""
        sequences = np.array(self.documents[documents])
        starts = np.full(sequences.shape, self.tokens.size, np.int64)
        inside = sequences < len(self.offsets)
        starts[inside] = self.offsets[sequences[inside]] // self.tokens.itemsize
        return starts

    def begins_between(self, begin: int, end: int) -> npt.NDArray[np.int64]:
        """Return the tokens from `begin` to `end` - 1 that begin documents, ascending."""
        itemsize = self.tokens.itemsize
        bounds = (bisect.bisect_left(self.offsets, token * itemsize) for token in (begin, end))
        first, last = (bisect.bisect_left(self.documents, sequence) for sequence in bounds)
        return self.starts(first, last)

    def largest_id(self) -> int:
        """Return the largest token id, reading the whole file. Raises ValueError for a negative one."""
        largest = 0
        for begin in range(0, self.tokens.size, CHUNK):
            part = self.tokens[begin : begin + CHUNK]
            if part.min() < 0:
                place = begin + int(part.argmin())
                raise ValueError(f"{self.path}: token id {part.min()} at token {place} is negative")
            largest = max(largest, int(part.max()))
        return largest


@dataclass(frozen=True)
class MegatronSplit:
    """Consecutive documents of a corpus: `tokens` (num_tokens,) of `files`, from token `first` on.

    Of the same form as `fastmp.training.data.tokenfile.TokenSplit`.
    """

    files: MegatronFiles
    info: MegatronInfo
    tokens: npt.NDArray[Any]
    first: int
    first_document: int
    tokenizer: Tokenizer

    @property
    def path(self) -> Path:
        return self.files.path

    def read(self, begin: int, end: int) -> npt.NDArray[Any]:
        """Return tokens `begin` to `end` - 1. Raises ValueError for an id that the tokenizer lacks."""
        tokens = self.tokens[begin:end]
        if tokens.size and not 0 <= tokens.min() <= tokens.max() < self.tokenizer.vocab_size:
            place = int(np.argmax((tokens < 0) | (tokens >= self.tokenizer.vocab_size)))
            raise ValueError(
                f"{self.path}: token id {tokens[place]} at token {self.first + begin + place} is beyond the "
                f"{self.tokenizer.vocab_size} tokens of the {self.tokenizer.name} tokenizer: name the one "
                "that the corpus was made with (data.tokenizer)"
            )
        return tokens

    def document_begins(
        self, starts: npt.NDArray[np.int64], tokens: npt.NDArray[np.int64]
    ) -> npt.NDArray[np.bool_]:
        """Return a mask of the `tokens` (B, S), read around the ring from `starts`, that begin a document.

        What the index says counts; end-of-text that is spelt out within a document does not.
        """
        begins = np.zeros(tokens.shape, np.bool_)
        total, length = self.info.num_tokens, tokens.shape[1]
        for row, start in enumerate(starts.tolist()):
            for begin, end in ((start, min(start + length, total)), (0, start + length - total)):
                if begin < end:  # a document's end-of-text is the token before the next one's own first token
                    next_ones = self.files.begins_between(self.first + begin + 1, self.first + end + 1)
                    begins[row, (next_ones - self.first - 1 - start) % total] = True
                if end == total:
                    begins[row, total - 1 - start] = True
        return begins

    def texts(self, documents: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Return the first token and the number of tokens of `documents`, without end-of-text."""
        begins, ends = (self.files.starts_of(self.first_document + documents + i) for i in (0, 1))
        return begins - self.first, np.maximum(ends - begins - self.with_end, 0)

    @functools.cached_property
    def with_end(self) -> bool:
        """True if the first non-empty document ends with end-of-text (`--append-eod`)."""

        def end_of(number: int) -> int:
            following = self.first_document + number + 1
            return int(self.files.starts(following, following + 1)[0])

        number = bisect.bisect_right(range(self.info.num_documents), self.first, key=end_of)
        return int(self.files.tokens[end_of(number) - 1]) == self.tokenizer.end_of_text

    def max_documents(self, length: int) -> int:
        """Return the largest number of documents in any `length` consecutive tokens of the ring."""

        def starts(first: int, last: int) -> npt.NDArray[np.int64]:
            return self.files.starts(self.first_document + first, self.first_document + last) - self.first

        return max_documents(starts, self.info.num_documents, self.info.num_tokens, length)

    def check_ends(self) -> None:
        """Raise ValueError if one of PROBES documents does not end with end-of-text.

        `preprocess_data.py` writes no token, not even that, for an empty text.
        """
        count, end_of_text = self.info.num_documents, self.tokenizer.end_of_text
        for number in np.unique(np.linspace(0, count - 1, min(count, PROBES)).astype(np.int64)).tolist():
            begin, end = self.files.starts(self.first_document + number, self.first_document + number + 2)
            if begin < end and (last := self.files.tokens[end - 1]) != end_of_text:
                raise ValueError(
                    f"{self.path}: document {self.first_document + number} ends with token {last}, "
                    f"not with end-of-text, token {end_of_text} of the {self.tokenizer.name} tokenizer: "
                    "data.document_masking needs a corpus made with --append-eod, and its tokenizer"
                )


def open_files(path: str | Path) -> MegatronFiles:
    """Map and check PREFIX.bin and PREFIX.idx.

    Raises ValueError naming the file that is missing, cut short, empty or inconsistent.
    """
    index, path = megatron_file(path, ".idx"), megatron_file(path, ".bin")
    raw = _map(index, np.dtype("u1"))
    if raw.size < HEADER.size:
        raise ValueError(f"{index}: cut short: {raw.size} bytes, its header has {HEADER.size}")
    magic, version, code, num_sequences, num_entries = HEADER.unpack(raw[: HEADER.size].tobytes())
    if magic != MAGIC:
        raise ValueError(f"{index}: is not an index of Megatron-LM's memory-mapped format (MMIDIDX)")
    if version != 1:
        raise ValueError(f"{index}: has version {version}, and 1 is known")
    if code not in DTYPES:
        raise ValueError(f"{index}: dtype code {code} is not one of integers ({', '.join(map(str, DTYPES))})")
    size = HEADER.size + 12 * num_sequences + 8 * num_entries
    if raw.size not in (size, size + num_sequences):
        raise ValueError(
            f"{index}: has {raw.size} bytes; {num_sequences} sequences and {num_entries} entries of "
            f"documents take {size}, or {size + num_sequences} with modes"
        )
    middle, behind = HEADER.size + 4 * num_sequences, HEADER.size + 12 * num_sequences
    lengths = raw[HEADER.size : middle].view("<i4")
    offsets, documents = raw[middle:behind].view("<i8"), raw[behind:size].view("<i8")
    tokens = _map(path, np.dtype(DTYPES[code]))
    _check(index, path, lengths, offsets, documents, tokens)
    for begin, modes in _chunks(raw[size:]):
        if modes.any():
            place = begin + int(np.argmax(modes != 0))
            raise ValueError(
                f"{index}: sequence {place} has mode {raw[size + place]}: only text is read (mode 0)"
            )
    return MegatronFiles(path, tokens, offsets, documents)


def open_splits(
    path: str | Path, tokenizer: Tokenizer, held_out: float
) -> tuple[MegatronSplit, MegatronSplit | None]:
    """Return the training split of a corpus and the held-out one: its last documents, a share of all.

    At least one document is held out unless the share is 0. Raises ValueError as `open_files`, if a split
    has no document or the held-out one less than two tokens, or for another tokenizer's ids.
    """
    files = open_files(path)
    count = files.num_documents
    last = count - min(math.ceil(held_out * count), count) if held_out > 0 else count
    if last == 0:
        raise ValueError(
            f"{files.path}: {count} document(s) are too few to hold out a share of {held_out:g} "
            "(data.validation_fraction; or data.validation_path)"
        )
    train = _split(files, tokenizer, 0, last)
    train.read(0, LOOKED_AT)
    if last == count:
        return train, None
    validation = _split(files, tokenizer, last, count)
    if validation.info.num_tokens < 2:
        raise ValueError(
            f"{files.path}: the last {count - last} of {count} documents, which would be held out, have "
            f"{validation.info.num_tokens} token(s): nothing to predict (data.validation_fraction; or "
            "data.validation_path)"
        )
    return train, validation


def _split(files: MegatronFiles, tokenizer: Tokenizer, first: int, last: int) -> MegatronSplit:
    begin, end = files.starts(first, first + 1)[0].item(), files.starts(last, last + 1)[0].item()
    info = MegatronInfo(num_tokens=end - begin, num_documents=last - first)
    return MegatronSplit(files, info, files.tokens[begin:end], begin, first, tokenizer)


def _check(
    index: Path,
    path: Path,
    lengths: npt.NDArray[np.int32],
    offsets: npt.NDArray[np.int64],
    documents: npt.NDArray[np.int64],
    tokens: npt.NDArray[Any],
) -> None:
    """Raise ValueError unless sequences are contiguous, fill the file, and documents partition them."""
    end = 0
    for begin, part in _chunks(lengths):
        if part.min() < 0:
            place = int(np.argmax(part < 0))
            raise ValueError(f"{index}: sequence {begin + place} has a length of {part[place]} tokens")
        ends = end + np.cumsum(part, dtype=np.int64)
        expected, found = (ends - part) * tokens.itemsize, offsets[begin : begin + len(part)]
        if (wrong := expected != found).any():
            place = int(np.argmax(wrong))
            raise ValueError(
                f"{index}: sequence {begin + place} is said to lie at byte {found[place]} of {path.name}, "
                f"and the sequences before it end at byte {expected[place]}"
            )
        end = int(ends[-1])
    if tokens.size != end:
        state = "cut short" if tokens.size < end else "too long"
        raise ValueError(
            f"{path}: {state}: {tokens.nbytes} bytes, and {index.name} names {end} tokens of "
            f"{tokens.itemsize}"
        )
    if len(documents) < 2 or documents[0] != 0 or documents[-1] != len(lengths):
        raise ValueError(f"{index}: documents do not run from 0 to its {len(lengths)} sequences")
    for begin, _ in _chunks(documents):
        if (falls := np.diff(documents[begin : begin + CHUNK + 1]) < 0).any():
            raise ValueError(f"{index}: document {begin + int(np.argmax(falls))} ends before it begins")


def _chunks(array: npt.NDArray[Any]) -> Iterator[tuple[int, npt.NDArray[Any]]]:
    """Yield (first index, copy) of the pieces of an array; numpy is fast on aligned copies."""
    for begin in range(0, len(array), CHUNK):
        yield begin, np.array(array[begin : begin + CHUNK])


def _map(path: Path, dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    try:
        with open_binary(path) as file:
            size = os.fstat(file.fileno()).st_size
            if size == 0:
                raise ValueError(f"{path}: is empty (0 bytes)")
            if size % dtype.itemsize:
                raise ValueError(
                    f"{path}: cut short: {size} bytes are no whole number of {dtype.name} values"
                )
            return np.memmap(file, dtype, mode="r").view(np.ndarray)
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error.strerror})") from None
