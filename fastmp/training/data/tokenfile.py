"""Token files: a directory published with one rename, and checked as it is read.

index.json          what is below, with its own checksum
train.bin           token ids, little-endian uint16 or uint32; every document begins with end-of-text
train.documents     int64 offsets of the documents in train.bin, and its number of tokens
train.checksums     uint32 CRC-32 of each block of 64 KiB of train.bin
validation.*        the same three files of the held-out text; absent if none was held out
tokenizer.json      absent for the byte tokenizer

A block is held against its checksum when a process first reads from it. `tokenwriter` writes them.
"""

from __future__ import annotations

import json
import math
import os
import zlib
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from fastmp.config.data_files import INDEX_LIMIT, TOKENIZER_LIMIT
from fastmp.config.file_access import FOREIGN_ERRORS, open_binary, read_file, read_or_name
from fastmp.training.data.tokenize import ByteTokenizer, FileTokenizer, Tokenizer

FORMAT = "fastmp-tokens-3"
BLOCK_BYTES = 1 << 16  # a token of random place costs one such read and CRC-32, once: about 50 us
TOKENIZERS = ("byte", "bpe", "unigram", "wordpiece", "wordlevel")
_DOCUMENTS_AT_ONCE = 1 << 20
DTYPES: dict[str, np.dtype[Any]] = {"uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}


@dataclass(frozen=True)
class SplitInfo:
    """The index entry of a split. unigram_entropy: the entropy of its bytes, in nats per byte.

    num_changed: documents that their tokens do not give back byte for byte.
    """

    num_tokens: int
    num_documents: int
    num_bytes: int
    num_changed: int
    max_token: int
    checksums_crc32: int
    documents_crc32: int
    unigram_entropy: float

    @property
    def bytes_per_token(self) -> float:
        """Bytes per predicted token (all but the first of the split): nats/byte = nats/token / this."""
        return self.num_bytes / (self.num_tokens - 1)


@dataclass(frozen=True)
class Index:
    """index.json. `source` is the builder's note of where the text came from."""

    dtype: str
    vocab_size: int
    tokenizer: str
    tokenizer_crc32: int
    end_of_text: int
    source: dict[str, Any]
    splits: dict[str, SplitInfo]

    def to_json(self) -> str:
        content = {"format": FORMAT, **asdict(self)}
        return json.dumps({"crc32": _crc_of(content), "content": content}, indent=1)


@dataclass(frozen=True)
class TokenSplit:
    """One split, memory-mapped: `tokens` (num_tokens,), `documents` (num_documents + 1,) offsets into it.

    checksums: CRC-32 of each block of the file of tokens. checked: which blocks have been compared with it.
    """

    path: Path
    info: SplitInfo
    tokens: npt.NDArray[Any]
    documents: npt.NDArray[np.int64]
    end_of_text: int
    checksums: npt.NDArray[np.uint32]
    checked: npt.NDArray[np.bool_]

    def read(self, begin: int, end: int) -> npt.NDArray[Any]:
        """Return tokens `begin` to `end` - 1. Raises ValueError naming a damaged file, block and bytes."""
        size = self.tokens.itemsize
        for block in range(begin * size // BLOCK_BYTES, -(-end * size // BLOCK_BYTES)):
            if not self.checked[block]:
                self.check(block)
        tokens = self.tokens[begin:end]
        if tokens.max(initial=0) > self.info.max_token:
            raise damaged(self.path, f"token id {tokens.max()}, the index says {self.info.max_token} at most")
        return tokens

    def document_begins(
        self, starts: npt.NDArray[np.int64], tokens: npt.NDArray[np.int64]
    ) -> npt.NDArray[np.bool_]:
        """Return a mask of the `tokens` (B, S), read from `starts` (B,), that begin a document."""
        return tokens == self.end_of_text

    def max_documents(self, length: int) -> int:
        """Return the largest number of documents in any `length` consecutive tokens of the ring."""
        return max_documents(
            lambda first, last: self.documents[first:last],
            self.info.num_documents,
            self.info.num_tokens,
            length,
        )

    def texts(self, documents: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Return the first token and the number of tokens of `documents`, without end-of-text.

        Raises ValueError if their offsets are damaged.
        """
        offsets = np.asarray(self.documents)
        begins, ends = offsets[documents], offsets[documents + 1]
        wrong = (begins < 0) | (begins >= ends) | (ends > self.info.num_tokens)
        if wrong.any():
            raise damaged(
                self.path.with_suffix(".documents"),
                f"document {documents[wrong][0]} is said to be of tokens {begins[wrong][0]} to "
                f"{ends[wrong][0] - 1} of {self.info.num_tokens}",
            )
        return begins + 1, ends - begins - 1

    def check(self, block: int) -> None:
        """Read a block and compare its checksum. Raises ValueError as `read`."""
        begin = block * BLOCK_BYTES
        end = min(begin + BLOCK_BYTES, self.tokens.nbytes)
        data = self.tokens.data.cast("B")[begin:end]
        found, expected = zlib.crc32(data), int(self.checksums[block])
        if found != expected:
            raise damaged(
                self.path,
                f"block {block} (bytes {begin} to {end - 1}) has checksum {found:08x}, "
                f"{self.path.stem}.checksums says {expected:08x}",
            )
        self.checked[block] = True


def max_documents(
    starts: Callable[[int, int], npt.NDArray[np.int64]], count: int, num_tokens: int, length: int
) -> int:
    """Return the maximum number of documents, out of `count`, in `length` consecutive tokens of a ring.

    num_tokens: of the ring. starts: (i, j) -> the first tokens of documents i to j - 1.
    """
    most = 0
    for first in range(0, count, _DOCUMENTS_AT_ONCE):
        last = min(first + _DOCUMENTS_AT_ONCE, count)
        begins = starts(first, min(last + length, count))  # no more of them begin in `length` tokens
        around = starts(0, min(length, count)) + num_tokens if last + length > count else begins[:0]
        here = begins[: last - first]
        # A window with the most documents begins with the last token before one.
        behind = np.searchsorted(np.concatenate([begins, around]), here + (length - 1))
        most = max(most, 1 + int((behind - np.arange(len(here))).max()))
    return most


def damaged(path: Path, what: str) -> ValueError:
    """Return the error for a damaged file of a token dataset."""
    return ValueError(
        f"{path}: damaged: {what}; copy the dataset again, or build it again (fastmp data build)"
    )


def dtype_for(vocab_size: int) -> str:
    if vocab_size > 1 << 32:
        raise ValueError(f"token files: a vocabulary of {vocab_size} does not fit in uint32")
    return "uint16" if vocab_size <= 1 << 16 else "uint32"


def read_index(directory: Path) -> Index:
    """Read and check `directory`/index.json. Raises ValueError naming the file and its fault."""
    path = directory / "index.json"
    try:
        raw = read_file(path, INDEX_LIMIT)
    except FileNotFoundError:
        raise ValueError(
            f"{directory}: no token files found (there is no {path.name}); make them: "
            f"fastmp data build --input FILES --out {directory}"
        ) from None
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error.strerror})") from None
    try:
        document = json.loads(raw.decode())
        content, crc = document["content"], document["crc32"]
        intact = _crc_of(content) == crc
    except FOREIGN_ERRORS:
        raise damaged(path, "not an index in JSON") from None
    if not intact:
        raise damaged(path, "its checksum does not match its content")
    if isinstance(content, dict) and content.get("format") != FORMAT:
        raise ValueError(
            f"{path}: format {content.get('format')!r}, this version reads {FORMAT!r}: build it again "
            "(fastmp data build --overwrite)"
        )
    try:
        return _index_of(content)
    except FOREIGN_ERRORS as error:
        raise damaged(path, str(error)) from None


def open_split(directory: Path, index: Index, name: str) -> TokenSplit:
    """Map one split. Raises ValueError naming a file that is missing, cut short or unlike the index."""
    info, dtype = index.splits[name], DTYPES[index.dtype]
    path = directory / f"{name}.bin"
    tokens = _map(path, dtype, info.num_tokens)
    documents = _map(directory / f"{name}.documents", np.dtype("<i8"), info.num_documents + 1)
    if documents[0] != 0 or documents[-1] != info.num_tokens:
        raise damaged(directory / f"{name}.documents", f"offsets do not run from 0 to {info.num_tokens}")
    num_blocks = -(-tokens.nbytes // BLOCK_BYTES)
    checksums = _map(path.with_suffix(".checksums"), np.dtype("<u4"), num_blocks)
    _compare(path.with_suffix(".checksums"), checksums, info.checksums_crc32)
    return TokenSplit(
        path, info, tokens, documents, index.end_of_text, checksums, np.zeros(num_blocks, np.bool_)
    )


def open_tokenizer(directory: Path, index: Index) -> Tokenizer:
    """Return the tokenizer of the files. Raises ValueError if its file is missing or is another one."""
    if index.tokenizer == "byte":
        return ByteTokenizer()
    path = directory / "tokenizer.json"
    raw = read_or_name(path, TOKENIZER_LIMIT)
    if zlib.crc32(raw) != index.tokenizer_crc32:
        raise damaged(path, "its checksum is not that of the tokenizer that the dataset was written with")
    tokenizer = FileTokenizer(raw, source=str(path), end_of_text=index.end_of_text)
    if tokenizer.name != index.tokenizer:
        raise ValueError(f"{path}: is a {tokenizer.name} tokenizer, the index says {index.tokenizer}")
    if tokenizer.vocab_size != index.vocab_size:
        raise ValueError(f"{path}: has {tokenizer.vocab_size} tokens, the index says {index.vocab_size}")
    return tokenizer


def verify(split: TokenSplit) -> None:
    """Read a whole split and compare checksums. Raises ValueError naming the damaged file or block."""
    _compare(split.path.with_suffix(".documents"), split.documents, split.info.documents_crc32)
    for block in range(len(split.checksums)):
        split.check(block)


def _crc_of(content: Any) -> int:
    return zlib.crc32(json.dumps(content, sort_keys=True, separators=(",", ":")).encode())


def _compare(path: Path, data: npt.NDArray[Any], expected: int) -> None:
    found = zlib.crc32(data.data.cast("B"))
    if found != expected:
        raise damaged(path, f"checksum {found:08x}, the index says {expected:08x}")


def _map(path: Path, dtype: np.dtype[Any], count: int) -> npt.NDArray[Any]:
    try:
        with open_binary(path) as file:
            size = os.fstat(file.fileno()).st_size
            if size != count * dtype.itemsize:
                state = "cut short" if size < count * dtype.itemsize else "too long"
                raise damaged(path, f"{state}: {size} bytes, the index says {count * dtype.itemsize}")
            return np.memmap(file, dtype, mode="r", shape=(count,))
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error.strerror})") from None


def _index_of(content: Any) -> Index:
    """Return the Index of parsed `content`. Raises ValueError, TypeError or KeyError for anything else."""
    vocab_size = _integer(content, "vocab_size", 1, 1 << 32)
    if content["dtype"] != dtype_for(vocab_size):
        raise ValueError(f"dtype {content['dtype']!r} does not go with a vocabulary of {vocab_size}")
    if content["tokenizer"] not in TOKENIZERS:
        raise ValueError(f"unknown tokenizer {content['tokenizer']!r}")
    if content["tokenizer"] == ByteTokenizer.name and vocab_size != ByteTokenizer.vocab_size:
        raise ValueError(
            f"vocab_size {vocab_size} is not that of the byte tokenizer, {ByteTokenizer.vocab_size}"
        )
    if not isinstance(content["source"], dict) or not isinstance(content["splits"], dict):
        raise ValueError("source and splits must be objects")
    for value in content["source"].values():
        if any(isinstance(item, list | dict) for item in (value if isinstance(value, list) else [value])):
            raise ValueError("source must hold numbers and texts, and lists of these")
    if set(content["splits"]) not in ({"train"}, {"train", "validation"}):
        raise ValueError(f"splits are {sorted(content['splits'])}, not train and validation")
    return Index(
        dtype=content["dtype"],
        vocab_size=vocab_size,
        tokenizer=content["tokenizer"],
        tokenizer_crc32=_integer(content, "tokenizer_crc32", 0, (1 << 32) - 1),
        end_of_text=_integer(content, "end_of_text", 0, vocab_size - 1),
        source=content["source"],
        splits={name: _split_of(raw, vocab_size) for name, raw in content["splits"].items()},
    )


def _split_of(raw: Any, vocab_size: int) -> SplitInfo:
    if set(raw) != {field.name for field in fields(SplitInfo)}:
        raise ValueError("a split does not have the expected fields")
    entropy = raw["unigram_entropy"]
    if not isinstance(entropy, float | int) or not math.isfinite(entropy) or entropy < 0:
        raise ValueError(f"unigram_entropy {entropy!r} is not a number of nats")
    info = SplitInfo(
        num_tokens=_integer(raw, "num_tokens", 2, 1 << 56),
        num_documents=_integer(raw, "num_documents", 1, 1 << 56),
        num_bytes=_integer(raw, "num_bytes", 1, 1 << 56),
        num_changed=_integer(raw, "num_changed", 0, 1 << 56),
        max_token=_integer(raw, "max_token", 0, 1 << 32),
        checksums_crc32=_integer(raw, "checksums_crc32", 0, (1 << 32) - 1),
        documents_crc32=_integer(raw, "documents_crc32", 0, (1 << 32) - 1),
        unigram_entropy=float(entropy),
    )
    if info.max_token >= vocab_size:
        raise ValueError(f"token id {info.max_token} is beyond the vocabulary of {vocab_size}")
    return info


def _integer(content: Any, name: str, low: int, high: int) -> int:
    value = content[name]
    if type(value) is not int or not low <= value <= high:
        raise ValueError(f"{name} {value!r} is not an integer from {low} to {high}")
    return value
